"""Several ranks return what one returns, hit what one hits, and say the same of it: the engine's
own equality tests, with engines of two and of four ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from milepost import LLM, RequestOutput
from milepost.engine.assembly import setup
from milepost.errors import EngineDeadError
from milepost.sampling_params import StructuredOutputs
from tests import engines
from tests.engine import test_equality as one
from tests.engines import THREE_LAYERS, answer, ask, greedy, sampled, save_tiny, tokens
from tests.parallel.team import ThreadTeam

CASES = {
    "hit": partial(one.test_hit, page_size=16),
    "answer_end": partial(one.test_answer_end, page_size=64),
    "preempted": partial(one.test_preempted_and_resumed, pages=(64, 18)),
    "aborted": one.test_abort_in_mid_stream,
}
SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **THREE_LAYERS,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float64, **SIZES)


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(setup, "Team", ThreadTeam)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in CASES), ("preempted", 4), ("aborted", 4)]
)
def test_as_on_one(name, size, checkpoint, monkeypatch):
    """The engine that answers are compared with has one rank."""

    def make(*arguments, **options):
        is_cold = options.get("enable_prefix_caching") is False
        return LLM(*arguments, tensor_parallel_size=1 if is_cold else size, **options)

    monkeypatch.setattr(engines, "LLM", make)
    CASES[name](checkpoint)


@pytest.mark.parametrize(
    ("size", "options"), [(4, {}), (2, {"enable_expert_parallel": True})], ids=["width", "experts"]
)
def test_reports_are_those_of_one(size, options, checkpoint):
    """Of prompts that share, chats and what is sampled: every number of every report."""
    several, alone = (checkpoint.open(tensor_parallel_size=n, **options) for n in (size, 1))
    for params in (greedy(8), sampled(8, temperature=0.8, presence_penalty=0.5)):
        turns = [tokens(300) + tokens(40, seed=index) for index in range(3)]
        for _ in range(2):
            found, expected = (ask(llm, *turns, params=params) for llm in (several, alone))
            for left, right in zip(found, expected, strict=True):
                assert answer(left) == answer(right)
                assert left.cache_report == right.cache_report
            pairs = zip(turns, found, strict=True)
            turns = [[*own, *answer(output), 5, 6] for own, output in pairs]


def test_features_at_once_are_those_of_one(checkpoint):
    """Drafts of suffixes, float8 KV, several answers with what else was likely; and again once all
    is forgotten, and once the memory was given back."""
    several, alone = (
        checkpoint.open(
            tensor_parallel_size=n,
            kv_cache_dtype="fp8",
            speculative_config={"method": "suffix", "num_speculative_tokens": 2},
        )
        for n in (2, 1)
    )
    prompts = [tokens(40) * 3, [5, 6, 7, 8] * 20]
    params = sampled(8, temperature=0.7, n=2, logprobs=2)
    for forget in ("reset_prefix_cache", "release_cache"):
        found, expected = (ask(llm, *prompts, params=params) for llm in (several, alone))
        for left, right in zip(found, expected, strict=True):
            assert [answer(left, index) for index in (0, 1)] == [
                answer(right, index) for index in (0, 1)
            ]
            assert left.cache_report == right.cache_report
        assert all(getattr(llm.llm_engine, forget)() for llm in (several, alone))
    assert ask(several, *prompts)[0].cache_report.reused == 0


def test_an_engine_that_loses_a_rank_ends_the_others(checkpoint):
    """And says so from then on."""
    llm = checkpoint.open(tensor_parallel_size=2)
    ask(llm, tokens(70))
    team = llm.llm_engine._team
    team.meeting.abort()
    with pytest.raises(EngineDeadError, match="BrokenBarrierError"):
        ask(llm, tokens(70, seed=1))
    assert not team.close.alive
    with pytest.raises(EngineDeadError, match="make a new engine"):
        ask(llm, tokens(70))


def test_the_embedded_model_answers_as_on_one_with_all_that_can_be_asked():
    """Drafts of suffixes and of its head, float8 KV, a form, penalties, likelihoods and stop
    strings, where memory is so tight that requests are preempted."""
    forms = StructuredOutputs(regex="(ab|cd){3,6}"), StructuredOutputs(choice=["twice", "once"])
    text = "def area(w, h): return w * h\n" * 9
    wishes = [
        greedy(24),
        greedy(16, structured_outputs=forms[0]),
        sampled(24, seed=1, presence_penalty=0.6, repetition_penalty=1.1, logprobs=3),
        sampled(16, seed=2, structured_outputs=forms[1], logprobs=1),
        sampled(24, seed=3, stop=["w *"], frequency_penalty=0.2),
    ]
    told = []
    for size in (1, 2):
        llm = LLM(
            tensor_parallel_size=size,
            dtype="float64",
            kv_cache_dtype="fp8",
            speculative_config={
                "method": ["suffix", "mtp"],
                "num_speculative_tokens": 3,
                "adaptive": False,
            },
            num_slots=8,
            num_pages=4,
            max_num_seqs=4,
        )
        params = [replace(each, ignore_eos=not each.structured_outputs) for each in wishes]
        outputs = llm.generate([text + str(i) for i in range(5)], params, use_tqdm=False)
        stats = llm.llm_engine.scheduler.stats
        assert stats.num_preemptions
        assert stats.num_accepted_tokens
        counts = stats.num_steps, stats.num_draft_tokens, stats.num_accepted_by_position
        told.append(([(_said(each), each.cache_report) for each in outputs], counts))
    assert told[0] == told[1]


def _said(output: RequestOutput) -> tuple[Any, ...]:
    """All of an answer; likelihoods but for what sums round."""
    own = output.outputs[0]
    likely = [{i: round(each.logprob, 6) for i, each in e.items()} for e in own.logprobs or ()]
    return own.token_ids, own.text, own.finish_reason, own.stop_reason, likely
