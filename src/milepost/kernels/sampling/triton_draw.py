"""Triton: from logits to tokens, as `runner.sampling` defines it, without sorting.

Seven short launches, each over the blocks of all rows side by side; the host waits for none and
knows nothing of their results:

1. adjust: biases, penalties and masks; the best logit of each block.
2. narrow, twice: which of 16 intervals of logits holds the lowest one kept, by how much lies above
   each bound. Twice, since 16 x 16 intervals leave a few thousand logits of a large vocabulary.
3. collect: the logits of that interval; for a row with top_k everything above it too.
4. settle: bisects the interval over what was collected.
5. draw: adds noise to what is kept; the best of each block.
6. take: the best of all blocks, counted in the table of the answer's tokens.

A row's logits are ordered by the bits of their distance to its best one, scaled by the temperature:
of floats of one sign the bits are ordered as the numbers are. The lowest logit kept is the first at
which the sum of weights from the best on reaches a target: of ones for top_k, of masses for top_p.
Masses are integers, so sums do not depend on the order of blocks, nor does anything else.

Legend: R rows, V vocabulary, B blocks, E entries (biases), W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import probe
from milepost.kernels.sampling.reference import MASS_OF_BEST

BLOCK = 8192
_LISTED = 16384
"""Logits that `settle` may find collected; of more it reads the whole row, which is slower."""
_CHUNK = 2048
"""Logits that `settle` reads at a time."""
_NUM_BOUNDS = 16

# Columns of `StepRows.ints`.
KIND, INDEX, TOP_K, FLOOR, COUNTS, MASK, SEED_LOW, SEED_HIGH = range(8)
NUM_INTS = 8
# Bits of a kind.
IS_PLAIN, DRAWS, SEARCHES = 1, 2, 4
_INTS = tl.constexpr(NUM_INTS)
_INDEX, _TOP_K, _FLOOR = tl.constexpr(INDEX), tl.constexpr(TOP_K), tl.constexpr(FLOOR)
_COUNTS, _MASK = tl.constexpr(COUNTS), tl.constexpr(MASK)
_SEED_LOW, _SEED_HIGH = tl.constexpr(SEED_LOW), tl.constexpr(SEED_HIGH)
_PLAIN, _DRAWS, _SEARCHES = tl.constexpr(IS_PLAIN), tl.constexpr(DRAWS), tl.constexpr(SEARCHES)
_INF = tl.constexpr(0x7F800000)
_BEYOND = tl.constexpr(0x7F800001)
"""Past every logit, minus infinity too; but not past NaN."""
_FIRST = tl.constexpr(0x3E000000)
_OCTAVE = tl.constexpr(0x00400000)
"""Bounds of the first narrowing: an eighth, and 14 half octaves from there on."""
_MASS = tl.constexpr(MASS_OF_BEST)
_CAPACITY = tl.constexpr(_LISTED)
_BOUNDS = tl.constexpr(_NUM_BOUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What the sampling of a step depends on besides logits: arrays in numpy, then tensors."""

    ints: Any
    """[R, 8] int32: kind, index of the draw, top_k (0: all), bits of min_p's distance, row of
    counts and row of masks (-1: none), the seed's two words."""
    floats: Any
    """[R, 4] float32: temperature, repetition, frequency and presence penalty."""
    top_p: Any
    """[R] float64."""
    starts: Any
    """[R, B + 1] int32, where the entries of each block of the vocabulary begin, by token id."""
    entry_ids: Any
    """[E] int32."""
    entry_values: Any
    """[E] float32, added to logits."""
    masks: Any
    """[masks, W] int32."""


def num_blocks(vocab_size: int) -> int:
    """Blocks of a row."""
    return triton.cdiv(vocab_size, block_size(vocab_size))


def block_size(vocab_size: int) -> int:
    """Tokens of a block."""
    return min(BLOCK, max(triton.next_power_of_2(vocab_size), 16))


