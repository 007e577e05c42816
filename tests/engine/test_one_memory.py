"""Pages and slots in one memory: what is chosen, and that no answer changes where what is cached is
moved, evicted and computed again.
"""

from __future__ import annotations

import pytest
import torch

from milepost import LLM
from milepost.cache.memory import Split, UnifiedPool
from milepost.config import EngineConfig
from milepost.engine.assembly import sizing
from milepost.errors import ConfigError
from milepost.parallel import ALONE
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import OneMemory, TwoPools
from milepost.runner.pools import Pools
from tests.engines import (
    answer,
    ask,
    cached,
    greedy,
    metric,
    num_held,
    save_tiny,
    steps_until_done,
    tokens,
)
from tests.invariants import check

FEW_UNITS = 0.0008
"""GiB: room for some 25 slots of the tiny model, or five pages of 16 tokens each in their place."""


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=lambda d: str(d)[6:])
def tiny(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", request.param)


def cache_of(llm):
    return llm.llm_engine.scheduler.cache


@pytest.fixture
def moved(monkeypatch) -> list[int]:
    """How many pages each step moved, of steps that moved any."""

    found: list[int] = []
    move_pages = Pools.move_pages

    def note(pools, moves):
        if moves:
            found.append(len(moves))
        move_pages(pools, moves)

    monkeypatch.setattr(Pools, "move_pages", note)
    return found


def test_numbers_that_are_given_split_the_memory(tiny):
    assert isinstance(cache_of(tiny.open()).storage, UnifiedPool)
    for given in ({"num_pages": 64}, {"num_slots": 8}, {"num_pages": 64, "num_slots": 8}):
        cache = cache_of(tiny.open(**given))
        assert isinstance(cache.storage, Split)
        sizes = {"num_pages": cache.pages.total, "num_slots": cache.slots.total}
        assert given.items() <= sizes.items()
    assert isinstance(cache_of(tiny.open(cache_memory="split")).storage, Split)


@pytest.mark.parametrize(
    ("device", "options", "kind"),
    [
        ("cuda", {}, OneMemory),
        ("cuda", {"page_size": 1024}, TwoPools),
        ("cuda", {"num_slots": 8}, TwoPools),
        ("cuda", {"cache_memory": "split"}, TwoPools),
        ("cpu", {}, TwoPools),
        ("cpu", {"cache_memory": "shared"}, OneMemory),
    ],
)
def test_auto_shares_on_a_gpu_where_it_can(tiny, monkeypatch, device, options, kind):
    monkeypatch.setattr(sizing, "free_bytes", lambda *_, **__: 1 << 24)
    monkeypatch.setattr(sizing, "available_bytes", lambda _: None)
    config = EngineConfig(**options)
    llm = tiny.open()
    specs = llm.llm_engine.runner.executor.model.layer_specs
    shape = PoolShape(
        specs=specs, page_size=config.page_size, dtype=torch.float32, state_dtype=torch.float32
    )
    assert isinstance(sizing.sizes_of(config, shape, torch.device(device), 0, ALONE), kind)


@pytest.mark.parametrize("memory", ["split", "shared"])
def test_the_cache_takes_the_bytes_that_it_is_given(tiny, memory):
    """Whatever else says how many."""
    given = 1 << 24
    config = EngineConfig(cache_memory=memory, kv_cache_memory_bytes=given, cpu_cache_gib=9)
    llm = tiny.open()
    specs = llm.llm_engine.runner.executor.model.layer_specs
    shape = PoolShape(
        specs=specs, page_size=config.page_size, dtype=torch.float32, state_dtype=torch.float32
    )
    sizes = sizing.sizes_of(config, shape, torch.device("cpu"), 0, ALONE)
    zeros = shape.slot_bytes  # the slot that new requests begin with
    assert 0.95 * given < sizes.num_bytes(shape) <= given + zeros


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_memory": "shared", "num_slots": 8}, r"'shared' with num_pages=None, num_slots=8"),
        (
            {"cache_memory": "shared", "page_size": 1024},
            r"a state of \d+ bytes is smaller than a page of 1024 tokens, \d+ bytes; use 'auto'",
        ),
        (
            {"cache_memory": "shared", "cpu_cache_gib": 1e-4},
            r": 107374 bytes are left .*, \d+ are the least .* 4 units of \d+ .* raise gpu_memory",
        ),
        ({"cache_memory": "unified pool"}, r"cache_memory='unified pool'"),
    ],
)
def test_memory_that_cannot_be_shared(tiny, options, message):
    given = {"skip_tokenizer_init": True} | options
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny.folder), **given)


