"""The stages of a draw that find the lowest logit which top_k and top_p keep, without sorting.

1. narrow, twice: which of 16 intervals of logits holds it, by how much lies above each bound.
   Twice, since 16 x 16 intervals leave a few thousand logits of a large vocabulary.
2. collect: the logits of that interval; for a row with top_k everything above it too.
3. settle: bisects the interval over what was collected.

The lowest logit kept is the first at which the sum of weights from the best on reaches a target: of
ones for top_k, of masses for top_p. Masses are integers, so sums do not depend on the order of
blocks, nor does anything else.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.sampling import LISTED, MASS_OF_BEST, StepRows, Workspace
from milepost.kernels.sampling.likeliest import (
    BEYOND,
    INTS,
    NUM_BOUNDS,
    SEARCHES,
    distance_of,
    open_row,
)

_CHUNK = 2048
"""Logits that `settle` loads at a time."""
_FIRST = tl.constexpr(0x3E000000)
_OCTAVE = tl.constexpr(0x00400000)
"""Bounds of the first narrowing: an eighth, and 14 half octaves from there on."""
_MASS = tl.constexpr(MASS_OF_BEST)
_CAPACITY = tl.constexpr(LISTED)


def search(rows: StepRows, work: Workspace, first: int, last: int) -> None:
    """Writes the distance of each row's lowest kept logit to the workspace."""
    grid = (work.num_blocks, last - first)
    common = rows.settings, work.scratch, first, work.vocab_size, work.num_rows
    blocks = next_power_of_2(work.num_blocks)
    shape = {"BLOCK": work.block, "BLOCKS": blocks, "num_warps": 16}
    for level in (1, 2):
        _narrow_kernel[grid](*common, LEVEL=level, **shape)
    _collect_kernel[grid](*common, **shape)
    _settle_kernel[(last - first,)](
        *common,
        work.num_blocks,
        BLOCKS=blocks,
        CHUNK=_CHUNK,
        IS_AMD=probe(work.scratch.adjusted.device).is_amd,
        num_warps=8,
    )


class Rest(NamedTuple):
    """Logits to bisect; the first CHUNK were loaded."""

    p_x: Any
    number: Any
    row: Any
    """`DrawSettings`"""


@triton.jit
def _mass(distance, floor):
    """Returns the mass of a token at that distance; 0 for NaN, or if min_p excludes the token."""
    mass = tl.exp(-distance.to(tl.float32, bitcast=True)) * _MASS
    return tl.where(distance <= floor, mass, 0.0).to(tl.int64)


@triton.jit
def _weight(distance, top_k, floor):
    """Returns the weights to add up from the best logit on: ones for top_k, else masses."""
    return tl.where(top_k > 0, tl.full(distance.shape, 1, tl.int64), _mass(distance, floor))


@triton.jit
def _target(sums, top_p, top_k):
    """Returns the sum at which the lowest kept logit is reached; `sums` are those of the first
    narrowing."""
    total = tl.load(sums + NUM_BOUNDS - 1)
    return tl.where(top_k > 0, top_k.to(tl.int64), _share(top_p, total))


@triton.jit
def _share(top_p, total):
    return tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _first_bound(number):
    return tl.where(number < NUM_BOUNDS - 1, _FIRST + number * _OCTAVE, BEYOND)


