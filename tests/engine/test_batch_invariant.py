"""The bitwise mode: an answer's bits are those of a cold run alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from milepost.config import EngineConfig
from milepost.engine.assembly.bitwise import facts_of, refuse_states
from milepost.engine.assembly.sizing import pool_shape
from milepost.engine.prompts import read_prompt
from milepost.errors import ConfigError
from milepost.models import load_model
from milepost.parallel import ALONE, Ranks
from tests.engines import answer, ask, ask_all, greedy, prompt, sampled, save_tiny, tokens


@pytest.fixture(scope="module")
def gated_delta(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5", torch.float32)


def identity_of(llm):
    return llm.llm_engine.scheduler.cache.identity


def test_keys_are_not_those_of_the_default_mode(gated_delta, monkeypatch):
    ours = identity_of(gated_delta.open(batch_invariant=True))
    assert ours != identity_of(gated_delta.open())
    assert ours == identity_of(gated_delta.open(batch_invariant=True))
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert ours != identity_of(gated_delta.open(batch_invariant=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mamba_ssm_cache_dtype": "bfloat16", "cache_memory": "split"},
            "mamba_ssm_cache_dtype='bfloat16' rounds states",
        ),
        (
            {
                "speculative_config": {
                    "method": "suffix",
                    "num_speculative_tokens": 1,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [0.5],
                }
            },
            "rejection_sample_method='synthetic' accepts drafts at random",
        ),
    ],
)
def test_settings_that_break_the_promise_are_refused_by_name(gated_delta, options, message):
    with pytest.raises(ConfigError, match=message):
        gated_delta.open(batch_invariant=True, **options)
    gated_delta.open(**options)


def test_a_preempted_answer_is_computed_again_in_pieces(gated_delta):
    """An engine that verifies drafts takes the tokens that it knows as drafts."""
    prompts = [tokens(40 + 17 * number, number) for number in range(4)]
    wishes = [sampled(100, temperature=number % 2) for number in range(4)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 50}
    llm = gated_delta.open(
        batch_invariant=True,
        num_pages=9,
        num_slots=8,
        max_model_len=320,
        max_num_batched_tokens=70,
        speculative_config=drafts,
    )
    stats = llm.llm_engine.scheduler.stats
    alone = [ask_all(llm, [each], [wish])[0] for each, wish in zip(prompts, wishes, strict=True)]
    assert not stats.num_preemptions
    num_alone = stats.decode_tokens
    together = ask_all(llm, prompts, wishes)
    assert stats.num_preemptions
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]
    assert stats.decode_tokens - 2 * num_alone > 20
    assert not stats.num_draft_tokens, "nothing is looked up"


def test_newcomers_interrupt_an_answer_that_is_canonicalised(gated_delta):
    """After any number of its steps, and one of them is given up itself. What is shared by then has
    the bits of a cold run."""
    llm = gated_delta.open(
        batch_invariant=True, num_pages=24, num_slots=5, max_num_batched_tokens=64
    )
    cold = gated_delta.open(batch_invariant=True, enable_prefix_caching=False, max_num_seqs=1)
    engine, reused = llm.llm_engine, []
    for num_steps in range(6):
        first = tokens(90, num_steps)
        (output,) = ask(llm, first, params=greedy(150))
        assert engine.do_idle_work()
        for _ in range(num_steps):
            engine.step()
        chat = [*first, *answer(output), *tokens(20, num_steps)]
        gone = engine.add(read_prompt(prompt(chat[:150]), None), sampled(9))
        for _ in range(num_steps % 3):
            engine.step()
        engine.abort(gone)
        (found,), (expected,) = (ask(each, chat, params=sampled(9)) for each in (llm, cold))
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs
        reused.append(found.num_cached_tokens)
    assert reused[0] < 192, "it had not begun"
    assert reused[-1] == 192, "it was complete"


def test_keys_say_how_ranks_are_added_up():
    config, device = EngineConfig(batch_invariant=True), torch.device("cpu")
    gathered, kernels = (SimpleNamespace(order=order) for order in ("gathered", "by kernels"))
    teams = [
        ALONE,
        Ranks(size=2, link=gathered),
        Ranks(size=2, link=gathered, splits_experts=True),
        Ranks(size=2, link=kernels),
    ]
    found = [facts_of(config, device, each, is_fused=False) for each in teams]
    assert all(one != other for one, other in combinations(found, 2))
    second = replace(teams[1], rank=1)
    assert facts_of(config, device, second, is_fused=False) == found[1]


def test_heads_without_a_kernel_are_refused_on_a_gpu(tmp_path):
    model, _ = load_model(save_tiny(tmp_path, "olmo_hybrid", torch.float32).folder)
    config = EngineConfig(batch_invariant=True)
    shape = pool_shape(config, model, torch.device("cpu"), None)
    refuse_states(config, shape, is_fused=False)
    with pytest.raises(ConfigError, match="heads of 32 by 12 are not supported on a GPU"):
        refuse_states(config, shape, is_fused=True)
