"""guidellm: a benchmark of a few requests; none of them fails.

Arguments: the server's address, and the folder of the model, whose tokenizer is used.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, TOKENIZER = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    output = Path(folder) / "report.json"
    command = [
        str(Path(sys.executable).parent / "guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={URL},model=tiny",
        "--profile",
        "kind=synchronous",
        "--constraint",
        "kind=max_requests,count=4",
        "--tokenizer",
        f"kind=huggingface_auto,model={TOKENIZER}",
        "--data",
        "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--output",
        f"kind=json,path={output}",
        "--disable-console-interactive",
    ]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4, benchmark["requests"]
    assert not benchmark["requests"]["errored"]
