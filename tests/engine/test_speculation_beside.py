"""Drafts beside what else an engine can do at the same time: answers, their log-probabilities and
hits are those of the same engine without drafts.

Drafts are both the head's, which runs behind every step, and an oracle's, of which most come true.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost import LLM, RequestOutput
from milepost.engine.loop.group import RequestGroup
from milepost.engine.prompts import Prompt
from milepost.tiers.holdings import MeasuredRates
from tests.engine.speculating import Oracle, consult
from tests.engines import (
    WIDE_STATES,
    Tiny,
    greedy,
    num_held,
    sampled,
    save_tiny,
    tiering_of,
    tokens,
)
from tests.invariants import check
from tests.mtp import add_head

DRAFTING = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}
SMALL = {"num_pages": 24, "num_slots": 6}
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {
        "num_pages": 96,
        "num_slots": 24,
        "max_num_batched_tokens": 70,
        "async_scheduling": True,
    },
    "float8 from host": {**SMALL, "cache_host_gib": 0.05, "kv_cache_dtype": "fp8"},
    "restart": {**SMALL, "async_scheduling": True},
    "tight": {"page_size": 16, "num_pages": 26, "num_slots": 7, "async_scheduling": True},
}
PROMPTS = [tokens(90), tokens(150, seed=1), tokens(60, seed=2), tokens(75, seed=3)]
WISHES = [
    sampled(28, n=2, temperature=0.7, top_p=0.9, repetition_penalty=1.2, logprobs=2),
    greedy(30, presence_penalty=0.5, logit_bias={5: 2.0}, min_tokens=8, stop_token_ids=[7, 70]),
    greedy(40),
    sampled(26, n=2, min_p=0.02, frequency_penalty=0.3, temperature=1.1),
]
ABORTED = 2

Known = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    sizes = WIDE_STATES
    made = save_tiny(tmp_path_factory.mktemp("beside"), "qwen3_5", torch.float64, **sizes)
    add_head(made.folder)
    return made


def errs(place: int) -> bool:
    """Of five drafts one."""
    return random.Random(place).random() < 0.2


def ask_first(llm: LLM) -> list[RequestOutput]:
    engine = llm.llm_engine
    jobs = [engine.add(Prompt(token_ids=p), w) for p, w in zip(PROMPTS, WISHES, strict=True)]
    run(llm, jobs, aborted=jobs[ABORTED])
    return [job.output() for job in jobs if job is not jobs[ABORTED]]


def ask_second(llm: LLM, first: list[RequestOutput]) -> list[RequestOutput]:
    """Behind each answer, and behind a prompt inside a page."""
    answers = [(o.prompt_token_ids, o.outputs[0].token_ids) for o in first]
    further = [[*given, *answer, *tokens(20, seed=9)] for given, answer in answers]
    further.append([*PROMPTS[1][:130], *tokens(40, seed=8)])
    jobs = [llm.llm_engine.add(Prompt(token_ids=each), greedy(24)) for each in further]
    run(llm, jobs)
    return [job.output() for job in jobs]


def run(llm: LLM, jobs: list[RequestGroup], aborted: RequestGroup | None = None) -> None:
    """To their ends; one is given up in the middle of its answer."""
    engine = llm.llm_engine
    while engine.has_work:
        engine.step()
        if aborted is not None and aborted.num_output_tokens >= 9:
            engine.abort(aborted)
            check(engine.scheduler.cache)
            aborted = None
    assert all(job.is_finished for job in jobs)
    engine.flush()
    check(engine.scheduler.cache)
    assert num_held(llm) == (0, 0)


def assert_alike(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        for own, wanted in zip(one.outputs, other.outputs, strict=True):
            assert own.token_ids == wanted.token_ids
            assert own.finish_reason == wanted.finish_reason
            pairs = zip(own.logprobs, wanted.logprobs, strict=True)
            for entry, wished in pairs:
                assert entry.keys() == wished.keys()
                assert all(abs(entry[t].logprob - wished[t].logprob) < 1e-9 for t in entry)


class Asked:
    """One kind of engine, with drafts if the answers are known, and what it says in two turns:
    between them its device forgets all, where there is a tier."""

    def __init__(self, tiny: Tiny, name: str, folder: Path, known: Known | None = None) -> None:
        self._tiny, self._known = tiny, known
        self._options = ENGINES[name] | (DRAFTING if known is not None else {})
        if name == "restart":
            self._options |= {"cache_dir": str(folder), "cache_host_gib": 0.05}
        llm = self._open()
        self.first = ask_first(llm)
        self.stats = [llm.llm_engine.scheduler.stats]
        if name == "restart":
            llm.llm_engine.close()
            llm = self._open()
            self.stats.append(llm.llm_engine.scheduler.stats)
        elif "host" in name:
            assert llm.llm_engine.scheduler.cache.reset()
        self.second = ask_second(llm, self.first)
        llm.llm_engine.close()

    def _open(self) -> LLM:
        llm = self._tiny.open(**self._options)
        if tiering_of(llm.llm_engine) is not None:  # nothing is worth computing
            rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
            tiering_of(llm.llm_engine).tiers.holdings.rates = rates
        return llm if self._known is None else consult(llm, Oracle(self._known, errs))

    def known(self) -> Known:
        """For an oracle."""
        both = (*self.first, *self.second)
        return [(each.prompt_token_ids, each.outputs[0].token_ids) for each in both]

    def hits(self) -> list[tuple[int, dict[str, int]]]:
        return [(each.num_cached_tokens, each.cache_report.loaded) for each in self.second]


@pytest.mark.parametrize("name", ENGINES)
def test_answers_and_hits_are_those_without_drafts(tiny, tmp_path, name):
    expected = Asked(tiny, name, tmp_path / "plain")
    found = Asked(tiny, name, tmp_path / "drafts", expected.known())
    assert_alike(found.first, expected.first)
    assert_alike(found.second, expected.second)
    num_accepted = sum(stats.num_accepted_tokens for stats in found.stats)
    assert 40 < num_accepted < sum(stats.num_draft_tokens for stats in found.stats)
    if "tight" in name:
        assert found.stats[0].num_preemptions > 0
        return
    assert found.hits() == expected.hits()
    tier = {"restart": "disk", "float8 from host": "host"}.get(name)
    hits = found.hits()[:-1]
    assert all(num_cached > 64 for num_cached, _ in hits)
    if tier is not None:  # one may find on the device what another has loaded
        loads = [set(loaded) for _, loaded in hits]
        assert {tier} in loads
        assert all(each <= {tier} for each in loads)
