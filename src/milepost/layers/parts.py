"""Blocks and layers: what an architecture is put together from.

Legend: T tokens, C hidden size, P split-K partials.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from milepost.kernels.batch import Operation
from milepost.kernels.emit import Emit, Inputs
from milepost.layers.context import Context, LayerSpec
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm
from milepost.layers.rotary import Rotary
from milepost.parallel import ALONE


class Part(Protocol):
    """A mixer or a feed-forward; a module."""

    @property
    def spec(self) -> LayerSpec | None:
        """Its cache; None for a feed-forward."""
        ...

    @property
    def operation(self) -> Operation | None:
        """What it needs laid out."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """The positions that it turns by."""
        ...

    @property
    def reads(self) -> Emit:
        """What it reads of its rows."""
        ...

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """`rows` [T, C] to the output [T, C], or partials [T, P, C] of it; `number` is that of its
        cache. What all ranks return adds up to the output."""
        ...


@runtime_checkable
class EndingPart(Protocol):
    """A part that has less to do where only rows go on behind which is sampled."""

    @property
    def ending(self) -> Operation:
        """What it needs laid out for that besides."""
        ...

    def run_ends(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """As `run`, but the output [R, C] of those rows."""
        ...


class Block(nn.Module):
    """One addition to the residual stream: a norm before it, parts side by side, a norm after it.

        hidden += post(sum of part(pre(hidden)))

    A block may stand in several layers: they share its weights, and each has a cache of its own.
    """

    def __init__(
        self, *parts: Part, pre: RMSNorm | None = None, post: RMSNorm | None = None
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.pre, self.post = pre, post
        norm = pre or post
        self._ranks = ALONE if norm is None else norm.ranks
        self._emit = Emit.joined(part.reads for part in parts)
        self._first: Linear | None = getattr(parts[0], "first", None)
        """What the first part begins with: see `Linear.begin`."""

    def run(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        ctx: Context,
        numbers: tuple[int, ...],
        *,
        ends: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, C] with `delta` [T, C], or partials of it, added; and what is to
        be added next, which the norm that follows does for less than a pass of its own costs.
        Where it `ends`, the rows of both are those behind which is sampled."""
        rows: Inputs
        if self.pre is not None:
            is_row = self._first is not None and len(hidden) == 1
            begun = self._first.begin(hidden) if is_row else None
            hidden, rows = self.pre.add(hidden, delta, emit=self._emit, begun=begun)
        else:
            if delta is not None:  # partials are float32, the residual stream is not
                hidden = (hidden + self._whole(delta)).to(hidden.dtype)
            rows = hidden
        outputs = [
            self._run(part, rows, ctx, number, ends=ends)
            for part, number in zip(self.parts, numbers, strict=True)
        ]
        if ends:
            hidden = hidden[ctx.step.last_tokens]
        added = outputs[0] if len(outputs) == 1 else sum(map(_add_up, outputs))
        if not self._ranks.is_alone and added.dim() == 2:
            added = added[:, None]
        if self.post is not None:
            added = self.post(self._whole(added))
        return hidden, added

    def _run(self, part: Part, rows: Inputs, ctx: Context, number: int, *, ends: bool) -> Tensor:
        if ends and isinstance(part, EndingPart):
            return part.run_ends(rows, ctx, number)
        output = part.run(rows, ctx, number)
        return output[ctx.step.last_tokens] if ends else output

    def _whole(self, partials: Tensor) -> Tensor:
        """[T, C] of partials [T, P, C], over all ranks; of [T, C] itself."""
        return partials if partials.dim() == 2 else self._ranks.all_reduce(_add_up(partials))


class Layer(nn.Module):
    """Blocks one after the other, with the numbers of their parts' caches."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.numbers: list[tuple[int, ...]] = []

    def number(self, specs: list[LayerSpec]) -> None:
        """Give each part that has a cache the next number; append the caches to `specs`."""
        self.numbers.clear()
        for block in self.blocks:
            own = []
            for part in block.parts:
                own.append(len(specs))
                if part.spec is not None:
                    specs.append(part.spec)
            self.numbers.append(tuple(own))

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that launch the same kernels."""
        return tuple((type(part), part.operation) for block in self.blocks for part in block.parts)


def _add_up(partials: Tensor) -> Tensor:
    """[T, C] of partials [T, P, C]; of [T, C] itself."""
    return partials if partials.dim() == 2 else partials.sum(1)
