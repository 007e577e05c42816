"""CUDA graphs of a model's step: decodes, and mixed batches of few tokens.

A prompt that hits the cache leaves a few dozen tokens to compute. The kernels of such a step take
longer to launch one by one than to run; a graph launches them at once. A graph is captured for each
capacity of a ladder, and runs any step that fits, padded. A graph of a prefill may be in two
pieces, cut before the first layer that reads page tables: the first runs while the host sends new
page ids and lays out attention for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.layout.batch import Capacity, Operation
from milepost.kernels.recurrent import CHUNK
from milepost.layers.context import AttentionSpec
from milepost.layers.parts import Part
from milepost.models.decoder import Decoder
from milepost.scheduler.budget import max_num_exports
from milepost.scheduler.plans import StepPlan

_MIXED_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512)
_LONG_TOKENS = (768, 1024, 1536, 2048, 3072)
"""Also captured for models that are launch-bound at this many tokens."""
_FEW_SEQUENCES = 4
"""Number of sequences in the smaller graph of a short mixed step: most steps after a cache hit have
one. Padding to many sequences starts programs that only return, and starting them takes longer than
the kernels run. In long steps they are a hundredth of the time."""
_FINE_DECODES = (1, 2, 4, 8)
_DECODE_STEP = 8
_VERIFY_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_VERIFY_LENGTHS = (2, 4, 8, 16)
"""Average tokens per sequence, captured besides the maximum. Excess tokens are padding at the end
of the step, so sequences with and without drafts fit together."""
_VERIFY_MIXED_TOKENS = (64, 128, 256, 512)
_VERIFY_LONG_TOKENS = (1024, 2048)
_MAX_FOUND = 4096
"""Number of step sizes whose graph is remembered."""


SplitHere = Callable[[], None]
"""Ends the graph being recorded at the current point of a step, and begins the next."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results that a step leaves on the device; a graph's next run overwrites them."""

    logits: Tensor
    """[R, vocabulary], logits of the requests that sample."""
    hidden: Tensor
    """[R, C], the hidden states of the logits."""
    best: Tensor
    """[R] int64, the likeliest token of each row."""


def ladder(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_drafts: int = 0,
    most_launched: int = 0,
) -> list[Capacity]:
    """Returns the capacities to capture, the largest first, so that the others fit in its memory.

    With up to `num_drafts` drafts per sequence, capacities of verifying steps are added. Steps of
    up to `most_launched` tokens take as long as their launches do, so padding costs them nothing.
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
    """Returns capacities for decodes of several lengths, and for prefills next to the most
    decodes."""
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
    """Returns the step that takes the most memory: the whole token budget, cut into as many
    sequences as may run. Each sequence samples, leaves a state, and exports a state at each grid
    position."""
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
    """Does nothing: a step that is not recorded is not cut."""


class Graphs:
    """Captured steps by capacity."""

    def __init__(self) -> None:
        self._graphs: dict[Capacity, tuple[list[torch.cuda.CUDAGraph], StepOutputs]] = {}
        self._found: dict[Capacity, Capacity | None] = {}
        """Maps the capacity that a plan needs to the captured one."""
        self._last: torch.cuda.CUDAGraph | None = None
        """The graph that was captured last; all use one memory pool."""

    def capture(self, capacity: Capacity, run: Callable[[SplitHere], StepOutputs]) -> None:
        """Records the launches of `run`, which must use the same addresses each time. `run` may cut
        the record in pieces; one piece runs while the host prepares the next."""
        run(_no_cut)  # compiles kernels that are not compiled yet
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as recording:

            def begin() -> None:
                recording.close()
                torch.cuda.synchronize()
                last = graphs[-1] if graphs else self._last
                pool = last.pool() if last is not None else None
                graphs.append(torch.cuda.CUDAGraph())
                # NCCL's threads query events during the capture.
                recording.enter_context(
                    torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local")
                )

            begin()
            outcome = run(begin)
        self._last = graphs[-1]
        self._graphs[capacity] = graphs, outcome
        self._found.clear()
        self.replay(capacity)  # uploads it, so that the first step need not wait for that

    def find(self, exact: Capacity) -> Capacity | None:
        """Returns the smallest captured capacity that holds such a step."""
        if exact not in self._found:
            if len(self._found) == _MAX_FOUND:
                self._found.clear()
            self._found[exact] = smallest(tuple(self._graphs), exact)
        return self._found[exact]

    def replay(
        self, capacity: Capacity, between: Callable[[], object] | None = None
    ) -> StepOutputs:
        """Launches the graph; `between` is called once the first of several pieces is launched."""
        (first, *others), outcome = self._graphs[capacity]
        first.replay()
        if others and between is not None:
            between()
        for graph in others:
            graph.replay()
        return outcome


def smallest(capacities: Sequence[Capacity], exact: Capacity) -> Capacity | None:
    """Returns the smallest capacity that holds a step of size `exact`, or None."""
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
    """Returns the capacity that the plan needs, without padding."""
    num_drafts = plan.num_drafts
    return Capacity(
        num_tokens=plan.num_tokens,
        num_sequences=len(plan.sequences),
        num_exports=sum(len(sequence.exports) for sequence in plan.sequences),
        decodes=plan.num_decodes == len(plan.sequences),
        num_drafts=num_drafts or int(plan.verifies),
        is_exact=True,
    )


class GraphSplit:
    """The two pieces of one model."""

    def __init__(self, model: Decoder) -> None:
        by_layer = [_attention(parts) for parts in model.parts_by_layer]
        self.num_first = next((index for index, operations in enumerate(by_layer) if operations), 0)
        """Number of layers in the first piece; 0 if there is only one piece."""
        late = {operation for operations in by_layer for operation in operations}
        late.update(model.ending)
        self.first = tuple(each for each in model.operations if each not in late)
        """Operations that are laid out for the first piece."""
        self.second = tuple(each for each in model.operations if each in late)

    def cut(self, capacity: Capacity) -> bool:
        """Whether such a step is cut. Decodes are not: they are laid out while the step before them
        runs."""
        return self.num_first > 0 and not capacity.decodes


def _attention(parts: Iterable[Part]) -> list[Operation | None]:
    return [part.operation for part in parts if isinstance(part.spec, AttentionSpec)]
