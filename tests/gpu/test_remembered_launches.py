"""An engine's launches outside graphs go past Triton once an alike one has been made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = """
import cProfile, pstats, sys
from milepost import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, max_model_len=1024)
def ask(first):
    prompt = {"prompt_token_ids": [first + i % 90 for i in range(700)]}
    llm.generate([prompt], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
for first in range(1, 6):
    ask(first)
profiler, engine = cProfile.Profile(), type(llm.llm_engine)
step = engine.step
def profiled(self):
    profiler.enable()
    try:
        return step(self)
    finally:
        profiler.disable()
engine.step = profiled
ask(6)
calls = {(name, file.rpartition("/")[2]): row[1]
         for (file, _, name), row in pstats.Stats(profiler).stats.items()}
print(calls[("describe", "launches.py")], calls.get(("run", "jit.py"), 0))
"""


def test_an_engine_remembers_its_launches(tmp_path: Path) -> None:
    """In a process of its own: the engine's start is what imports the kernels."""
    save_tiny(tmp_path, "qwen3_next", torch.bfloat16)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    remembered, by_triton = map(int, ran.stdout.split()[-2:])
    # The first launch of a kind, such as with another alignment, is Triton's.
    assert 20 * by_triton <= remembered > 0
