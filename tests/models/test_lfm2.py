"""LFM2, short convolutions whose states lie beside pages: logits beside transformers', every page
boundary resumed, and answers that no hit changes."""

from __future__ import annotations

import pytest
import torch

from milepost.errors import UnsupportedModelError
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import (
    VOCAB_SIZE,
    answer,
    ask,
    cached,
    greedy,
    metric,
    num_held,
    open_llm,
    save_tiny,
    tokens,
)
from tests.models.resuming import Resuming

CONFIGURATIONS = {
    "plain": {},
    "experts": {"moe_intermediate_size": 24, "routed_scaling_factor": 1.7},
    "experts_by_score_alone": {
        "conv_L_cache": 2,
        "hidden_size": 40,
        "layer_types": ["conv", "full_attention"],
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_dense_layers": 0,
        "num_experts": 7,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 5,
        "use_expert_bias": False,
    },
    "experts_in_the_last_layer": {
        "conv_bias": True,
        "layer_types": ["conv", "conv", "conv"],
        "num_dense_layers": 2,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "bias": {
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 7,
        "conv_L_cache": 4,
        "conv_bias": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "odd_sizes": {
        "conv_L_cache": 2,
        "hidden_size": 40,
        "layer_types": ["full_attention", "conv"],
        "num_attention_heads": 5,
        "num_hidden_layers": 2,
        "num_key_value_heads": 5,
    },
    "convolutions_alone": {"layer_types": ["conv", "conv"], "num_hidden_layers": 2},
    "a_kernel_longer_than_a_page": {"conv_L_cache": 20},
}
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    family = "lfm2_moe" if name.startswith("experts") else "lfm2"
    reference = save(family, tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_pages=256)
    Resuming.beside(llm, reference).run_through_pages()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("lfm2"), "lfm2", torch.float64, **SMALL)


@pytest.mark.parametrize(
    ("shared", "own", "marks", "expected"),
    [
        (100, 64, [], [0, 64, 64, 64]),
        (100, 64, [100], [0, 64, 64, 64]),
        (400, 100, [], [0, 384, 384, 384]),
        (1500, 700, [], [0, 1472, 1472]),
        (2200, 0, [], [0, 2176]),
        (2176, 0, [], [0, 2112]),
    ],
)
def test_every_page_boundary_hits(tiny, shared, own, marks, expected):
    """The table of hits: the second request already resumes at the last boundary."""
    llm = tiny.open(num_pages=512)
    prompts = [tokens(shared) + tokens(own, 1 + i) for i in range(len(expected))]
    outputs = [ask(llm, each, params=greedy(4), cache_marks=marks)[0] for each in prompts]
    assert cached(outputs) == expected
    assert metric(llm, "checkpoints_made") == 0
    assert llm.llm_engine.scheduler.cache.slots.total == 0


def test_second_turn_of_a_chat(tiny):
    llm = tiny.open(num_pages=64)
    (first,) = ask(llm, tokens(1000), params=greedy(200))
    (second,) = ask(llm, [*tokens(1000), *answer(first), *tokens(50, 1)], params=greedy(4))
    assert cached([second]) == [1152]
    assert second.cache_report.lost == {"unseen": 98}, "of a page that is not full nothing is kept"


@pytest.mark.parametrize(
    ("prompt", "lost"),
    [
        (tokens(100) + tokens(30, 1), {"grid": 36, "unseen": 30}),
        (tokens(192), {"grid": 63, "last_token": 1}),
        (tokens(40), {"under_page": 39, "last_token": 1}),
    ],
    ids=["inside a page", "the whole prompt", "under a page"],
)
def test_a_report_names_no_state_that_could_have_been_kept(tiny, prompt, lost):
    """Beside a page that is there lies its state: what is lost lies past a page's end."""
    llm = tiny.open(num_pages=64)
    ask(llm, tokens(200), params=greedy(1))
    (output,) = ask(llm, prompt, params=greedy(1))
    assert output.cache_report.lost == lost


@pytest.mark.parametrize("num_seats", [1, 3])
def test_more_requests_than_seats_with_steps_ahead(tiny, num_seats):
    """Who comes next has begun before it is known that the one before is over: no slots bound how
    many have a page table."""
    llm = tiny.open(num_pages=64, max_num_seqs=num_seats, async_scheduling=True)
    tiny.check(ask(llm, *(tokens(60 + n, seed=n) for n in range(3 * num_seats + 1))))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_hits_change_no_answer(tiny, is_ahead):
    """At boundaries, in one batch with others, and where answers cross them."""
    llm = tiny.open(num_pages=128, async_scheduling=is_ahead, max_num_batched_tokens=128)
    prompts = [tokens(n) for n in (128, 129, 64, 200)] + [tokens(90, 1)]
    outputs = [*ask(llm, *prompts, params=greedy(70))]
    tiny.check(outputs, greedy(70))
    again = ask(llm, *prompts, params=greedy(70))
    assert cached(again) == [64, 128, 0, 192, 64]
    tiny.check(again, greedy(70))
    longer = [[*prompt, *answer(output)] for prompt, output in zip(prompts, outputs, strict=True)]
    further = ask(llm, *longer)
    assert cached(further) == [(len(prompt) - 1) // 64 * 64 for prompt in longer]
    tiny.check(further)


def test_preemption_and_eviction_change_no_answer(tiny):
    llm = tiny.open(num_pages=8, max_num_seqs=4)
    prompts = [tokens(100, seed) for seed in range(4)]
    for _ in range(2):
        tiny.check(ask(llm, *prompts, params=greedy(40)), greedy(40))
    assert metric(llm, "num_preemptions") > 0
    assert num_held(llm) == (0, 0)


def test_more_requests_than_slots_run_at_once(tiny):
    """A setting for slots does not bound requests that need none."""
    llm = tiny.open(num_pages=64, num_slots=2, max_num_seqs=8)
    tiny.check(ask(llm, *(tokens(20, seed) for seed in range(8)), params=greedy(3)), greedy(3))
    assert metric(llm, "num_steps") == 3


@pytest.mark.parametrize(
    "changes",
    [{"conv_L_cache": 1}, {"block_use_swiglu": False}, {"hidden_act": "gelu"}],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    config = save("lfm2", tmp_path).config
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        load_model(tmp_path, LoadOptions(load_format="dummy"))
