"""CUDA graphs of a model's step: decodes, and mixed batches of few tokens.

A prompt that hits leaves a few dozen tokens to compute. Launched one by one, the kernels of such a
step take longer to launch than to run; as a graph they are launched at once. A graph is captured
for each capacity of a ladder, and runs any step that fits, padded. It may be in two pieces, of
which the first runs while the host lays out what the second reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.batch import Capacity
from milepost.kernels.gated_delta import CHUNK
from milepost.scheduler.budget import max_num_exports
from milepost.scheduler.plans import StepPlan

_MIXED_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512)
_LONG_TOKENS = (768, 1024, 1536, 2048, 3072)
"""And of models that so many tokens keep no busier than they keep the host."""
_FEW_SEQUENCES = 4
"""Most steps behind a hit have one: programs that return from the padding of many take longer to
start than its kernels to run. In long steps they are a hundredth."""
_FINE_DECODES = (1, 2, 4, 8)
_DECODE_STEP = 8
_VERIFY_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_VERIFY_LENGTHS = (2, 4, 8, 16)
"""Tokens of a sequence, on average, besides as many as it may have. What is past a step's own is
padding at its end, so sequences with and without drafts fit together."""
_VERIFY_MIXED_TOKENS = (64, 128, 256, 512)
_VERIFY_LONG_TOKENS = (1024, 2048)
_MAX_FOUND = 4096
"""Sizes of steps whose graph is remembered."""


Cut = Callable[[], None]
"""Ends a graph where a step has got to, and begins another one behind it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves on the device; a graph's is written again by its next run."""

    logits: Tensor
    """[R, vocabulary], of the requests that sample."""
    hidden: Tensor
    """[R, C], what the logits are made of."""
    best: Tensor
    """[R] int64, the likeliest token of each."""


def ladder(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_drafts: int = 0,
    most_launched: int = 0,
) -> list[Capacity]:
    """Capacities to capture, the largest first, so that the others find their memory in its.

    With drafts, up to so many of each sequence, those of steps that verify come on top. Steps of up
    to `most_launched` tokens take as long as their launches do, so that padding costs nothing.
    """
    most = min(most_launched, max_num_batched_tokens)
    mixed = [
        Capacity(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_exports=max_num_exports(num_sequences, num_tokens, CHUNK),
            decodes=False,
        )
        for num_tokens in _within(_MIXED_TOKENS, _LONG_TOKENS, max_num_batched_tokens, most)
        for num_sequences in _mixed_sequences(num_tokens, min(max_num_seqs, num_tokens))
    ]
    counts = [n for n in _FINE_DECODES if n < max_num_seqs]
    counts += [*range(2 * _DECODE_STEP, max_num_seqs, _DECODE_STEP), max_num_seqs]
    decodes = [
        Capacity(num_tokens=count, num_sequences=count, num_exports=0, decodes=True)
        for count in counts
    ]
    verifies: list[Capacity] = []
    if num_drafts:
        verifies = _verifies(max_num_seqs, max_num_batched_tokens, num_drafts, most)
    return [*reversed(mixed), *verifies, *reversed(decodes)]


def _within(short: Sequence[int], long: Sequence[int], most: int, most_long: int) -> list[int]:
    return [*(n for n in short if n <= most), *(n for n in long if n <= most_long)]


def _verifies(
    max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int, most_long: int
) -> list[Capacity]:
    """Decodes of several lengths, and prefills beside as many of them as there may be."""
    counts = {min(n, max_num_seqs) for n in _VERIFY_DECODES} | {max_num_seqs}
    lengths = {n for n in _VERIFY_LENGTHS if n <= num_drafts} | {1 + num_drafts}
    decodes = [
        Capacity(
            num_tokens=count * length, num_sequences=count, decodes=True, num_drafts=num_drafts
        )
        for count in counts
        for length in lengths
        if count * length <= max_num_batched_tokens
    ]
    mixed = [
        Capacity(
            num_tokens=num_tokens,
            num_sequences=min(max_num_seqs, num_tokens),
            num_exports=max_num_exports(min(max_num_seqs, num_tokens), num_tokens, CHUNK),
            num_drafts=num_drafts,
        )
        for num_tokens in _within(
            _VERIFY_MIXED_TOKENS, _VERIFY_LONG_TOKENS, max_num_batched_tokens, most_long
        )
    ]
    return sorted(decodes + mixed, key=lambda c: (-c.num_tokens, -c.num_sequences))