def test_answers_under_pressure(tiny, moved):
    """Prompts of all lengths and their next turns, in several waves through little memory."""
    llm = tiny.open(page_size=16, cpu_cache_gib=FEW_UNITS * tiny.dtype.itemsize / 4)
    assert isinstance(cache_of(llm).storage, UnifiedPool)
    shares, hits = set(), 0
    turns = [tokens(num, seed) for seed, num in enumerate((20, 150, 33, 260, 90, 47, 210, 64))]
    for wave in range(4):
        for first in range(0, len(turns), 4):
            part = turns[first : first + 4]
            outputs = ask(llm, *part, params=greedy(6))
            tiny.check(outputs, greedy(6))
            hits += sum(cached(outputs))
            turns[first : first + 4] = [
                [*prompt, *answer(output), *tokens(9, 50 + wave)]
                for prompt, output in zip(part, outputs, strict=True)
            ]
            shares.add(cache_of(llm).slots.num_cached)
    assert moved, "pages moved"
    assert hits, "something came back"
    assert len(shares) > 2, "the boundary moved"
    assert num_held(llm) == (0, 0)


def test_answers_after_preemption(tiny):
    """Answers that outgrow the memory: states and pages are given up and come back."""
    llm = tiny.open(page_size=16, cpu_cache_gib=FEW_UNITS * tiny.dtype.itemsize / 4)
    outputs = ask(llm, *(tokens(150 + 7 * i, i) for i in range(8)), params=greedy(60))
    assert metric(llm, "num_preemptions") > 0
    tiny.check(outputs, greedy(60))
    assert num_held(llm) == (0, 0)


def test_a_step_that_was_cut_short_while_pages_move_leaves_nothing_behind(tiny, monkeypatch):
    """Nobody knows which pages have been moved, so nothing stays cached and no request goes on."""

    llm = tiny.open(page_size=16, cpu_cache_gib=FEW_UNITS * tiny.dtype.itemsize / 4)
    prompts = [tokens(num, seed) for seed, num in enumerate((20, 150, 33, 260, 90, 47, 210, 64))]
    for prompt in (*prompts, *prompts):
        ask(llm, prompt, params=greedy(6))
    move_pages, cut = Pools.move_pages, []

    def interrupt(pools, moves):
        move_pages(pools, moves[: len(moves) // 2])
        if moves and not cut:
            cut.append(moves)
            raise KeyboardInterrupt
        move_pages(pools, moves[len(moves) // 2 :])

    monkeypatch.setattr(Pools, "move_pages", interrupt)
    outputs = []
    for seed in range(40):
        try:
            outputs += ask(llm, tokens(40 + 13 * seed % 200, seed), params=greedy(6))
        except KeyboardInterrupt:
            cache = cache_of(llm)
            check(cache)
            assert not cache.tree.nodes
            break
    assert cut, "a step that moves pages was cut short"
    for _ in steps_until_done(llm):
        check(cache_of(llm))
    for seed, prompt in enumerate(prompts):
        outputs += ask(llm, prompt, params=greedy(6))
        outputs += ask(llm, tokens(30, 100 + seed), params=greedy(6))
    tiny.check(outputs, greedy(6))
