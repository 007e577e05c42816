"""Pages and slots in one memory: what it is cut into, and that nobody notices."""

from __future__ import annotations

from math import prod

import pytest
import torch
from tests.engines import THREE_LAYERS, save_tiny
from tests.shared import memory_of, serve, share_memory

from milepost.cache.plans import PageMove
from milepost.layers.context import AttentionSpec, RecurrentSpec, ShortConvSpec
from milepost.runner import plain
from milepost.runner.plain import PlainExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import share
from milepost.runner.pools import allocate
from milepost.runner.shared import allocate_shared, best_unit, unit_of, why_apart
from milepost.scheduler.admission import Admission

ATTENTION = AttentionSpec(num_kv_heads=2, head_dim=256)
WIDE_ATTENTION = AttentionSpec(num_kv_heads=4, head_dim=256)
RECURRENT = RecurrentSpec(conv_shape=(8192, 3), recurrent_shape=(32, 128, 128), grid=64)
CPU = torch.device("cpu")


def shape(num_attention: int, num_recurrent: int, **changes) -> PoolShape:
    defaults = {
        "specs": (*[RECURRENT] * num_recurrent, *[ATTENTION] * num_attention),
        "page_size": 64,
        "dtype": torch.bfloat16,
        "state_dtype": torch.float32,
    }
    return PoolShape(**(defaults | changes))


ODD = shape(
    0,
    0,
    specs=(
        RecurrentSpec(conv_shape=(31, 3), recurrent_shape=(3, 5, 7), grid=64),
        AttentionSpec(num_kv_heads=3, head_dim=24),
        RecurrentSpec(conv_shape=(31, 3), recurrent_shape=(3, 5, 7), grid=64),
        AttentionSpec(num_kv_heads=3, head_dim=24),
        RecurrentSpec(conv_shape=(31, 3), recurrent_shape=(3, 5, 7), grid=64),
    ),
    page_size=16,
)


@pytest.mark.parametrize(
    ("given", "pages_each"),
    [
        (shape(10, 30), 49),  # pages are padded by 0.3 %
        (shape(0, 0, specs=(*[RECURRENT] * 24, *[WIDE_ATTENTION] * 8)), 25),
        (shape(1, 1), 16),
    ],
)
def test_the_best_unit_leaves_little_unused(given: PoolShape, pages_each: int) -> None:
    unit = best_unit(given)
    assert not why_apart(given)
    assert unit.pages_each == pages_each
    assert unit.page_stride >= given.page_bytes
    assert unit.num_bytes >= given.slot_bytes
    rows = prod(given.page_shape[-2:]) * given.dtype.itemsize
    assert unit.page_stride % rows == unit.page_stride % 1024 == 0
    assert max(given.slot_bytes, pages_each * given.page_bytes) > 0.98 * unit.num_bytes


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (shape(3, 0), "no recurrent layers"),
        (shape(0, 3), "no attention layers"),
        (shape(50, 1), "is smaller than a page of 64 tokens"),
    ],
)
def test_pages_and_slots_stay_apart_where_a_unit_has_no_sense(
    given: PoolShape, reason: str
) -> None:
    assert reason in why_apart(given)
    assert share(1 << 40, given) is None