class Workspace:
    """What the launches of up to `num_rows` rows leave for one another."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        blocks = num_blocks(vocab_size)
        self.num_rows = num_rows

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.adjusted = empty(num_rows, vocab_size)
        self.tops = empty(num_rows, blocks)
        self.sums = empty(2, num_rows, _NUM_BOUNDS, dtype=torch.int64)
        self.listed = empty(num_rows, _LISTED)
        self.found = empty(num_rows, 4, dtype=torch.int32)
        """Number of logits collected, the least and the greatest of their distances that lie in
        the interval, and the distance of the lowest logit kept."""
        self.best = empty(num_rows, blocks)
        self.columns = empty(num_rows, blocks, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


def draw(
    logits: Tensor, best: Tensor, counts: Tensor, rows: StepRows, work: Workspace, *, searches: bool
) -> Tensor:
    """Token ids [R] int64 of `logits` [R, V] of any float type but float64.

    `best` [R] are the likeliest tokens as they are, taken where a row is plain. `counts` [rows, V]
    int16 holds how often an answer has each token, less 2^15 where its prompt has it too; the
    tokens chosen are counted. `searches` if any row has a top_k or top_p.
    """
    num_rows = len(logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for first in range(0, num_rows, work.num_rows):
        last = min(first + work.num_rows, num_rows)
        _launch(logits, best, counts, rows, work, token_ids, first, last, searches)
    return token_ids


def _launch(
    logits: Tensor,
    best: Tensor,
    counts: Tensor,
    rows: StepRows,
    work: Workspace,
    token_ids: Tensor,
    first: int,
    last: int,
    searches: bool,
) -> None:
    """For the rows from `first` to `last`."""
    vocab_size = logits.shape[1]
    blocks, block = num_blocks(vocab_size), block_size(vocab_size)
    grid = (blocks, last - first)
    shape = {"BLOCK": block, "BLOCKS": triton.next_power_of_2(blocks)}
    row = (rows.ints, rows.floats, work.tops, first, vocab_size)
    _adjust_kernel[grid](
        logits,
        work.adjusted,
        counts,
        rows.starts,
        rows.entry_ids,
        rows.entry_values,
        rows.masks,
        work.sums,
        work.found,
        *row,
        logits.stride(0),
        rows.masks.shape[1],
        work.num_rows,
        BLOCK=block,
        num_warps=16,
    )
    if searches:
        search = (work.adjusted, work.sums, rows.top_p, *row, work.num_rows)
        for level in (1, 2):
            _narrow_kernel[grid](*search, LEVEL=level, **shape, num_warps=16)
        _collect_kernel[grid](*search, work.listed, work.found, **shape, num_warps=16)
        _settle_kernel[(last - first,)](
            *search,
            work.listed,
            work.found,
            blocks,
            BLOCKS=shape["BLOCKS"],
            CHUNK=_CHUNK,
            IS_AMD=probe(logits.device).is_amd,
            num_warps=8,
        )
    _draw_kernel[grid](
        work.adjusted, work.found, work.best, work.columns, *row, **shape, num_warps=8
    )
    _take_kernel[(last - first,)](
        work.best,
        work.columns,
        best,
        counts,
        token_ids,
        rows.ints,
        first,
        vocab_size,
        blocks,
        BLOCKS=shape["BLOCKS"],
        num_warps=1,
    )


# --- 1: adjust ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first"])
def _adjust_kernel(
    logits,
    adjusted,
    counts,
    starts,
    entry_ids,
    entry_values,
    masks,
    sums,
    found,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    stride,
    num_words,
    num_rows,
    BLOCK: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = place + first
    kind = tl.load(ints + row * _INTS)
    if kind & _PLAIN == 0:
        column = block * BLOCK + tl.arange(0, BLOCK)
        is_token = column < vocab_size
        x = tl.load(logits + row * stride + column, mask=is_token, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))  # NaN is not chosen
        entries = starts + row * (tl.num_programs(0) + 1) + block
        for entry in range(tl.load(entries), tl.load(entries + 1)):
            token = tl.load(entry_ids + entry)
            x = tl.where(column == token, x + tl.load(entry_values + entry), x)
        count_row = tl.load(ints + row * _INTS + _COUNTS).to(tl.int64)
        if count_row >= 0:
            x = _penalized(x, counts + count_row * vocab_size + column, is_token, floats + row * 4)
        mask_row = tl.load(ints + row * _INTS + _MASK).to(tl.int64)
        if mask_row >= 0:
            words = masks + mask_row * num_words + column // 32
            is_allowed = tl.load(words, mask=is_token, other=0) >> (column % 32) & 1
            x = tl.where(is_allowed != 0, x, float("-inf"))
        tl.store(adjusted + place * vocab_size + column, x, mask=is_token)
        tl.store(tops + place * tl.num_programs(0) + block, tl.max(x, 0))
        if block == 0:
            bounds = tl.arange(0, _BOUNDS)
            nothing = tl.zeros([_BOUNDS], tl.int64)
            tl.store(sums + place * _BOUNDS + bounds, nothing)
            tl.store(sums + (num_rows + place) * _BOUNDS + bounds, nothing)
            tl.store(found + place * 4, 0)
            tl.store(found + place * 4 + 1, _BEYOND)
            tl.store(found + place * 4 + 2, -1)


@triton.jit
def _penalized(x, counts, is_token, floats):
    """As the penalties change logits whose counts lie there."""
    repetition, frequency = tl.load(floats + 1), tl.load(floats + 2)
    presence = tl.load(floats + 3)
    counted = tl.load(counts, mask=is_token, other=0).to(tl.int32)
    count = (counted & 0x7FFF).to(tl.float32)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(counted != 0, repeated, x)
    return tl.where(count > 0, x - (frequency * count + presence), x)


# --- 2 to 4: the lowest logit that is kept --------------------------------------------------------


@triton.jit
def _top(tops, place, num_blocks, BLOCKS: tl.constexpr):
    """The best logit of a row; 0 where none is possible."""
    block = tl.arange(0, BLOCKS)
    values = tl.load(
        tops + place * num_blocks + block, mask=block < num_blocks, other=float("-inf")
    )
    top = tl.max(values, 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _distance(x, top, temperature):
    """Bits of the scaled distance to the best logit: the fewer, the likelier."""
    return tl.abs(tl.div_rn(x - top, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _mass(distance, floor):
    """Of a token at that distance; of one that min_p leaves out, and of NaN, none."""
    mass = tl.exp(-distance.to(tl.float32, bitcast=True)) * _MASS
    return tl.where(distance <= floor, mass, 0.0).to(tl.int64)


@triton.jit
def _weight(distance, top_k, floor):
    """What is added up from the best on: ones for top_k, else masses."""
    return tl.where(top_k > 0, tl.full(distance.shape, 1, tl.int64), _mass(distance, floor))


@triton.jit
def _target(sums, top_p, top_k):
    """At which sum the lowest logit kept is reached; `sums` of the first narrowing."""
    total = tl.load(sums + _BOUNDS - 1)
    return tl.where(top_k > 0, top_k.to(tl.int64), _share(top_p, total))


@triton.jit
def _share(top_p, total):
    return tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _first_bound(number):
    return tl.where(number < _BOUNDS - 1, _FIRST + number * _OCTAVE, _BEYOND)


@triton.jit
def _second_bound(low, high, number):
    return low + ((high - low).to(tl.int64) * (number + 1) // _BOUNDS).to(tl.int32)


@triton.jit
def _reached(sums, target):
    """Number of the first bound below which the sum reaches the target."""
    values = tl.load(sums + tl.arange(0, _BOUNDS))
    return tl.minimum(tl.sum((values < target).to(tl.int32), 0), _BOUNDS - 1)


@triton.jit
def _first_interval(sums, target):
    number = _reached(sums, target)
    low = tl.where(number > 0, _first_bound(number - 1), 0)
    return low, _first_bound(number)


@triton.jit
def _second_interval(first_sums, sums, target):
    """And the sum below it."""
    low, high = _first_interval(first_sums, target)
    first = _reached(first_sums, target)
    below = tl.where(first > 0, tl.load(first_sums + tl.maximum(first - 1, 0)), 0)
    number = _reached(sums, target)
    below = tl.where(number > 0, tl.load(sums + tl.maximum(number - 1, 0)), below)
    start = tl.where(number > 0, _second_bound(low, high, number - 1), low)
    return start, _second_bound(low, high, number), below


@triton.jit(do_not_specialize=["first"])
def _narrow_kernel(
    adjusted,
    sums,
    top_p,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    num_rows,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = place + first
    if tl.load(ints + row * _INTS) & _SEARCHES != 0:
        top = _top(tops, place, tl.num_programs(0), BLOCKS)
        temperature = tl.load(floats + row * 4)
        top_k, floor = tl.load(ints + row * _INTS + _TOP_K), tl.load(ints + row * _INTS + _FLOOR)
        low, high = 0, _BEYOND
        if LEVEL == 2:
            first_sums = sums + place * _BOUNDS
            target = _target(first_sums, tl.load(top_p + row), top_k)
            low, high = _first_interval(first_sums, target)
        best = tl.load(tops + place * tl.num_programs(0) + block)
        if _distance(best, top, temperature) < high:
            column = block * BLOCK + tl.arange(0, BLOCK)
            source = adjusted + place * vocab_size + column
            x = tl.load(source, mask=column < vocab_size, other=float("nan"))
            distance = _distance(x, top, temperature)
            weight = _weight(distance, top_k, floor)
            numbers = tl.arange(0, _BOUNDS)
            below = tl.zeros([_BOUNDS], tl.int64)
            for number in tl.static_range(_BOUNDS):
                bound = _first_bound(number) if LEVEL == 1 else _second_bound(low, high, number)
                here = tl.sum(tl.where(distance < bound, weight, 0), 0)
                below = tl.where(numbers == number, here, below)
            into = sums + ((LEVEL - 1) * num_rows + place) * _BOUNDS
            tl.atomic_add(into + numbers, below, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _collect_kernel(
    adjusted,
    sums,
    top_p,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    num_rows,
    listed,
    found,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The order of what is collected is any, and nothing depends on it."""
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = place + first
    if tl.load(ints + row * _INTS) & _SEARCHES != 0:
        top = _top(tops, place, tl.num_programs(0), BLOCKS)
        temperature = tl.load(floats + row * 4)
        top_k = tl.load(ints + row * _INTS + _TOP_K)
        first_sums = sums + place * _BOUNDS
        second_sums = sums + (num_rows + place) * _BOUNDS
        target = _target(first_sums, tl.load(top_p + row), top_k)
        low, high, _ = _second_interval(first_sums, second_sums, target)
        best = tl.load(tops + place * tl.num_programs(0) + block)
        if _distance(best, top, temperature) < high:
            column = block * BLOCK + tl.arange(0, BLOCK)
            source = adjusted + place * vocab_size + column
            x = tl.load(source, mask=column < vocab_size, other=float("nan"))
            distance = _distance(x, top, temperature)
            is_inside = (distance >= low) & (distance < high)
            is_listed = tl.where(top_k > 0, distance < high, is_inside)
            number = tl.sum(is_listed.to(tl.int32), 0)
            if number > 0:
                start = tl.atomic_add(found + place * 4, number, sem="relaxed")
                order = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                target_place = listed + place * _CAPACITY + order
                tl.store(target_place, x, mask=is_listed & (order < _CAPACITY))
                least = tl.min(tl.where(is_inside, distance, _BEYOND), 0)
                greatest = tl.max(tl.where(is_inside, distance, -1), 0)
                tl.atomic_min(found + place * 4 + 1, least, sem="relaxed")
                tl.atomic_max(found + place * 4 + 2, greatest, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def _settle_kernel(
    adjusted,
    sums,
    top_p,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    num_rows,
    listed,
    found,
    num_blocks,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_AMD: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place + first
    if IS_AMD:
        # Its compiler follows pointers to where they began, and a choice of two stops it.
        adjusted = adjusted.to(tl.int64).to(tl.pointer_type(tl.float32))
        listed = listed.to(tl.int64).to(tl.pointer_type(tl.float32))
    if tl.load(ints + row * _INTS) & _SEARCHES != 0:
        top = _top(tops, place, num_blocks, BLOCKS)
        temperature, share = tl.load(floats + row * 4), tl.load(top_p + row)
        top_k, floor = tl.load(ints + row * _INTS + _TOP_K), tl.load(ints + row * _INTS + _FLOOR)
        first_sums = sums + place * _BOUNDS
        second_sums = sums + (num_rows + place) * _BOUNDS
        target = _target(first_sums, share, top_k)
        low, high, below = _second_interval(first_sums, second_sums, target)
        low = tl.maximum(low, tl.load(found + place * 4 + 1))
        high = tl.minimum(high, tl.load(found + place * 4 + 2) + 1)
        number = tl.load(found + place * 4)
        source, below = listed + place * _CAPACITY, tl.where(top_k > 0, 0, below)
        if number > _CAPACITY:
            source, below, number = adjusted + place * vocab_size, below * 0, vocab_size
        # The first logits are read once, and most often there are no others.
        offset = tl.arange(0, CHUNK)
        x = tl.load(source + offset, mask=offset < number, other=float("nan"))
        distance = _distance(x, top, temperature)
        mass = _mass(distance, floor)
        weight = tl.where(top_k > 0, tl.full([CHUNK], 1, tl.int64), mass)
        others = (source, number, top, temperature, floor)
        lowest = _bisected(distance, weight, low, high, below, target, top_k, others, CHUNK)
        if (top_k > 0) & (share < 1):
            # Of equal logits at the end only as many count as top_k has room for.
            above = _below(distance, weight, lowest, top_k, others, CHUNK)
            total = _below(distance, mass, lowest, top_k * 0, others, CHUNK)
            target = _share(share, total + (target - above) * _mass(lowest, floor))
            low, high = lowest * 0, lowest + 1
            lowest = _bisected(distance, mass, low, high, below, target, top_k * 0, others, CHUNK)
        tl.store(found + place * 4 + 3, tl.minimum(lowest, floor))


@triton.jit
def _bisected(distance, weight, low, high, below, target, top_k, others, CHUNK: tl.constexpr):
    """The least distance from `low` to below `high` at which the sum reaches the target."""
    while high - low > 1:
        middle = low + (high - low) // 2
        here = _below(distance, weight, middle, top_k, others, CHUNK)
        is_reached = below + here >= target
        low = tl.where(is_reached, low, middle)
        high = tl.where(is_reached, middle, high)
    return low


@triton.jit
def _below(distance, weight, bound, top_k, others, CHUNK: tl.constexpr):
    """What the logits weigh whose distance is less than the bound: those that were read, and
    those behind them."""
    source, number, top, temperature, floor = others
    total = tl.where(distance < bound, weight, 0)
    for start in range(CHUNK, number, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        x = tl.load(source + offset, mask=offset < number, other=float("nan"))
        other = _distance(x, top, temperature)
        total += tl.where(other < bound, _weight(other, top_k, floor), 0)
    return tl.sum(total, 0)


# --- 5 and 6: the draw ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first"])
def _draw_kernel(
    adjusted,
    found,
    best,
    columns,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = place + first
    kind = tl.load(ints + row * _INTS)
    into = place * tl.num_programs(0) + block
    if kind & _PLAIN == 0:
        column = block * BLOCK + tl.arange(0, BLOCK)
        source = adjusted + place * vocab_size + column
        best_here = tl.load(tops + into)
        if kind & _DRAWS == 0:
            x = tl.load(source, mask=column < vocab_size, other=float("-inf"))
            _store_best(x, block * BLOCK, best + into, columns + into)
        else:
            top = _top(tops, place, tl.num_programs(0), BLOCKS)
            temperature = tl.load(floats + row * 4)
            lowest = tl.load(ints + row * _INTS + _FLOOR)
            if kind & _SEARCHES != 0:
                lowest = tl.load(found + place * 4 + 3)
            if _distance(best_here, top, temperature) <= lowest:
                x = tl.load(source, mask=column < vocab_size, other=float("nan"))
                distance = _distance(x, top, temperature)
                noise = _gumbel(ints + row * _INTS, block * (BLOCK // 4), BLOCK)
                x = noise - distance.to(tl.float32, bitcast=True)
                x = tl.where(distance <= lowest, x, float("-inf"))
                _store_best(x, block * BLOCK, best + into, columns + into)
            else:
                tl.store(best + into, float("-inf"))
                tl.store(columns + into, block * BLOCK)


@triton.jit
def _store_best(x, start, best, column):
    """The first of the greatest."""
    top, where = tl.max(x, 0, return_indices=True)
    tl.store(best, top)
    tl.store(column, start + where)


@triton.jit
def _gumbel(ints, first_quad, BLOCK: tl.constexpr):
    """See `reference.gumbel`."""
    index = tl.load(ints + _INDEX)
    low = tl.load(ints + _SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(ints + _SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    quad = first_quad + tl.arange(0, BLOCK // 4)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(high << 32 | low, quad, zero + index, zero, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])
    uniform = ((words >> 9).to(tl.int32) * 2 + 1).to(tl.float32) * (1 / 16777216)
    return -_log(-_log(1 - uniform))


@triton.jit
def _log(x):
    """Of a normal number, near 1 too as exact as float32 holds it: a GPU's own is not."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True)  # from sqrt(1/2) to sqrt(2)
    ratio = (x - 1) / (x + 1)
    square = ratio * ratio
    series = 2 / 7 + square * (2 / 9 + square * (2 / 11))
    series = 2 + square * (2 / 3 + square * (2 / 5 + square * series))
    return ratio * series + exponent.to(tl.float32) * 0.6931471805599453


@triton.jit(do_not_specialize=["first"])
def _take_kernel(
    best,
    columns,
    likeliest,
    counts,
    token_ids,
    ints,
    first,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, block = place + first, tl.arange(0, BLOCKS)
    if tl.load(ints + row * _INTS) & _PLAIN != 0:
        tl.store(token_ids + row, tl.load(likeliest + row))
    else:
        is_block = block < num_blocks
        tops = tl.load(best + place * num_blocks + block, mask=is_block, other=float("-inf"))
        _, winner = tl.max(tops, 0, return_indices=True)
        winner = tl.minimum(winner, num_blocks - 1)
        # Among NaN the greatest may be found where there is no token.
        token = tl.minimum(tl.load(columns + place * num_blocks + winner), vocab_size - 1)
        tl.store(token_ids + row, token.to(tl.int64))
        count_row = tl.load(ints + row * _INTS + _COUNTS).to(tl.int64)
        if count_row >= 0:
            entry = counts + count_row * vocab_size + token
            counted = tl.load(entry).to(tl.int32)
            # Beyond the largest that there is room for it stays.
            step = tl.where((counted & 0x7FFF) < 0x7FFF, 1, 0)
            tl.store(entry, (counted + step).to(tl.int16))
