"""The base class of mixers with states in slots.

Legend: T tokens, C hidden size, P split-K partials.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.kernels.recurrent import (
    MixerProjections,
    RecurrentOperation,
    RecurrentRule,
    Weights,
    takes_drafts_fused,
)
from milepost.layers.context import Context, RecurrentSpec
from milepost.layers.linear import Linear
from milepost.layers.parameters import ParameterModule, dummy_between

DECAYS = dummy_between(-0.5, -0.005)
"""Dummy decay rates: half-lives from about one token to a hundred, as in trained models."""


class RecurrentMixer(ParameterModule):
    """A mixer from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and writes its states in
    the step's slots."""

    rotary = None
    projection: Linear
    out: Linear
    operation: RecurrentOperation
    spec: RecurrentSpec
    weights: Weights

    def run_by(self, operation: RecurrentOperation) -> None:
        """Sets the operation that runs the recurrence. Its sizes say what a slot and the record of
        a draft hold."""
        sizes = operation.sizes
        is_mamba2 = sizes.rule == RecurrentRule.MAMBA2
        is_gated_delta = sizes.rule == RecurrentRule.GATED_DELTA
        entries = (sizes.own, sizes.shared) if is_mamba2 else (sizes.shared, sizes.own)
        self.operation = operation
        self.spec = RecurrentSpec(
            conv_shape=(sizes.channels, sizes.taps - 1),
            recurrent_shape=(sizes.heads, *entries),
            grid=operation.chunk,
            # Of each token: its channels, its decay inputs, and a beta or time step for each head.
            record_size=sizes.channels + sizes.decays + sizes.heads,
            takes_drafts_fused=not is_gated_delta or takes_drafts_fused(*entries),
        )

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, P, C] of it."""
        states, layout = ctx.layer_states(number), ctx.step.layouts[self.operation]
        mixed = self.operation.mix(self._project(rows, ctx), self.weights, states, layout)
        return self.out(self._finish(mixed), epilogue=Epilogue.PARTIALS, order=ctx.order)

    def _project(self, rows: Inputs, ctx: Context) -> MixerProjections:
        """Returns the recurrence's inputs."""
        return self.projection(rows, launch_dependents=ctx.decodes, order=ctx.order)

    def _finish(self, mixed: Tensor) -> Tensor:
        """Returns the output projection's input."""
        return mixed