@pytest.mark.parametrize("pages_each", [1, 2, 7])
@pytest.mark.parametrize("given", [ODD, shape(2, 3)], ids=["odd", "real"])
def test_a_page_or_slot_touches_no_other_unit(given: PoolShape, pages_each: int) -> None:
    unit = unit_of(given, pages_each)
    pools = allocate_shared(given, num_units=3, pages_each=pages_each, device=CPU)
    memory = memory_of(pools)
    units = memory.view(4, unit.num_bytes)
    assert (units == 0).all()
    ends = {page for u in range(1, 4) for page in (u * pages_each, (u + 1) * pages_each - 1)}
    for page in sorted(ends):
        for pool in pools.kv.values():
            pool[page] = torch.nan
        assert (units != 0).any(1).tolist() == [page // pages_each == u for u in range(4)]
        assert (memory != 0).sum() == given.page_bytes
        units.zero_()
    for slot in range(1, 4):
        for state in pools.states.values():
            for pool in (state.conv, state.recurrent):
                assert pool[slot].is_contiguous()
                assert (pool[slot] == 0).all()  # no layer's lies in another's
                pool[slot] = torch.nan
        assert (units != 0).any(1).tolist() == [slot == u for u in range(4)]
        units.zero_()


@pytest.mark.parametrize("is_shared", [False, True])
def test_copy_page_copies_the_first_tokens_of_every_layer(is_shared: bool) -> None:
    if is_shared:
        pools = allocate_shared(ODD, num_units=4, pages_each=3, device=CPU)
    else:
        pools = allocate(ODD, num_pages=15, num_slots=4, device=CPU)
    for pool in pools.kv.values():
        pool.copy_(torch.randn(pool.shape))
    before = {index: pool.clone() for index, pool in pools.kv.items()}
    pools.copy_page(4, 11, 5)
    for index, pool in pools.kv.items():
        expected = before[index]
        expected[11, :, :5] = expected[4, :, :5]
        assert torch.equal(pool, expected)


@pytest.fixture(scope="module")
def tiny(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", request.param, **THREE_LAYERS)


@pytest.mark.parametrize(
    ("tiny", "page_size", "pages_each"),
    [(torch.float64, 64, 2), (torch.float32, 16, 5)],
    indirect=["tiny"],
)
def test_logits_are_those_of_two_pools(tiny, page_size, pages_each, monkeypatch):
    """Bit for bit, whatever lay in the memory before: NaN at first, then what was of the other
    kind. Every step takes a second, so that both begin the same requests in the same steps."""
    ran = Admission.ran
    monkeypatch.setattr(Admission, "ran", lambda turn, num, _: ran(turn, num, 1.0))
    seen: list[torch.Tensor] = []
    choose = plain.choose

    def note(logits, rows):
        seen.append(logits.clone())
        return choose(logits, rows)

    monkeypatch.setattr(plain, "choose", note)
    options = {"page_size": page_size, "num_pages": 2560 // page_size, "num_slots": 9}
    llm = tiny.open(**options)
    expected = [serve(llm), serve(llm)]
    split = list(seen)
    seen.clear()

    llm = tiny.open(**options)
    model = llm.llm_engine.runner.executor.model
    runner = share_memory(
        llm,
        pages_each,
        lambda pools, num_slots: PlainExecutor(
            model, pools, num_requests=num_slots, max_model_len=llm.llm_engine.limits.max_model_len
        ),
    )
    first = serve(llm)
    runner.swap()
    assert [first, serve(llm)] == expected
    assert len(split) == len(seen)
    assert all(map(torch.equal, split, seen))
    for state in runner.pools.states.values():
        assert not state.conv[0].any()
        assert not state.recurrent[0].any()


def test_pages_move_with_the_states_beside_them() -> None:
    beside = ShortConvSpec(conv_shape=(5, 2))
    given = shape(0, 0, specs=(beside, ATTENTION, beside), page_size=16)
    assert "beside pages" in why_apart(given)
    assert given.page_bytes == given.kv_bytes + 2 * 5 * 2 * 2
    pools = allocate(given, num_pages=4, num_slots=0, device=CPU)
    for layer in (0, 2):
        assert pools.conv_states[layer].shape == (5, 5, 2)
        for page in range(4):
            pools.conv_states[layer][page + 1] = 10 * layer + page
    pools.move_pages([PageMove(source=3, target=0), PageMove(source=1, target=3)])
    for layer in (0, 2):
        held = pools.conv_states[layer][:, 0, 0].tolist()
        assert held == [0, *(10 * layer + page for page in (3, 1, 2, 1))]
    pools.release()
    assert not pools.all_conv.any()
