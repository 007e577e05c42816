"""Gated delta rule: the chunked kernel against a recurrence, token by token.

Legend: T tokens, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from milepost.kernels.layout.chunks import lay_out_chunks
from milepost.kernels.recurrent import CHUNK
from milepost.kernels.recurrent.reference import delta as reference
from tests.kernels.mixers import space
from tests.numbers import relative_error

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 3, 6, 8, 5
NUM_SLOTS = 12


@dataclass
class Tokens:
    query_key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def __getitem__(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query_key[rows], self.value[rows], self.log_decay[rows], self.beta[rows]


def make_tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    return Tokens(
        torch.randn(count, 2, KEY_HEADS, KEY_DIM, generator=random, dtype=dtype),
        torch.randn(count, VALUE_HEADS, VALUE_DIM, generator=random, dtype=dtype),
        -torch.rand(count, VALUE_HEADS, generator=random, dtype=dtype) * 0.2,
        torch.rand(count, VALUE_HEADS, generator=random, dtype=dtype),
    )


def make_pool(dtype: torch.dtype = torch.float32) -> Tensor:
    """Slot 0 zeros, slot 1 a state, all others NaN, as is what lies between slots."""
    pool = torch.full((NUM_SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), torch.nan, dtype=dtype)
    pool[0] = 0
    pool[1] = torch.randn(pool.shape[1:], generator=torch.Generator().manual_seed(7))
    return space(pool, 16)


def recur(tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, V, W] and final state [V, K, W], in float64, as the paper's recurrence has it."""
    query_key, value, log_decay, beta = (tensor.double() for tensor in tokens)
    query_key = query_key / (query_key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    query_key = query_key.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2)
    state, outputs = state.double().clone(), []
    for (query, key), wanted, decay, rate in zip(
        query_key, value, log_decay.exp(), beta, strict=True
    ):
        state = state * decay[:, None, None]
        missing = wanted - torch.einsum("vkw,vk->vw", state, key)
        state = state + torch.einsum("vk,vw,v->vkw", key, missing, rate)
        outputs.append(torch.einsum("vkw,vk->vw", state, query) / KEY_DIM**0.5)
    return torch.stack(outputs), state


def run(
    tokens: tuple[Tensor, ...],
    pool: Tensor,
    starts: list[int],
    lengths: list[int],
    slot_in: list[int],
    slot_out: list[int],
    exports: tuple[tuple[int, int, int], ...] = (),
) -> Tensor:
    layout = lay_out_chunks(starts, lengths, exports, chunk=CHUNK)
    slots = torch.tensor(slot_in), torch.tensor(slot_out)
    return reference.prefill(*tokens, pool, *slots, layout)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)], ids=str
)
@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 63), (0, 64), (0, 65), (100, 1), (100, 28), (37, 300)]
)
def test_prefill_matches_recurrence(
    start: int, length: int, dtype: torch.dtype, tolerance: float
) -> None:
    tokens, pool = make_tokens(length, dtype)[:], make_pool(dtype)
    expected, state = recur(tokens, pool[1])
    output = run(tokens, pool, [start], [length], [1], [2])
    assert output.dtype == dtype
    assert relative_error(output, expected) < tolerance
    assert relative_error(pool[2], state) < tolerance


def test_prefill_several_sequences_keep_apart() -> None:
    starts, lengths = [0, 100, 64, 10], [70, 5, 200, 1]
    slot_in, slot_out = [0, 1, 1, 1], [2, 3, 4, 5]
    tokens, pool = make_tokens(sum(lengths)), make_pool()
    states = pool[slot_in].clone()
    output = run(tokens[:], pool, starts, lengths, slot_in, slot_out)
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (begin, end), before, slot in zip(pairwise(edges), states, slot_out, strict=True):
        expected, state = recur(tokens[begin:end], before)
        assert relative_error(output[begin:end], expected) < 2e-6
        assert relative_error(pool[slot], state) < 2e-6


def test_prefill_writes_only_its_slots() -> None:
    pool = make_pool()
    before = pool.clone()
    run(make_tokens(130)[:], pool, [0], [130], [1], [2], ((0, 64, 3),))
    untouched = [0, 1, *range(4, NUM_SLOTS)]
    assert torch.equal(pool[untouched].nan_to_num(9.0), before[untouched].nan_to_num(9.0))
    assert pool[[2, 3]].isfinite().all()


def test_prefill_slot_in_may_be_slot_out() -> None:
    tokens, pool = make_tokens(90)[:], make_pool()
    _, state = recur(tokens, pool[1])
    run(tokens, pool, [0], [90], [1], [1])
    assert relative_error(pool[1], state) < 2e-6


@pytest.mark.parametrize("start", [0, 100])
def test_export_equals_prefill_that_ends_there(start: int) -> None:
    end = 300
    tokens, pool = make_tokens(end - start), make_pool()
    exports = {128: 4, 192: 5, 256: 6, 300: 7}
    named = tuple((0, position, slot) for position, slot in exports.items())
    run(tokens[:], pool, [start], [end - start], [1], [2], named)
    for position, slot in exports.items():
        alone = make_pool()
        run(tokens[: position - start], alone, [start], [position - start], [1], [2])
        assert torch.equal(pool[slot], alone[2])
    assert torch.equal(pool[7], pool[2])


