"""What the pools may take of a device's memory."""

from __future__ import annotations

import pytest
import torch

from milepost.errors import ConfigError
from milepost.layers.context import AttentionSpec, RecurrentSpec, ShortConvSpec
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import GIB, MAX_PAGES, OneMemory, free_bytes, share, split

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 GiB, of which 70 are free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70 * GIB, 100 * GIB))


def test_pools_leave_room_for_steps_and_for_their_launches(gpu):
    def of(activations: int) -> int:
        return free_bytes(CUDA, utilization=0.9, activations=activations, cpu_cache_gib=1.0)

    assert of(0) == int(60 * GIB) - GIB // 4
    assert of(0) - of(8 * GIB) == 8 * GIB


def test_a_lower_utilization_leaves_so_much_more_of_the_whole(gpu):
    high, low = (
        free_bytes(CUDA, utilization=share, activations=0, cpu_cache_gib=1.0)
        for share in (0.75, 0.5)
    )
    assert high - low == 25 * GIB


def test_a_cpu_takes_what_was_asked_for():
    cpu = torch.device("cpu")
    assert free_bytes(cpu, utilization=0.9, activations=GIB, cpu_cache_gib=1.5) == 3 * GIB // 2


def test_pages_get_all_of_it_where_states_lie_beside_them():
    shape = PoolShape(
        specs=(AttentionSpec(num_kv_heads=1, head_dim=8), ShortConvSpec(conv_shape=(32, 2))),
        page_size=16,
        dtype=torch.float32,
        state_dtype=torch.float32,
    )
    assert shape.page_bytes == 2 * 16 * 8 * 4 + 32 * 2 * 4
    sizes = split(100 * shape.page_bytes, shape, max_num_seqs=4)
    assert (sizes.num_pages, sizes.num_slots) == (100, 0)
    assert sizes.num_bytes(shape) == 100 * shape.page_bytes
    with pytest.raises(ConfigError, match="are left for the cache"):
        split(shape.page_bytes - 1, shape, max_num_seqs=4)


def test_a_cache_without_room_says_how_much_is_missing():
    """Weights may take more than their share: what is left is below nothing."""
    attention = AttentionSpec(num_kv_heads=1, head_dim=8)
    shape = PoolShape(
        specs=(attention,), page_size=16, dtype=torch.float32, state_dtype=torch.float32
    )
    with pytest.raises(ConfigError, match=r"^0\.000 GiB are left .*: 2\.000 GiB are missing"):
        split(-2 * 2**30, shape, max_num_seqs=4)


def shape_of(*specs) -> PoolShape:
    return PoolShape(specs=specs, page_size=16, dtype=torch.bfloat16, state_dtype=torch.float32)


NOTHING_IN_PAGES = shape_of(
    RecurrentSpec(conv_shape=(256, 3), recurrent_shape=(64, 64, 128), grid=64)
)
LITTLE_IN_PAGES = shape_of(AttentionSpec(num_kv_heads=1, head_dim=1))
LITTLE_IN_BOTH = shape_of(
    AttentionSpec(num_kv_heads=1, head_dim=1),
    RecurrentSpec(conv_shape=(4, 3), recurrent_shape=(1, 8, 16), grid=64),
)


@pytest.mark.parametrize("gib", [1, 4, 100])
@pytest.mark.parametrize("shape", [NOTHING_IN_PAGES, LITTLE_IN_PAGES, LITTLE_IN_BOTH])
def test_the_host_counts_no_more_pages_and_slots_than_it_can(shape, gib):
    """However little they hold: on a CPU what it remembers of them is within the budget."""
    sizes = split(gib * GIB, shape, max_num_seqs=64)
    assert sizes.num_pages <= min(MAX_PAGES, gib * 2**20)
    assert sizes.num_slots <= sizes.num_pages + 64
    assert sizes.num_bytes(shape) <= gib * GIB + shape.slot_bytes
    one = share(gib * GIB, shape)
    assert one is None or one.num_units * one.pages_each <= MAX_PAGES


def test_states_get_the_memory_where_pages_hold_nothing():
    sizes = split(100 * GIB, NOTHING_IN_PAGES, max_num_seqs=64)
    assert sizes.num_slots * NOTHING_IN_PAGES.slot_bytes > 80 * GIB
    assert sizes.num_pages == MAX_PAGES


def test_a_shared_memory_of_small_units_has_as_many_as_can_be_counted():
    sizes = share(100 * GIB, LITTLE_IN_BOTH)
    assert isinstance(sizes, OneMemory)
    assert sizes.num_units * sizes.pages_each <= MAX_PAGES
