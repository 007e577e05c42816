"""lm-eval: loglikelihoods and generations of three local tasks; the first agree with our own.

Arguments: the server's address, and the folder of the model, whose tokenizer is used.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval
from lm_eval.tasks import TaskManager

URL, TOKENIZER = sys.argv[1:3]
TASKS = Path(__file__).parent / "tasks"
os.chdir(TASKS)

model = {
    "model": "tiny",
    "base_url": f"{URL}/v1/completions",
    "tokenizer": TOKENIZER,
    "tokenizer_backend": "huggingface",
    "num_concurrent": 2,
    "max_length": 512,
}
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=model,
    tasks=["words", "words_until", "words_rolling"],
    task_manager=TaskManager(include_path=str(TASKS)),
    log_samples=True,
)
for name in ("words", "words_until", "words_rolling"):
    assert len(found["samples"][name]) == 3, found["samples"].keys()
for sample in found["samples"]["words"]:
    for logprob, is_greedy in sample["filtered_resps"]:
        assert float(logprob) < 0, sample
        assert is_greedy in (True, False)
assert found["results"]["words_rolling"]["word_perplexity,none"] > 1
print(found["results"])
