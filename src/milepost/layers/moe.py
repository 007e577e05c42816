"""Mixture of experts: each token is routed to its best experts, and optionally to one expert that
all tokens share.

A shared expert whose size is that of the others or a small multiple of it is stored as extra
experts after the last one; its gate, if it has one, is an extra row of the router. Every token
chooses it, so it needs no GEMM of its own. A shared expert of any other size is a separate MLP.
Latent experts read and write a space smaller than the hidden one and have a projection before and
after them.

Legend: T tokens, H hidden size, X experts, N experts per token, P split-K partials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError
from milepost.kernels import products
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import in_blocks
from milepost.kernels.products import SOFTMAX, Epilogue, Scores
from milepost.layers.context import Context
from milepost.layers.experts import USUAL_NAMES, ExpertNames, ExpertSizes
from milepost.layers.linear import Linear
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.weight_slots import WeightSlot, WeightSlots
from milepost.layers.weights import Precision
from milepost.parallel import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """Sizes of a mixture; a `shared_size` of 0 means that there is no shared expert."""

    num_experts: int
    num_chosen: int
    size: int
    shared_size: int
    normalise: bool
    """Whether the weights of a token's chosen experts are normalised to add up to 1."""
    scores: Scores = SOFTMAX
    has_bias: bool = False
    """Whether a correction is added to the scores when experts are chosen."""
    latent_size: int = 0
    """Size of the space that experts read and write; 0 for the hidden size."""
    limit: float = 0.0
    """Limit of the routed experts' activations: see `norm.silu_mul`. 0 if there is none."""
    shared_limit: float = 0.0
    """Limit of the shared expert's activations; 0 if there is none."""

    @property
    def num_joint(self) -> int:
        """Number of regular experts that the shared one is stored as; 0 if it is a separate MLP."""
        count, rest = divmod(self.shared_size, self.size)
        is_apart = self.latent_size or self.limit != self.shared_limit
        return 0 if rest or is_apart else count


