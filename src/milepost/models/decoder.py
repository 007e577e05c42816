"""The decoder that all architectures share: an embedding, a list of layers made of parts, a norm
and a head.

Legend: T tokens, C hidden size, R rows that logits are computed for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.kernels.layout.batch import Capacity, Operation
from milepost.kernels.layout.emit import values_of
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.context import Context, LayerSpec
from milepost.layers.embedding import embed, put
from milepost.layers.linear import Linear
from milepost.layers.moe import elsewhere_of
from milepost.layers.mtp import MTPHead
from milepost.layers.ngrams import NgramPart
from milepost.layers.norm import StreamNorm
from milepost.layers.parameters import ModuleScope, module_list
from milepost.layers.parts import LastTokensPart, Layer, LayerBlock, Part
from milepost.layers.rotary import num_positions
from milepost.layers.tower import Tower
from milepost.layers.weight_slots import (
    FLOATS,
    Holder,
    WeightSlot,
    WeightSlots,
    cut_all,
    fill_matrix,
    merge,
    place_whole,
    scale,
)
from milepost.layers.weights import RawWeight

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The parts from which a decoder is assembled."""

    layers: list[Layer]
    norm: StreamNorm
    """Norm after the last layer."""
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    factors: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Maps ends of tensor names to factors that are multiplied into the tensors on loading."""
    head: MTPHead | None = None
    """The MTP head that drafts tokens, if any."""
    tower: Tower | None = None
    """The vision tower, if the model takes pictures."""


class Decoder(nn.Module):
    """A model for inference; keeps no state of its own.

    Parameters are allocated on their device and left unfilled. `config` is the text model's
    configuration, `scope` that of the module with the embedding, and `output` that of the module
    with the output projection, which is the checkpoint's top level if None.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        parts: DecoderParts,
        scope: ModuleScope,
        *,
        is_tied: bool,
        embedding: str = "embed_tokens",
        output: ModuleScope | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.scope = scope
        self.dtype = scope.dtype
        self.vocab_size: int = config.vocab_size
        self.ranks = scope.ranks
        self._vocab = scope.ranks.share(config.vocab_size, "vocab_size")
        self.embedding = scope.empty(self._vocab.size, config.hidden_size)
        self._embedding_name = scope.full(f"{embedding}.weight")
        self.layers = module_list(parts.layers)
        self.norm = parts.norm
        self.lm_head = Linear(
            config.hidden_size,
            (("lm_head", self._vocab.size),),
            output or scope.root(),
            weight=RawWeight(self.embedding, scope.order) if is_tied else None,
            cuts={"lm_head": self._vocab},
        )
        self.mtp = parts.head
        self.tower = parts.tower
        self._factors = parts.factors
        self._multipliers = parts.embedding_multiplier, parts.logits_multiplier
        specs: list[LayerSpec] = []
        for layer in parts.layers:
            layer.number(specs)
        if self.mtp is not None:
            self.mtp.layer.number(specs)
        self.layer_specs = tuple(specs)
        """The cache of each mixer, by its number."""
        self.parts_by_layer = [layer.parts for layer in parts.layers]
        every_part: list[Part | MTPHead] = [*chain.from_iterable(self.parts_by_layer)]
        if self.mtp is not None:
            every_part.append(self.mtp)
        self._last = _last_with_cache(parts.layers)
        self.ending: tuple[Operation, ...] = ()
        """Operations with an extra layout in steps that compute only sampled positions at the
        end."""
        if self._last is not None and self.mtp is None:
            lasts = self._last[1].parts
            self.ending = _once(part.ending for part in lasts if isinstance(part, LastTokensPart))
        self.operations: tuple[Operation, ...] = (
            *_once(part.operation for part in every_part),
            *self.ending,
        )
        """The distinct operations of all mixers."""
        self._rotaries = _once(part.rotary for part in every_part)
        self._carried_size = config.hidden_size if self.mtp is not None else 0
        for part in every_part:
            if isinstance(part, NgramPart):
                assert self.mtp is None, "a head has all that slots carry to itself"
                part.carried_from = self._carried_size
                self._carried_size += part.carried_size

    @property
    def num_positions(self) -> int:
        """Length in tokens of the longest sequence that the model's positions support."""
        return num_positions(self.config)

    def ends_early(self, capacity: Capacity) -> bool:
        """Whether `forward` may return only the sampled positions for a step of this capacity, if
        it scores no prompt. A head needs all positions. With `batch_invariant`, a prompt's last
        position attends as the others do, whatever else is in the step."""
        is_free = self.mtp is None and not self.scope.order.is_fixed
        return is_free and capacity.ends_early

    @property
    def merge_size(self) -> int | None:
        """Patches of a token's side, if tokens of pictures have rows and columns for positions;
        None if they have one position each, or there are none."""
        has_rows = any(rotary.has_rows for rotary in self._rotaries)
        return self.tower.shapes.merge_size if self.tower is not None and has_rows else None

    @property
    def carried_size(self) -> int:
        """Number of values in the model's dtype that each slot carries, for the head or for parts
        with such states."""
        return self._carried_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def host_bytes(self) -> int:
        """Bytes of tables that stay in host memory."""
        return sum(module.host_bytes for module in self.modules() if isinstance(module, NgramPart))

    @property
    def mixers_without_drafts(self) -> tuple[str, ...]:
        """Names of the mixers whose kernels cannot verify drafts."""
        parts = chain.from_iterable(self.parts_by_layer)
        without = [part for part in parts if part.spec and not part.spec.takes_drafts]
        return tuple(dict.fromkeys(type(part).__name__ for part in without))

    def one_of_each_kind(self) -> list[Layer]:
        """Returns layers that together launch all of the model's kernels, with the last layer at
        the end."""
        last_of_kind = {layer.kind: index for index, layer in enumerate(self.layers)}
        return [self.layers[index] for index in sorted(last_of_kind.values())]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        ctx: Context,
        layers: Iterable[Layer] | None = None,
        before: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Returns hidden states [T, C] of `token_ids` [T]; writes the pages and slots that `ctx`
        names.

        The head, if there is one, takes in the tokens. `layers` replace the model's layers, as if
        it had no others. Calls `before` before each layer, with the number of layers already run.
        If `ctx.last_tokens_only`, returns hidden states [R, C] of the step's `last_tokens` only.
        """
        self._turn(ctx)
        if ctx.step.token_ids is not token_ids:
            ctx = replace(ctx, step=replace(ctx.step, token_ids=token_ids))
        hidden, delta = put(self._embed(token_ids), ctx.pictures), None
        for index, layer in enumerate(self.layers if layers is None else layers):
            if before is not None:
                before(index)
            for block, numbers in zip(layer.blocks, layer.numbers, strict=True):
                ends = ctx.last_tokens_only and (layer, block) == self._last
                hidden, delta = block.run(hidden, delta, ctx, numbers, ends=ends)
                ctx = ctx.at_ends() if ends else ctx
        hidden = values_of(self.norm.add(hidden, delta, order=ctx.order)[1])
        if self.mtp is not None:
            assert not ctx.last_tokens_only, "a head takes in every token"
            self.mtp.note(token_ids, self.embedding, hidden, ctx)
        return hidden

    @torch.inference_mode()
    def draft(self, token_ids: Tensor, before: Tensor, ctx: Context) -> Tensor:
        """Returns the head's hidden states [T, C] after the tokens [T], one per sequence; their
        logits predict the next tokens. `before` [T, C] are the hidden states before the tokens,
        from the model or from the head itself."""
        assert self.mtp is not None, "only a model with a head drafts"
        self._turn(ctx)
        return self.mtp.run(token_ids, self.embedding, before, ctx)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, *, order: SumOrder = SumOrder.FREE) -> Tensor:
        """Returns logits [R, vocab_size] for rows `hidden` [R, C] that `forward` returned, added up
        in the step's `order`."""
        logits = self.ranks.all_gather(self.lm_head(hidden, order=order))
        return logits if self._multipliers[1] == 1 else logits * self._multipliers[1]

    def placements(self) -> WeightSlots:
        """Returns the placement of each checkpoint tensor, keyed by its full name."""
        embedding = {self._embedding_name: cut_all(place_whole(self.embedding), self._vocab)}
        placements = merge([embedding, *(holder.placements() for holder in self._holders())])
        for (end, factor), name in product(self._factors.items(), placements):
            self._refuse_quantised(name, placements[name], end)
            if name.endswith(f".{end}"):
                placements[name] = scale(placements[name], factor)
        return placements

    def _refuse_quantised(self, name: str, place: WeightSlot, end: str) -> None:
        """Raises UnsupportedModelError if a factor applies to a weight that is not stored as plain
        floats."""
        if f".{end.rpartition('.')[0]}." in name and place.types != FLOATS:
            raise UnsupportedModelError(
                f"{name}: model_type={self.config.model_type!r} has multipliers, which are not "
                "supported in quantised weights; use the checkpoint that is not quantised, or "
                "quantization='fp8' on it"
            )

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Patterns of the names of a checkpoint's tensors that only other ranks read."""
        return elsewhere_of(self)

    @torch.no_grad()
    def pack(self) -> None:
        """Rearranges filled float32 weights for decoding on a CPU; does nothing on other
        devices."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Fills all parameters with dummy values that keep activations and states in range."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        spread = self.config.initializer_range
        fill_matrix(self.embedding, spread, generator)
        for holder in self._holders():
            holder.fill(spread, generator)

    def _turn(self, ctx: Context) -> None:
        for rotary in self._rotaries:
            ctx.angles[rotary] = rotary.angles(ctx.step.positions, self.dtype)
            if ctx.pictures is not None:
                rotary.turn_pictures(ctx.angles[rotary], ctx.pictures)

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = embed(token_ids, self.embedding, self.ranks)
        return hidden if self._multipliers[0] == 1 else hidden * self._multipliers[0]

    def _holders(self) -> Iterator[Holder]:
        """Yields each module with its own parameters once."""
        for module in self.modules():
            if module is not self and isinstance(module, Holder):
                yield module


def _last_with_cache(layers: list[Layer]) -> tuple[Layer, LayerBlock] | None:
    blocks = ((layer, block) for layer in reversed(layers) for block in reversed(layer.blocks))
    has_cache = (each for each in blocks if any(part.spec for part in each[1].parts))
    return next(has_cache, None)


def _once(values: Iterable[T | None]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(value for value in values if value is not None))