@triton.jit
def _second_bound(low, high, number):
    return low + ((high - low).to(tl.int64) * (number + 1) // NUM_BOUNDS).to(tl.int32)


@triton.jit
def _reached(sums, target):
    """Returns the number of the first bound below which the sum reaches the target."""
    values = tl.load(sums + tl.arange(0, NUM_BOUNDS))
    return tl.minimum(tl.sum((values < target).to(tl.int32), 0), NUM_BOUNDS - 1)


@triton.jit
def _first_interval(sums, target):
    number = _reached(sums, target)
    low = tl.where(number > 0, _first_bound(number - 1), 0)
    return low, _first_bound(number)


@triton.jit
def _second_interval(scratch, own, i_r, num_rows):
    """Returns the interval of a row, the sum below it, and the sum to be reached."""
    first_sums = scratch.sums + i_r * NUM_BOUNDS
    sums = scratch.sums + (num_rows + i_r) * NUM_BOUNDS
    target = _target(first_sums, own.share, own.top_k)
    low, high = _first_interval(first_sums, target)
    first = _reached(first_sums, target)
    below = tl.where(first > 0, tl.load(first_sums + tl.maximum(first - 1, 0)), 0)
    number = _reached(sums, target)
    below = tl.where(number > 0, tl.load(sums + tl.maximum(number - 1, 0)), below)
    start = tl.where(number > 0, _second_bound(low, high, number - 1), low)
    return start, _second_bound(low, high, number), below, target


@triton.jit
def _load_block(adjusted, i_r, i_b, vocab_size, own, BLOCK: tl.constexpr):
    """Returns a row's logits in a block of the vocabulary, and their distances."""
    o_v = i_b * BLOCK + tl.arange(0, BLOCK)
    p_x = adjusted + i_r * vocab_size + o_v
    b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("nan"))
    return b_x, distance_of(b_x, own.top, own.temperature)