class MoE(ParameterModule):
    """A mixture of experts from `hidden` [T, H] to partials [T, P, H] of the output; a `Part`."""

    spec = None
    operation = None
    rotary = None

    def __init__(
        self,
        hidden_size: int,
        shapes: ExpertShapes,
        scope: ModuleScope,
        names: ExpertNames = USUAL_NAMES,
    ) -> None:
        super().__init__(scope)
        self.shapes, self.hidden_size = shapes, hidden_size
        self.names = names
        precision, shared_scope = _precision_of(names, scope), scope.under(names.shared)
        self.cut, units = _cuts(shapes, scope)
        # The shared expert belongs to no single rank, so it is not joined when experts are split
        # over ranks.
        splits = scope.ranks.splits_experts
        joins = not splits and precision == shared_scope.precision(names.shared_projections[0])
        self.num_joint = (
            shapes.num_joint if joins and shapes.num_joint <= precision.max_shared else 0
        )
        has_gate = bool(shapes.shared_size) and shapes.scores.gates_shared
        has_gate_row = self.num_joint > 0 and has_gate
        self.num_logits = shapes.num_experts + has_gate_row
        sections = (
            (names.router, shapes.num_experts),
            (f"{names.shared}_gate", int(has_gate_row)),
            (None, -self.num_logits % 8),  # products with whole groups of 8 outputs are faster
        )
        self.router = Linear(hidden_size, [each for each in sections if each[1]], scope)
        self.bias = None
        if shapes.has_bias:
            self.bias = self.declare(names.bias, scope.empty_precise(shapes.num_experts), dummy=0)
        inner_size = shapes.latent_size or hidden_size
        sizes = ExpertSizes(
            hidden_size=inner_size,
            size=units.size,
            num_experts=self.cut.size,
            num_shared=self.num_joint,
            experts=self.cut,
            units=units,
            shared_units=_units(shapes.shared_size, scope) if self.num_joint else units,
        )
        self.experts = precision.experts(sizes, names, scope)
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if shapes.latent_size:
            self.latent_in = Linear(hidden_size, (("fc1_latent_proj", inner_size),), scope)
            self.latent_out = Linear(inner_size, (("fc2_latent_proj", hidden_size),), scope)
        if shapes.shared_size and not self.num_joint:
            projections, limit = names.shared_projections, shapes.shared_limit
            self.shared = MLP(
                hidden_size, shapes.shared_size, shared_scope, projections, limit=limit
            )
            if has_gate:
                self.shared_gate = Linear(hidden_size, ((f"{names.shared}_gate", 1),), scope)

    @property
    def num_weights(self) -> int:
        """Number of expert weights on this rank that a token is multiplied by, on average."""
        num_own = self.shapes.num_chosen * self.cut.size // self.shapes.num_experts
        return (num_own + self.num_joint) * self.experts.sizes.num_weights

    @property
    def first(self) -> Linear | None:
        """The projection that the preceding norm's launch may also compute: see `Block`."""
        return None if self.shapes.scores.kind == "sigmoid" else self.router

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        inputs = self.experts if self.latent_in is None else self.latent_in
        readers = self.router, inputs, self.shared, self.shared_gate
        return Emit.joined(each.reads for each in readers if each is not None)

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:  # noqa: ARG002
        """Returns the output as partials, which the reader adds up."""
        return self.partials(rows, ctx.num_real, order=ctx.order)

    def partials(
        self, rows: Inputs, num_real: Tensor | None = None, *, order: SumOrder = SumOrder.FREE
    ) -> Tensor:
        """Computes `run`; tokens from `num_real` [1] on are padding."""
        is_precise = self.shapes.scores.kind == "sigmoid"
        epilogue = Epilogue.FLOAT32 if is_precise else Epilogue.PARTIALS
        logits = self.router(rows, epilogue=epilogue, order=order)[..., : self.num_logits]
        inputs = rows if self.latent_in is None else self.latent_in(rows, order=order)
        shares, experts = self._route(logits, rows.dtype, num_real)
        up, down = self.experts.forms
        limit = self.shapes.limit
        partials = products.mix(inputs, shares, experts, up, down, limit=limit, order=order)
        if self.latent_out is not None:
            partials = self.latent_out(partials.sum(1), order=order)[:, None]
        if self.shared is not None:
            shared = self.shared(rows, order=order)
            if self.shared_gate is None:
                partials[:, 0].add_(shared)
            else:
                share = self._share(self.shared_gate(rows, order=order))
                partials[:, 0].addcmul_(share, shared)
        return partials

    def _share(self, gate: Tensor) -> Tensor:
        """Returns the shared expert's share [T, 1] by the output of its gate, which it may
        overwrite."""
        # On a CPU the last elements of a tensor are computed in another way than the others.
        is_split = self.scope.order.is_fixed and not gate.is_cuda
        return in_blocks(torch.sigmoid, gate) if is_split else gate.sigmoid_()

    def _route(
        self, logits: Tensor, dtype: torch.dtype, num_real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns each token's routing weights and experts, as indices on this rank."""
        shares, experts = products.route(
            logits,
            self.shapes.num_chosen,
            normalise=self.shapes.normalise,
            num_shared=self.num_joint,
            scores=self.shapes.scores,
            bias=self.bias,
            dtype=dtype,
            num_real=num_real,
            order=self.scope.order,
        )
        return (shares, experts) if self.cut.is_whole else self._own(shares, experts)

    def _own(self, shares: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns routing weights and experts as indices on this rank. An expert of another rank is
        replaced by one of this rank that the token did not choose, with weight 0, because no token
        may have an expert twice."""
        ((first, count),) = self.cut.spans
        local = experts.long() - first
        is_own = (local >= 0) & (local < count)
        is_chosen = torch.zeros(len(local), count + 1, dtype=torch.int32, device=local.device)
        is_chosen.scatter_(1, local.where(is_own, count), 1)
        others = is_chosen[:, :count].argsort(dim=1, stable=True)
        place = (~is_own).long().cumsum(1).sub_(1).clamp_(min=0)
        indices = local.where(is_own, others.gather(1, place))
        return shares * is_own, indices.to(experts.dtype)

    @property
    def elsewhere(self) -> str:
        """A pattern of the names of tensors that only other ranks read; empty if there are none."""
        if self.cut.is_whole:
            return ""
        numbers = "|".join(str(number) for _, number in self.experts.sizes.numbers)
        return rf"{re.escape(self.scope.full(self.names.single))}\.(?!({numbers})\.)\d+\."

    def placements(self) -> WeightSlots:
        """Places the router's bias. Without a shared expert, the shared expert's tensors that the
        checkpoint may still hold are read and ignored."""
        placements = super().placements()
        if self.shapes.shared_size:
            return placements
        shapes = {
            "shared_expert.gate_proj.weight": (0, self.hidden_size),
            "shared_expert.up_proj.weight": (0, self.hidden_size),
            "shared_expert.down_proj.weight": (self.hidden_size, 0),
            "shared_expert_gate.weight": (1, self.hidden_size),
        }
        return placements | {
            self.scope.full(name): WeightSlot(shape, len)
            for name, shape in shapes.items()
            if self.scope.has(name)
        }


def elsewhere_of(model: nn.Module) -> tuple[str, ...]:
    """Returns patterns of the names of a checkpoint's tensors that only other ranks read."""
    patterns = (module.elsewhere for module in model.modules() if isinstance(module, MoE))
    return tuple(pattern for pattern in patterns if pattern)


def _precision_of(names: ExpertNames, scope: ModuleScope) -> Precision:
    """Returns the form of the experts' weights in the checkpoint."""
    # A tensor of stacked experts may be named like a module.
    stacked = names.stacked[0].removesuffix(".weight")
    is_module = stacked != names.stacked[0] and scope.has(names.stacked[0])
    return scope.precision(stacked if is_module else names.single)


def _cuts(shapes: ExpertShapes, scope: ModuleScope) -> tuple[Cut, Cut]:
    """Returns the experts that this rank has, and the units of each. Raises ConfigError if the rank
    has fewer experts than a token chooses."""
    ranks = scope.ranks
    if not ranks.splits_experts:
        return Cut.all_of(shapes.num_experts), _units(shapes.size, scope)
    experts = ranks.share(shapes.num_experts, f"{scope.path} num_experts")
    if experts.size < shapes.num_chosen:
        raise ConfigError(
            f"tensor_parallel_size={ranks.size}: {scope.path} has {experts.size} experts "
            f"on a rank, and a token has {shapes.num_chosen}; leave expert parallelism out"
        )
    return experts, Cut.all_of(shapes.size)


def _units(size: int, scope: ModuleScope) -> Cut:
    """Returns this rank's units of an expert of `size` units."""
    return scope.ranks.share(size, f"{scope.path} moe_intermediate_size")
