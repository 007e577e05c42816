"""The embedded model's own head on a GPU: its drafts are accepted as often as on a CPU, passes in
graphs are passes launched one by one, and answers are those without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from milepost import LLM, SamplingParams
from tests.engines import answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEAD = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
QUESTIONS = [
    "What does `str.partition` do?",
    "What is the module `json` for?",
    "How do I use `textwrap.dedent`?",
    "When is `KeyError` raised?",
]
Drafts = list[Mapping[int, Sequence[int]]]


def open_llm(**options: Any) -> LLM:
    sizes = {"num_pages": 128, "num_slots": 24, "max_num_seqs": 4, "max_model_len": 1024}
    return LLM(dtype="float32", **sizes, **options)


def talk(llm: LLM, params: SamplingParams) -> tuple[list[list[int]], Drafts]:
    """The answers, and what was drafted behind every step."""
    runner, seen = llm.llm_engine.runner, []
    collect = runner.collect

    def collect_drafts(*arguments: Any) -> Any:
        output = collect(*arguments)
        seen.append({n % len(QUESTIONS): tuple(run) for n, run in output.read_drafts().items()})
        return output

    runner.collect = collect_drafts
    llm.reset_prefix_cache()
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(messages, params, use_tqdm=False)
    runner.collect = collect
    return [answer(output) for output in outputs], seen


@pytest.fixture(scope="module")
def engines() -> tuple[LLM, LLM, LLM]:
    """Without the head; with it, launched one by one and in graphs."""
    return (
        open_llm(enforce_eager=True),
        open_llm(enforce_eager=True, speculative_config=HEAD),
        open_llm(speculative_config=HEAD),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_accepted_and_change_no_answer(
    engines: tuple[LLM, LLM, LLM], temperature: float
) -> None:
    """(A rounding of a product of several rows may turn an answer; of four at most one.)"""
    plain, eager, graphs = engines
    params = SamplingParams(temperature=temperature, max_tokens=96, seed=5)
    stats = graphs.llm_engine.scheduler.stats
    verified, accepted = stats.num_drafts, list(stats.num_accepted_by_position) or [0, 0, 0]
    expected, _ = talk(plain, params)
    answers, drafts = talk(graphs, params)
    assert sum(a == b for a, b in zip(answers, expected, strict=True)) >= 3
    by_place = [
        (now - then) / (stats.num_drafts - verified)
        for now, then in zip(stats.num_accepted_by_position, accepted, strict=True)
    ]
    assert by_place[0] > 0.6
    assert by_place[1] > 0.15
    assert (answers, drafts) == talk(eager, params)