def largest_step(
    *, max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int = 0
) -> Capacity:
    """The step that takes the most memory: its whole budget, cut into as many sequences as may run,
    each of which samples and leaves a state, and a state at each grid position."""
    num_sequences = min(max_num_seqs, max_num_batched_tokens)
    return Capacity(
        num_tokens=max_num_batched_tokens,
        num_sequences=num_sequences,
        num_exports=max_num_exports(num_sequences, max_num_batched_tokens, CHUNK),
        decodes=False,
        num_drafts=num_drafts,
    )


def _mixed_sequences(num_tokens: int, most: int) -> tuple[int, ...]:
    has_own = num_tokens not in _LONG_TOKENS and most > _FEW_SEQUENCES
    return (_FEW_SEQUENCES, most) if has_own else (most,)


def _no_cut() -> None:
    """Of a step that is not recorded."""


class Graphs:
    """Captured steps by capacity."""

    def __init__(self) -> None:
        self._graphs: dict[Capacity, tuple[list[torch.cuda.CUDAGraph], Outcome]] = {}
        self._found: dict[Capacity, Capacity | None] = {}
        """By what a plan needs."""
        self._pool: tuple[int, int] | None = None

    def capture(self, capacity: Capacity, run: Callable[[Cut], Outcome]) -> None:
        """Record what `run` launches; it must touch the same addresses each time. It may cut the
        record in pieces, of which one runs while the host prepares the next."""
        run(_no_cut)  # compiles what is not compiled yet
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as recording:

            def begin() -> None:
                recording.close()
                torch.cuda.synchronize()
                pool = graphs[-1].pool() if graphs else self._pool
                graphs.append(torch.cuda.CUDAGraph())
                # Other threads of NCCL's look at events meanwhile.
                recording.enter_context(
                    torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local")
                )

            begin()
            outcome = run(begin)
        self._pool = graphs[0].pool()
        self._graphs[capacity] = graphs, outcome
        self._found.clear()
        self.replay(capacity)  # brings it to the device, which the first step need not wait for

    def find(self, exact: Capacity) -> Capacity | None:
        """The smallest captured capacity that holds such a step."""
        if exact not in self._found:
            if len(self._found) == _MAX_FOUND:
                self._found.clear()
            self._found[exact] = smallest(tuple(self._graphs), exact)
        return self._found[exact]

    def replay(self, capacity: Capacity, between: Callable[[], object] | None = None) -> Outcome:
        """Launch the graph; `between` is called once the first of several pieces is launched."""
        (first, *others), outcome = self._graphs[capacity]
        first.replay()
        if others and between is not None:
            between()
        for graph in others:
            graph.replay()
        return outcome


def smallest(capacities: Sequence[Capacity], exact: Capacity) -> Capacity | None:
    """The smallest of the capacities that holds a step of just this, if one does."""
    fitting = [
        c
        for c in capacities
        if c.decodes == exact.decodes
        and (c.num_drafts > 0) == (exact.num_drafts > 0)
        and c.num_drafts >= exact.num_drafts
        and c.num_tokens >= exact.num_tokens
        and c.num_sequences >= exact.num_sequences
        and c.num_exports >= exact.num_exports
    ]
    return min(fitting, key=lambda c: (c.num_tokens, c.num_sequences), default=None)


def exact_capacity(plan: StepPlan) -> Capacity:
    """Just what the plan needs."""
    num_drafts = plan.num_drafts
    return Capacity(
        num_tokens=plan.num_tokens,
        num_sequences=len(plan.sequences),
        num_exports=sum(len(sequence.exports) for sequence in plan.sequences),
        decodes=plan.num_decodes == len(plan.sequences),
        num_drafts=num_drafts or int(plan.verifies),
        is_exact=True,
    )
