"""States in the slots of a pool."""

import pytest
import torch

from milepost.kernels.platform.tensors import read_slots, write_slots
from tests.kernels.mixers import space


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 8), (3,), (2, 3, 5)])
@pytest.mark.parametrize("spacing", [0, 16])
def test_write_is_exact_and_leaves_the_others(dtype, shape, spacing):
    torch.manual_seed(0)
    pool = space(torch.randn(6, *shape).to(dtype), spacing)
    pool[0] = float("nan")
    states = torch.randn(3, *shape)
    states.view(-1)[0] = float("inf")
    expected, where = pool.clone(), torch.tensor([4, 1, 5])
    expected[where] = states.to(dtype)
    write_slots(pool, where, states)
    assert torch.equal(pool[1:], expected[1:])
    assert pool[0].isnan().all()


@pytest.mark.parametrize(
    ("places", "is_own"), [([2, 3, 4], True), ([4, 3, 2], False), ([1, 3, 4], False), ([5], True)]
)
def test_states_side_by_side_are_changed_in_place(places, is_own):
    pool = torch.randn(6, 4, 8)
    expected, where = pool.clone(), torch.tensor(places)
    expected[where] += 1
    states = read_slots(pool, where, where, torch.float32)
    assert (states.data_ptr() == pool[places[0]].data_ptr()) == is_own
    write_slots(pool, where, states.add_(1))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("places", "is_own"), [([2, 3, 4], False), ([5], True)])
def test_states_with_something_between_them_are_copies(places, is_own):
    """But a state alone has no neighbour."""
    pool = space(torch.randn(6, 4, 8), 16)
    expected, where = pool.clone(), torch.tensor(places)
    expected[where] += 1
    states = read_slots(pool, where, where, torch.float32)
    assert states.is_contiguous()
    assert (states.data_ptr() == pool[places[0]].data_ptr()) == is_own
    write_slots(pool, where, states.add_(1))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("slot_in", "dtype"), [([1, 2, 0], torch.float32), ([2, 3, 4], torch.float64)]
)
def test_other_states_are_copies(slot_in, dtype):
    pool = torch.randn(6, 4, 8)
    before, slot_out = pool.clone(), torch.tensor([2, 3, 4])
    states = read_slots(pool, torch.tensor(slot_in), slot_out, dtype)
    states.add_(1)
    assert torch.equal(pool, before)
    write_slots(pool, slot_out, states)
    assert torch.equal(pool[slot_out], (before[slot_in].to(dtype) + 1).float())


def test_write_takes_any_strides():
    pool, states = torch.zeros(4, 2, 8), torch.randn(2, 8, 2).transpose(1, 2)
    write_slots(pool, torch.tensor([2, 0]), states)
    assert torch.equal(pool[[2, 0]], states)
