"""Hits of the bitwise mode, with a real model: docs/determinism.md has the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import milepost
from tests.engine.test_hits import SMALL
from tests.engines import answer, ask, cached, greedy, open_llm, save_tiny, tokens

PAGE = Path(milepost.__file__).parents[2] / "docs" / "determinism.md"
GRID = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tiny = save_tiny(tmp_path_factory.mktemp("small"), "qwen3_next", torch.float32, **SMALL)
    return tiny.folder


@pytest.fixture(params=[False, True], ids=["default", "bitwise"])
def llm(folder, request):
    return open_llm(folder, num_pages=256, num_slots=64, batch_invariant=request.param)


def documented(case: str, llm) -> list[int]:
    """What the page says of a case in this mode."""
    (cells,) = re.findall(rf"^\| {re.escape(case)} \| (.*) \|$", PAGE.read_text(), re.M)
    default, bitwise = cells.split(" | ")
    said = bitwise if llm.llm_engine.config.batch_invariant else default
    return [int(each) for each in re.findall(r"\d+", said)]


@pytest.mark.parametrize(
    ("shared", "own", "marks", "num", "case"),
    [
        (100, 64, [], 4, "100 shared + 64 own tokens, four requests"),
        (400, 100, [], 4, "400 shared + 100 own tokens, four requests"),
        (400, 100, [400], 4, "the same, the shared part marked"),
        (1500, 700, [], 3, "1500 shared + 700 own, three requests"),
    ],
)
def test_shared_prefix(llm, shared, own, marks, num, case):
    prompts = [tokens(shared, 0) + tokens(own, 1 + i) for i in range(num)]
    outputs = [ask(llm, each, params=greedy(1), cache_marks=marks)[0] for each in prompts]
    assert cached(outputs) == documented(case, llm)
    assert shared - max(cached(outputs)) < GRID


def test_same_prompt_twice(llm):
    outputs = [ask(llm, tokens(2200), params=greedy(1))[0] for _ in range(2)]
    assert cached(outputs) == documented("a 2200-token prompt sent twice", llm)


def test_second_turn_of_a_chat(llm):
    is_bitwise, found = llm.llm_engine.config.batch_invariant, []
    for rests in [False, True][: 1 + is_bitwise]:
        (first,) = ask(llm, tokens(1000, rests), params=greedy(200))
        while rests and llm.llm_engine.do_idle_work():
            while llm.llm_engine.has_work:
                llm.llm_engine.step()
        history = [*tokens(1000, rests), *answer(first)]
        found += cached(ask(llm, [*history, *tokens(50, 5)], params=greedy(1)))
    assert found == documented("a chat's second turn, after 1000 in and 200 out", llm)
    assert len(history) - found[-1] < GRID
