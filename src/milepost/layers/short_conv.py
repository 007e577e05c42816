"""Gated short convolution: a projection to gates and x, a convolution of x times a gate, a gate.

Legend: T tokens, C hidden size, P split-K partials.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels import short_conv
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.kernels.recurrent import CHUNK
from milepost.kernels.short_conv import ShortConvOperation
from milepost.layers.context import Context, RecurrentSpec, ShortConvSpec
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope, ParameterModule, dummy_taps
from milepost.layers.weight_slots import place_whole
from milepost.parallel.ranks import join


class ShortConv(ParameterModule):
    """A gated short convolution from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and
    writes the states stored with the step's pages, or with `in_slots` those in its slots.

    One projection computes, in the published order: gates before the convolution, gates after it,
    x.
    """

    rotary = None

    def __init__(
        self,
        hidden_size: int,
        conv_width: int,
        scope: ModuleScope,
        *,
        bias: bool = False,
        in_slots: bool = False,
    ) -> None:
        super().__init__(scope)
        cut = scope.ranks.share(hidden_size, f"{scope.path} hidden_size")
        size, cuts = cut.size, {"in_proj": join(*[cut] * 3)}
        self.projection = Linear(hidden_size, (("in_proj", 3 * size),), scope, bias=bias, cuts=cuts)
        self.conv_weight = self.declare(
            "conv.weight",
            scope.empty(size, conv_width),
            place=lambda weight: place_whole(weight.unsqueeze(1)),
            cut=cut,
            dummy=dummy_taps,
        )
        self.conv_bias = None
        if bias:
            self.conv_bias = self.declare("conv.bias", scope.empty(size), cut=cut, dummy=0)
        self.out = Linear(size, (("out_proj", hidden_size),), scope, bias=bias, inputs=cut)
        self.operation = ShortConvOperation(num_taps=conv_width, in_slots=in_slots)

    @property
    def spec(self) -> ShortConvSpec | RecurrentSpec:
        size, conv_width = self.conv_weight.shape
        if self.operation.in_slots:
            return RecurrentSpec(
                conv_shape=(size, conv_width - 1),
                recurrent_shape=(0,),
                grid=CHUNK,
                record_size=size,
                num_before=conv_width - 1,
            )
        return ShortConvSpec(conv_shape=(size, conv_width - 1))

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, P, C] of it."""
        pool, records = ctx.conv_states.get(number), ctx.conv_records.get(number)
        if self.operation.in_slots:
            pool, records = ctx.states[number].conv, ctx.states[number].records
        assert pool is not None, "states lie beside pages or in slots"
        mixed = short_conv.mix(
            self.projection(rows, launch_dependents=ctx.decodes),
            self.conv_weight,
            self.conv_bias,
            pool,
            ctx.step.layouts[self.operation],
            records,
        )
        return self.out(mixed, epilogue=Epilogue.PARTIALS)
