"""Blocks and layers, from which architectures are assembled.

Legend: T tokens, C hidden size, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from milepost.kernels.layout.batch import Operation
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.context import Context, LayerSpec
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm, StreamNorm, over_ranks
from milepost.layers.parameters import module_list
from milepost.layers.rotary import Rotary
from milepost.parallel import ALONE


class Part(Protocol):
    """A mixer or a feed-forward. It is also a module."""

    @property
    def spec(self) -> LayerSpec | None:
        """The part's cache; None for a feed-forward."""
        ...

    @property
    def operation(self) -> Operation | None:
        """The operation that needs a layout, if any."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding of its positions, if any."""
        ...

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        ...

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Computes the output [T, C] from `rows` [T, C], or partials [T, P, C] of it. `number` is
        that of its cache. The sum over all ranks is the output."""
        ...


@runtime_checkable
class LastTokensPart(Protocol):
    """A part that has less to do if only sampled positions are needed after it."""

    @property
    def ending(self) -> Operation:
        """The operation that needs a layout for `run_last_tokens`, besides `operation`."""
        ...

    def run_last_tokens(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Like `run`, but returns the output [R, C] of the sampled positions."""
        ...


Numbers = tuple[int, ...]
"""Numbers of the caches of a block's parts."""


class LayerBlock(Protocol):
    """A step from one residual stream to the next. It is also a module, and has its parts."""

    parts: Sequence[Part]

    def run(
        self, hidden: Tensor, delta: Tensor | None, ctx: Context, numbers: Numbers, *, ends: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream, and the output that the next block adds to it: see
        `ResidualBlock.run`."""
        ...


class ResidualBlock(nn.Module):
    """One addition to the residual stream: a norm before it, parts side by side, a norm after it.

        hidden += post(sum of part(pre(hidden)))

    A block may be part of several layers. They share its weights, and each has its own cache.
    """

    def __init__(
        self, *parts: Part, pre: StreamNorm | None = None, post: RMSNorm | None = None
    ) -> None:
        super().__init__()
        self.parts: Sequence[Part] = module_list(parts)
        self.pre, self.post = pre, post
        norm = pre or post
        self._ranks = ALONE if norm is None else norm.ranks
        self._emit = Emit.joined(part.reads for part in parts)
        self._first: Linear | None = getattr(parts[0], "first", None)
        """The first part's projection whose product the norm may compute too: see
        `Linear.begin`."""

    def run(
        self, hidden: Tensor, delta: Tensor | None, ctx: Context, numbers: Numbers, *, ends: bool
    ) -> tuple[Tensor, Tensor]:
        """Adds `delta` [T, C], or partials of it, to the residual stream, and runs the parts.
        Returns the residual stream, [T, C] unless `pre` uses another shape, and the parts' output.
        The next norm adds the output to the stream, which is cheaper than a separate pass.
        With `ends`, both have only the rows of the sampled positions."""
        rows: Inputs
        if self.pre is not None:
            begun, order = None, ctx.order
            is_row = hidden.dim() == 2 and len(hidden) == 1
            if self._first is not None and is_row and order is SumOrder.FREE:
                begun = self._first.begin(hidden)
            hidden, rows = self.pre.add(hidden, delta, emit=self._emit, begun=begun, order=order)
        else:
            if delta is not None:  # partials are float32, the residual stream is not
                hidden = (hidden + self._whole(delta)).to(hidden.dtype)
            rows = hidden
        added = run_parts(self.parts, rows, ctx, numbers, ends=ends)
        if ends:
            hidden = hidden[ctx.step.last_tokens]
        if not self._ranks.is_alone:
            added = partials(added)
        if self.post is not None:
            added = self.post.norm_sum(over_ranks(added, self._ranks))
        return hidden, added

    def _whole(self, delta: Tensor) -> Tensor:
        """Sums partials [T, P, C] over P and all ranks; returns [T, C] unchanged."""
        return add_up(over_ranks(delta, self._ranks))


class Layer(nn.Module):
    """Blocks one after another, with the numbers of their parts' caches."""

    def __init__(self, *blocks: LayerBlock) -> None:
        super().__init__()
        self.blocks: Sequence[LayerBlock] = module_list(blocks)
        self.numbers: list[Numbers] = []

    def number(self, specs: list[LayerSpec]) -> None:
        """Gives each part that has a cache the next number, and appends the caches to `specs`."""
        self.numbers.clear()
        for block in self.blocks:
            numbers = []
            for part in block.parts:
                numbers.append(len(specs))
                if part.spec is not None:
                    specs.append(part.spec)
            self.numbers.append(tuple(numbers))

    @property
    def parts(self) -> list[Part]:
        """The parts of all blocks, in order."""
        return [part for block in self.blocks for part in block.parts]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for layers with the same kernels."""
        return tuple((type(part), part.operation) for part in self.parts)


def run_parts(
    parts: Iterable[Part], rows: Inputs, ctx: Context, numbers: Numbers, *, ends: bool
) -> Tensor:
    """Returns the sum [T, C] of the outputs of `parts` for the same `rows`, or the partials of a
    single part. With `ends`, only for the sampled positions."""
    outputs = []
    for part, number in zip(parts, numbers, strict=True):
        if ends and isinstance(part, LastTokensPart):
            outputs.append(part.run_last_tokens(rows, ctx, number))
        else:
            output = part.run(rows, ctx, number)
            outputs.append(output[ctx.step.last_tokens] if ends else output)
    if len(outputs) == 1:
        return outputs[0]
    first, *rest = map(add_up, outputs)
    return sum(rest, start=first)


def partials(output: Tensor) -> Tensor:
    """Returns a rank's output [T, C] as partials [T, 1, C], to which those of other ranks are
    added."""
    return output[:, None] if output.dim() == 2 else output


def add_up(output: Tensor) -> Tensor:
    """Sums partials [T, P, C] over P; returns [T, C] unchanged."""
    return output if output.dim() == 2 else output.sum(1)