@quick
@triton.jit(do_not_specialize=["first"])
def _narrow_kernel(
    rows,
    scratch,
    first,
    vocab_size,
    num_rows,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    if tl.load(rows.ints + row * INTS) & SEARCHES != 0:
        own = open_row(rows, scratch, i_r, row, tl.num_programs(0), BLOCKS)
        low, high = 0, BEYOND
        if LEVEL == 2:
            first_sums = scratch.sums + i_r * NUM_BOUNDS
            target = _target(first_sums, own.share, own.top_k)
            low, high = _first_interval(first_sums, target)
        best = tl.load(scratch.tops + i_r * tl.num_programs(0) + i_b)
        if distance_of(best, own.top, own.temperature) < high:
            _, b_distance = _load_block(scratch.adjusted, i_r, i_b, vocab_size, own, BLOCK)
            b_weight = _weight(b_distance, own.top_k, own.floor)
            o_bound = tl.arange(0, NUM_BOUNDS)
            b_below = tl.zeros([NUM_BOUNDS], tl.int64)
            for number in tl.static_range(NUM_BOUNDS):
                bound = _first_bound(number) if LEVEL == 1 else _second_bound(low, high, number)
                b_here = tl.sum(tl.where(b_distance < bound, b_weight, 0), 0)
                b_below = tl.where(o_bound == number, b_here, b_below)
            p_sums = scratch.sums + ((LEVEL - 1) * num_rows + i_r) * NUM_BOUNDS
            tl.atomic_add(p_sums + o_bound, b_below, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["first"])
def _collect_kernel(
    rows, scratch, first, vocab_size, num_rows, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Collects logits, in any order: nothing depends on it."""
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    if tl.load(rows.ints + row * INTS) & SEARCHES != 0:
        own = open_row(rows, scratch, i_r, row, tl.num_programs(0), BLOCKS)
        low, high, _, _ = _second_interval(scratch, own, i_r, num_rows)
        best = tl.load(scratch.tops + i_r * tl.num_programs(0) + i_b)
        if distance_of(best, own.top, own.temperature) < high:
            b_x, b_distance = _load_block(scratch.adjusted, i_r, i_b, vocab_size, own, BLOCK)
            is_inside = (b_distance >= low) & (b_distance < high)
            is_listed = tl.where(own.top_k > 0, b_distance < high, is_inside)
            number = tl.sum(is_listed.to(tl.int32), 0)
            if number > 0:
                p_found = scratch.found + i_r * 4
                start = tl.atomic_add(p_found, number, sem="relaxed")
                o_listed = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                p_listed = scratch.listed + i_r * _CAPACITY + o_listed
                tl.store(p_listed, b_x, mask=is_listed & (o_listed < _CAPACITY))
                least = tl.min(tl.where(is_inside, b_distance, BEYOND), 0)
                greatest = tl.max(tl.where(is_inside, b_distance, -1), 0)
                tl.atomic_min(p_found + 1, least, sem="relaxed")
                tl.atomic_max(p_found + 2, greatest, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["first"])
def _settle_kernel(
    rows,
    scratch,
    first,
    vocab_size,
    num_rows,
    num_blocks,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_AMD: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    row = i_r + first
    adjusted, listed = scratch.adjusted, scratch.listed
    if IS_AMD:
        # AMD's compiler traces pointers to their base, and fails if there are two to choose from.
        adjusted = adjusted.to(tl.int64).to(tl.pointer_type(tl.float32))
        listed = listed.to(tl.int64).to(tl.pointer_type(tl.float32))
    if tl.load(rows.ints + row * INTS) & SEARCHES != 0:
        own = open_row(rows, scratch, i_r, row, num_blocks, BLOCKS)
        top_k, floor = own.top_k, own.floor
        low, high, below, target = _second_interval(scratch, own, i_r, num_rows)
        p_found = scratch.found + i_r * 4
        low = tl.maximum(low, tl.load(p_found + 1))
        high = tl.minimum(high, tl.load(p_found + 2) + 1)
        number = tl.load(p_found)
        p_x, below = listed + i_r * _CAPACITY, tl.where(top_k > 0, 0, below)
        if number > _CAPACITY:
            p_x, below, number = adjusted + i_r * vocab_size, below * 0, vocab_size
        # The first logits are read once, and most often there are no others.
        o_x = tl.arange(0, CHUNK)
        b_x = tl.load(p_x + o_x, mask=o_x < number, other=float("nan"))
        b_distance = distance_of(b_x, own.top, own.temperature)
        b_mass = _mass(b_distance, floor)
        b_weight = tl.where(top_k > 0, tl.full([CHUNK], 1, tl.int64), b_mass)
        rest = Rest(p_x, number, own)
        lowest = _bisected(b_distance, b_weight, low, high, below, target, top_k, rest, CHUNK)
        if (top_k > 0) & (own.share < 1):
            # Of equal logits at the end only as many count as top_k has room for.
            above = _below(b_distance, b_weight, lowest, top_k, rest, CHUNK)
            total = _below(b_distance, b_mass, lowest, top_k * 0, rest, CHUNK)
            target = _share(own.share, total + (target - above) * _mass(lowest, floor))
            low, high = lowest * 0, lowest + 1
            lowest = _bisected(b_distance, b_mass, low, high, below, target, top_k * 0, rest, CHUNK)
        tl.store(p_found + 3, tl.minimum(lowest, floor))


@triton.jit
def _bisected(b_distance, b_weight, low, high, below, target, top_k, rest, CHUNK: tl.constexpr):
    """Returns the least distance in [low, high) at which the sum reaches the target."""
    while high - low > 1:
        middle = low + (high - low) // 2
        here = _below(b_distance, b_weight, middle, top_k, rest, CHUNK)
        is_reached = below + here >= target
        low = tl.where(is_reached, low, middle)
        high = tl.where(is_reached, middle, high)
    return low


@triton.jit
def _below(b_distance, b_weight, bound, top_k, rest, CHUNK: tl.constexpr):
    """Returns the weight of all logits at a distance less than the bound: those that were loaded
    and the rest."""
    own = rest.row
    b_total = tl.where(b_distance < bound, b_weight, 0)
    for start in range(CHUNK, rest.number, CHUNK):
        o_x = start + tl.arange(0, CHUNK)
        b_x = tl.load(rest.p_x + o_x, mask=o_x < rest.number, other=float("nan"))
        b_other = distance_of(b_x, own.top, own.temperature)
        b_total += tl.where(b_other < bound, _weight(b_other, top_k, own.floor), 0)
    return tl.sum(b_total, 0)
