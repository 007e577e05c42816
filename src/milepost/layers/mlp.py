"""Feed-forwards: SwiGLU, with gate and up projection in one matrix, and squared ReLU.

Legend: T tokens, H hidden size, P split-K partials.
"""

from __future__ import annotations

from torch import Tensor, nn

from milepost.kernels import norm
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Epilogue
from milepost.layers.context import Context
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope
from milepost.parallel.ranks import join


class MLP(nn.Module):
    """A feed-forward from `hidden` [T, H] to [T, H] with `size` units; a `Part`.

    With two projection names (up and down), it has no gate and uses squared ReLU. The gate and up
    projections may share a name: then one tensor holds both, in this order. With a `limit`, what is
    multiplied is within it: see `norm.silu_mul`.
    """

    spec = None
    operation = None
    rotary = None

    def __init__(
        self,
        hidden_size: int,
        size: int,
        scope: ModuleScope,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        *,
        limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.limit = limit
        *up, down = names
        self.is_gated = len(up) == 2
        cut = scope.ranks.share(size, f"{scope.path} intermediate_size")
        cuts = {name: join(*[cut] * up.count(name)) for name in up}
        self.up = Linear(hidden_size, [(name, cut.size) for name in up], scope, cuts=cuts)
        self.down = Linear(cut.size, ((down, hidden_size),), scope, inputs=cut)

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.up.reads

    def forward(self, rows: Inputs, *, order: SumOrder = SumOrder.FREE) -> Tensor:
        return self.down(self._units(rows, order=order), order=order)

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:  # noqa: ARG002
        """Returns the output, or partials [T, P, H] of it, which the reader adds up. Padding costs
        nothing here, so it does not matter which tokens are real."""
        units = self._units(rows, order=ctx.order)
        return self.down(units, epilogue=Epilogue.PARTIALS, order=ctx.order)

    def _units(self, rows: Inputs, *, order: SumOrder) -> Inputs:
        if self.is_gated and not self.limit:
            return self.up.multiply_gated(rows, emit=self.down.reads, order=order)
        units = self.up(rows, order=order)
        return norm.silu_mul(units, self.limit) if self.is_gated else norm.relu_squared(units)