def test_export_of_second_sequence_lands_in_its_slot() -> None:
    tokens, pool = make_tokens(400), make_pool()
    run(tokens[:], pool, [0, 64], [100, 300], [0, 1], [2, 3], ((1, 128, 4), (1, 320, 5)))
    for position, slot in ((128, 4), (320, 5)):
        _, state = recur(tokens[100 : 100 + position - 64], make_pool()[1])
        assert relative_error(pool[slot], state) < 2e-6


def test_export_off_the_grid_equals_prefill_that_ends_there() -> None:
    tokens, pool = make_tokens(200), make_pool()
    output = run(tokens[:], pool, [100], [200], [1], [2], ((0, 150, 4), (0, 101, 5), (0, 290, 6)))
    expected, state = recur(tokens[:], make_pool()[1])
    assert relative_error(output, expected) < 2e-6
    assert relative_error(pool[2], state) < 2e-6
    # A prefill that resumes there goes on with the same chunks.
    resumed, begin, slot_in = make_pool(), 100, 1
    for position, slot in ((101, 5), (150, 4), (290, 6), (300, 2)):
        part = tokens[begin - 100 : position - 100]
        run(part, resumed, [begin], [position - begin], [slot_in], [2])
        assert torch.equal(pool[slot], resumed[2])
        begin, slot_in = position, 2


@pytest.mark.parametrize("position", [0, 5, 106, 200])
def test_export_outside_its_sequence_is_refused(position: int) -> None:
    lay_out_chunks([5], [100], [(0, 6, 1), (0, 105, 2)], chunk=CHUNK)
    with pytest.raises(AssertionError, match="inside its sequence"):
        lay_out_chunks([5], [100], [(0, position, 1)], chunk=CHUNK)


@pytest.mark.parametrize("cuts", [(64,), (1, 2, 3), (50, 128, 201)])
def test_prefill_in_parts_matches_whole(cuts: tuple[int, ...]) -> None:
    tokens, whole, parts = make_tokens(250), make_pool(), make_pool()
    expected = run(tokens[:], whole, [0], [250], [1], [2])
    outputs = []
    for begin, end in pairwise((0, *cuts, 250)):
        slot_in = 2 if begin else 1
        outputs.append(run(tokens[begin:end], parts, [begin], [end - begin], [slot_in], [2]))
    assert relative_error(torch.cat(outputs), expected) < 2e-6
    assert relative_error(parts[2], whole[2]) < 2e-6


def test_prefill_in_parts_on_the_grid_gives_the_same_bits() -> None:
    tokens, whole, parts = make_tokens(250), make_pool(), make_pool()
    expected = run(tokens[:], whole, [0], [250], [1], [2])
    first = run(tokens[:128], parts, [0], [128], [1], [2])
    second = run(tokens[128:], parts, [128], [122], [2], [2])
    assert torch.equal(torch.cat((first, second)), expected)
    assert torch.equal(parts[2], whole[2])


@pytest.mark.parametrize("broken", [0, 1])
def test_nan_in_one_sequence_stays_there(broken: int) -> None:
    tokens, pool = make_tokens(80), make_pool()
    rows, others = (slice(40 * each, 40 * each + 40) for each in (broken, 1 - broken))
    tokens.value[rows] = torch.nan
    tokens.query_key[rows] = torch.nan
    output = run(tokens[:], pool, [0, 0], [40, 40], [0, 0], [2, 3])
    assert output[rows].isnan().all()
    assert output[others].isfinite().all()
    assert pool[3 - broken].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)], ids=str
)
def test_decode_matches_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    tokens, pool = make_tokens(4, dtype), make_pool(dtype)
    slot_in, slot_out = [1, 0, 1, 1], [1, 5, 3, 4]
    states = pool[slot_in].clone()
    slots = torch.tensor(slot_in), torch.tensor(slot_out)
    output = reference.decode(*tokens[:], pool, *slots)
    for index, slot in enumerate(slot_out):
        expected, state = recur(tokens[index : index + 1], states[index])
        assert relative_error(output[index], expected[0]) < tolerance
        assert relative_error(pool[slot], state) < tolerance
    assert (pool[0] == 0).all()
    assert pool[[2, *range(6, NUM_SLOTS)]].isnan().all()


def test_states_take_the_pool_type() -> None:
    tokens, pool = make_tokens(100), make_pool(torch.bfloat16)
    state_in = pool[1].clone()
    output = run(tokens[:99], pool, [0], [99], [1], [2], ((0, 64, 3),))
    expected, state = recur(tokens[:99], state_in)
    assert output.dtype == torch.float32
    assert relative_error(output, expected) < 2e-6
    assert relative_error(pool[2], state) < 5e-3
    last = reference.decode(*tokens[99:], pool, torch.tensor([2]), torch.tensor([4]))
    expected, _ = recur(tokens[99:], pool[2])
    assert relative_error(last, expected) < 2e-6


def test_half_inputs_are_summed_in_float32() -> None:
    tokens, pool = make_tokens(200, torch.bfloat16), make_pool()
    expected, state = recur(tokens[:], pool[1])
    output = run(tokens[:], pool, [0], [200], [1], [2])
    assert output.dtype == torch.bfloat16
    assert relative_error(output, expected) < 5e-3
    assert relative_error(pool[2], state) < 2e-6
