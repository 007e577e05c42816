"""The options of `LLM` are typed, and the types are those of the configuration."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import milepost
from milepost.config import EngineConfig
from milepost.engine.options import EngineOptions

MAY_BE_JSON = {"speculative_config", "kv_events_config", "kv_transfer_config", "hf_overrides"}
MAY_BE_JSON |= {"limit_mm_per_prompt", "mm_processor_kwargs"}

PROGRAM = """
from milepost import LLM, SamplingParams

llm = LLM("model", dtype="bfloat16", cache_dir="kept", speculative_config={"method": "suffix"})
outputs = llm.chat([{"role": "user", "content": "a"}], SamplingParams(n=2), cache_salt="b")
reveal_type(outputs[0].outputs[0].text)
LLM("model", dtypee="bfloat16")
LLM("model", dtype="bfloat61")
llm.generate("a", best_of=2)
"""


def test_options_are_the_fields_of_the_configuration():
    options, fields = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    del fields["model"]  # the first argument
    assert options.keys() == fields.keys()
    for name in fields.keys() - MAY_BE_JSON:
        assert options[name] == fields[name], name
    for name in MAY_BE_JSON:
        assert set(get_args(options[name])) == {*get_args(fields[name]), Mapping[str, Any], str}
        assert NoneType in get_args(options[name])


def test_a_type_checker_finds_misspelt_options(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent"]
    command += ["--no-site-packages", "--ignore-missing-imports", "--cache-dir", tmp_path / "cache"]
    environment = {"MYPYPATH": str(Path(milepost.__file__).parents[1])}
    done = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    said = [line.partition(": ")[::2] for line in done.stdout.splitlines() if "defined" not in line]
    assert [where for where, _ in said[:-1]] == [f"program.py:{line}" for line in (6, 7, 8, 9)]
    for (_, text), word in zip(said, ("str", "dtypee", "bfloat61", "best_of"), strict=False):
        assert word in text
