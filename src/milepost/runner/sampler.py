"""Samples tokens on a GPU as `runner.sampling` defines it, without waiting for the device.

A step's sampling parameters go to the device in one copy; the token counts of each answer are kept
there (`runner.histories`).

Legend: R rows, V vocabulary, B blocks of it, E entries, W words of a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import sampling as layout
from milepost.kernels.sampling import StepRows, Workspace, block_size, num_blocks
from milepost.kernels.sampling.draws import draw
from milepost.runner.choice import tensor_beside
from milepost.runner.histories import Counts
from milepost.runner.sampling import SamplingRow, choose, log_of, temperature_of, top_k_of
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.sampling_params import SamplingParams

_ROWS_AT_ONCE = 64
"""Number of rows sampled in parallel; further rows take turns in the same memory."""
_STAGED_BYTES = 1 << 16

Entries = tuple[np.ndarray, np.ndarray]
KnownEntries = tuple[SamplingParams | None, Sequence[int], Entries]
_NONE: KnownEntries = (None, (), (np.empty(0, np.int32), np.empty(0, np.float32)))


class Sampler:
    """Samples up to `num_rows` rows per step."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = Counts(num_rows, vocab_size, device)
        self._work = Workspace(min(num_rows, _ROWS_AT_ONCE), vocab_size, device)
        self._constants = _Constants(num_rows, vocab_size)
        self._staging = Staging(device, _STAGED_BYTES)
        self._device = device
        self._bounds = np.arange(num_blocks(vocab_size) + 1) * block_size(vocab_size)
        self._entries: dict[int, KnownEntries] = {}
        """Maps a request's number to its parameters, its suppressed ids, and the entries they add
        to logits."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the sampler holds."""
        return self._work.num_bytes + self._counts.table.nbytes

    def choose(
        self, numbers: Sequence[int], logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]
    ) -> Tensor:
        """Returns token ids [R] sampled from the requests' `logits` [R, V]; `best` [R] are the
        likeliest. Penalties that apply to drafts are left to the reference: the token counts on the
        device do not include drafts."""
        times = Counter(numbers)
        apart = {
            index
            for index, (number, row) in enumerate(zip(numbers, rows, strict=True))
            if row.params.has_penalties and times[number] > 1
        }
        if not apart:
            return self._choose(numbers, logits, best, rows)
        token_ids = best.clone()
        place = tensor_beside(sorted(apart), torch.int64, logits)
        token_ids[place] = choose(logits[place], [rows[i] for i in sorted(apart)]).token_ids
        if rest := [index for index in range(len(rows)) if index not in apart]:
            place = tensor_beside(rest, torch.int64, logits)
            drawn = [numbers[index] for index in rest], logits[place], best[place]
            token_ids[place] = self._choose(*drawn, [rows[index] for index in rest])
        return token_ids

    def _choose(
        self, numbers: Sequence[int], logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]
    ) -> Tensor:
        places = self._counts.places(numbers, rows)
        step = self._build(numbers, rows, places)
        num_bytes = num_staged_bytes(step)
        if num_bytes > self._staging.num_bytes:
            self._staging = Staging(self._device, 2 * num_bytes)
        self._staging.send(step)
        searches = bool((step.ints[:, layout.KIND] & layout.SEARCHES).any())
        views = self._staging.views(step)
        return draw(logits, best, self._counts.table, views, self._work, searches=searches)

    def rehearse(self, dtype: torch.dtype) -> None:
        """Launches every kernel once, with logits of type `dtype`."""
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        best = torch.zeros(1, dtype=torch.int64, device=self._device)
        params = SamplingParams(top_k=1, top_p=0.5, temperature=1.0)
        row = SamplingRow(params=params, seed=0, tokens=(), num_prompt_tokens=0)
        step = self._build([-1], [row], [-1])
        step.ints[:, layout.KIND] = layout.DRAWS | layout.SEARCHES
        self._staging.send(step)
        views = self._staging.views(step)
        draw(logits, best, self._counts.table, views, self._work, searches=True)

    def _build(
        self, numbers: Sequence[int], rows: Sequence[SamplingRow], places: Sequence[int]
    ) -> StepRows:
        """Builds a step's rows with a few numpy calls and as little Python per row as possible: the
        device is waiting."""
        indices = self._constants.places(numbers, rows)
        ints = self._constants.ints[indices]
        ints[:, layout.INDEX] = [row.index for row in rows]
        ints[:, layout.COUNTS] = places
        for index in np.flatnonzero(ints[:, layout.KIND] == 0).tolist():
            ints[index, layout.KIND] = 0 if rows[index].is_adjusted else layout.IS_PLAIN
        masked = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
        masks = np.empty((len(masked), -(-self._vocab_size // 32)), np.int32)
        for place, (index, mask) in enumerate(masked):
            masks[place] = mask
            ints[index, layout.MASK] = place
        starts, entry_ids, entry_values = self._added(numbers, rows)
        return StepRows(
            ints=ints,
            floats=self._constants.floats[indices],
            top_p=self._constants.top_p[indices],
            starts=starts,
            entry_ids=entry_ids,
            entry_values=entry_values,
            masks=masks,
        )

    def _added(
        self, numbers: Sequence[int], rows: Sequence[SamplingRow]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Collects the values added to single logits: where each row's entries begin in each block,
        and all entries in one sequence."""
        starts = np.zeros((len(rows), len(self._bounds)), np.int32)
        known, self._entries = self._entries, {}
        ids, values, end = [_NONE[2][0]], [_NONE[2][1]], 0
        for index, row in enumerate(rows):
            if not row.suppressed_ids and not row.params.logit_bias:
                continue
            number, (params, suppressed, entries) = numbers[index], known.get(numbers[index], _NONE)
            if params is not row.params or suppressed != row.suppressed_ids:
                entries = _entries_of(row)
            self._entries[number] = row.params, row.suppressed_ids, entries
            starts[index] = end + np.searchsorted(entries[0], self._bounds)
            end += len(entries[0])
            ids.append(entries[0])
            values.append(entries[1])
        return starts, np.concatenate(ids), np.concatenate(values)


class _Constants:
    """Constant sampling parameters of requests, as columns of `StepRows`, with a place for each
    request that may sample in one step."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.ints = np.zeros((num_rows, layout.NUM_INTS), np.int32)
        self.floats = np.zeros((num_rows, 4), np.float32)
        self.top_p = np.ones(num_rows, np.float64)
        self._vocab_size = vocab_size
        self._free = list(range(num_rows))
        self._known: dict[int, tuple[int, SamplingParams, int]] = {}
        """Maps a request's number to its place, and the parameters and seed written there."""

    def places(self, numbers: Sequence[int], rows: Sequence[SamplingRow]) -> list[int]:
        places = []
        for number, row in zip(numbers, rows, strict=True):
            place, params, seed = self._known.get(number, (-1, None, None))
            if params is not row.params or seed != row.seed:
                if place < 0:
                    place = self._take(numbers)
                self._known[number] = place, row.params, row.seed
                self._write(place, row)
            places.append(place)
        return places

    def _take(self, numbers: Sequence[int]) -> int:
        """Takes a free place; if there is none, frees those of all requests outside this step."""
        if not self._free:
            wanted = set(numbers)
            for other in [number for number in self._known if number not in wanted]:
                self._free.append(self._known.pop(other)[0])
        return self._free.pop()

    def _write(self, place: int, row: SamplingRow) -> None:
        params, top_k = row.params, top_k_of(row, self._vocab_size)
        kind = 0
        if not row.takes_the_best:
            kind = layout.DRAWS | (layout.SEARCHES if params.top_p < 1 or top_k else 0)
        ints = (kind, 0, top_k, _floor_bits(params.min_p), -1, -1, *layout.seed_words(row.seed))
        self.ints[place] = np.array(ints, np.int64).astype(np.uint32).view(np.int32)
        self.floats[place] = (
            temperature_of(row),
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self.top_p[place] = params.top_p


def _entries_of(row: SamplingRow) -> Entries:
    """Returns a row's entries, sorted by token id; forbidden tokens get minus infinity."""
    values = row.params.biases | dict.fromkeys(row.suppressed_ids, -np.inf)
    token_ids = np.array(sorted(values), np.int32)
    return token_ids, np.array([values[t] for t in token_ids.tolist()], np.float32)


@lru_cache(maxsize=64)
def _floor_bits(min_p: float) -> int:
    """Returns the bits of min_p's floor as float32, as a distance below the largest logit."""
    return int(np.float32(-log_of(min_p)).view(np.int32)) & 0x7FFFFFFF
