"""Engines whose steps run on the fused kernels, in Triton's interpreter."""

from __future__ import annotations

from milepost import LLM
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import largest_step
from tests.engines import Tiny, ask, cached, greedy, tokens


def run_fused(llm: LLM) -> None:
    """Has an engine on the reference kernels run its steps on the fused ones."""
    runner = llm.llm_engine.runner
    runner.executor = DeviceExecutor(
        runner.executor.model,
        runner.pools,
        num_requests=16,
        max_model_len=1024,
        largest=largest_step(max_num_seqs=64, max_num_batched_tokens=8192),
    )


def check_answers(tiny: Tiny) -> None:
    """Checks an engine on the fused kernels, cold, in chunks, with decodes side by side, and after
    hits."""
    llm = tiny.open(num_pages=64, num_slots=16, page_size=16, max_num_batched_tokens=96)
    run_fused(llm)
    params = greedy(4)
    for prompts, expected in (([130], [0]), ([130], [128]), ([130, 3], [128, 0])):
        outputs = ask(llm, *(tokens(num) for num in prompts), params=params)
        tiny.check(outputs, params)
        assert cached(outputs) == expected
