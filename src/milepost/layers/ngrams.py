"""N-gram embeddings that a layer adds to its residual streams: a shared value a token, gated for
each stream by how its key fits the stream, and a dilated short convolution of that. The table of
embeddings lies in host memory, since each token reads a few rows of it.

Legend: T tokens, F sequences, S streams, C hidden size, E entries of a token's embeddings, D tokens
that the convolution reaches back, O order of the largest n-gram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.errors import ConfigError, WeightsError
from milepost.kernels import ngrams, residual
from milepost.kernels.layout.emit import Emit, Inputs, values_of
from milepost.kernels.ngrams import NgramOperation, NgramSequences, StatePart
from milepost.layers.context import Context
from milepost.layers.linear import Linear
from milepost.layers.norm import place_scale
from milepost.layers.parameters import ModuleScope, ParameterModule, dummy_taps, module_list
from milepost.layers.parts import Numbers, Part
from milepost.layers.weight_slots import WeightSlot, WeightSlots, place_whole

_NORMS = ("norm_key", "norm_query", "norm_conv")
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramShapes:
    """Sizes of a layer's n-gram embeddings."""

    hidden_size: int
    num_streams: int
    embedding_size: int
    """Entries of all of a token's embeddings together."""
    conv_width: int
    order: int
    """Tokens of the largest n-grams; also the dilation of the convolution."""
    heads_each: int
    """Embeddings that a token has for each order from 2 on."""
    least_rows: int
    """Bound on the rows of an embedding's table: each table has a prime number of them, from this
    one on, that no other has."""
    divisor: int
    """The table's rows are padded to a multiple of it."""
    num_shards: int
    """Tensors that a checkpoint's table is cut into."""
    vocab_size: int
    stop_id: int
    """The token that no n-gram reaches back beyond."""
    seed: int
    index: int
    """Number of such layers before this one."""
    norm_eps: float

    @property
    def reach(self) -> int:
        """Number of earlier tokens that the convolution reads."""
        return (self.conv_width - 1) * self.order


class NgramPart(ParameterModule):
    """Computes the n-gram embeddings of the streams [T, S, C]; a `Part` that reads the streams
    without a norm. Its states are carried beside those in the step's slots."""

    spec = None
    rotary = None
    reads = Emit.VALUES

    def __init__(self, shapes: NgramShapes, scope: ModuleScope) -> None:
        super().__init__(scope)
        if scope.ranks.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={scope.ranks.size}: {scope.path} has a table of n-grams, "
                "which is not split; supported is 1"
            )
        self.shapes, self.operation = shapes, NgramOperation()
        self.size = shapes.num_streams * shapes.hidden_size
        self.key = Linear(shapes.embedding_size, (("key_proj", self.size),), scope)
        self.value = Linear(shapes.embedding_size, (("value_proj", shapes.hidden_size),), scope)
        size = shapes.num_streams, shapes.hidden_size
        scales = {
            name: self.declare(
                f"{name}.weight",
                scope.empty_precise(*size),
                place=lambda scale: place_scale(scale.view(-1), 1.0),
            )
            for name in _NORMS
        }
        self.scales = nn.ParameterDict(scales)
        self.conv_weight = self.declare(
            "conv1d.weight",
            scope.empty(self.size, shapes.conv_width),
            place=lambda weight: place_whole(weight.unsqueeze(1)),
            dummy=dummy_taps,
        )
        self.multipliers = multipliers_of(shapes)
        self.sizes = sizes_of(shapes)
        every = [size for sizes in self.sizes for size in sizes]
        num_rows = -(-sum(every) // shapes.divisor) * shapes.divisor
        width = shapes.embedding_size // len(every)
        is_gpu = scope.device.type == "cuda"
        where = "cpu" if is_gpu else scope.device
        # No parameter: it stays in host memory, and is not counted among the device's weights.
        self.table = torch.empty(
            num_rows, width, dtype=scope.dtype, device=where, pin_memory=is_gpu
        )
        self.carried_from = 0
        # Parts of a state: inputs of the convolution, then ids.
        self._inputs = StatePart(0, shapes.reach, self.size)
        end = shapes.reach * self.size
        self._digits = StatePart(end, shapes.order - 1, ngrams.NUM_DIGITS)

    @property
    def host_bytes(self) -> int:
        """Bytes of the table."""
        return self.table.nbytes

    @property
    def carried_size(self) -> int:
        """Numbers of a state: inputs of the convolution, then digits of ids."""
        return self.shapes.reach * self.size + (self.shapes.order - 1) * ngrams.NUM_DIGITS

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:  # noqa: ARG002
        """Returns the embeddings to add to the streams; reads and writes the states in slots."""
        shapes, carried, streams = self.shapes, ctx.carried, values_of(rows)
        assert carried is not None, "slots carry what n-grams reach back to"
        carry_rows = ctx.step.layouts[self.operation]
        columns = slice(self.carried_from, self.carried_from + self.carried_size)
        if not len(streams):  # accepted drafts alone are folded
            nothing = streams.new_zeros(len(carry_rows.targets), self.carried_size)
            ngrams.keep_states(nothing, nothing[:0], carried, carry_rows, columns)
            return streams
        sequences = NgramSequences.of(carry_rows, carried, columns)
        digits = ngrams.encode_ids(ctx.step.token_ids, streams.dtype)
        every = torch.arange(len(digits), device=digits.device)
        values = self._gate(streams, self._embed(sequences, digits, every))
        inputs = residual.norm_streams(values, self.scales["norm_conv"], shapes.norm_eps).flatten(1)
        output = values.flatten(1) + self._convolve(sequences, inputs, every)

        def states_after(tokens: Tensor) -> Tensor:
            given = (inputs, self._inputs, shapes.reach), (digits, self._digits, shapes.order - 1)
            states = [
                ngrams.last_of(sequences, state, part, tokens, num).flatten(1)
                for state, part, num in given
            ]
            return torch.cat(states, 1)

        recorded = None
        if carried.records is not None:
            num_rows, num_drafts, _ = carried.records.shape
            recorded = states_after(every[: num_rows * (1 + num_drafts)])  # decodes come first
        states = states_after(carry_rows.targets[:, 0].long().clamp(min=0))
        ngrams.keep_states(states, recorded, carried, carry_rows, columns)
        return output.view_as(streams)

    def _embed(self, sequences: NgramSequences, digits: Tensor, every: Tensor) -> Tensor:
        """Returns the embeddings [T, E] of ids in digits [T, 4]."""
        stop, order = self.shapes.stop_id, self.shapes.order
        ngram_digits = ngrams.last_of(sequences, digits, self._digits, every, order)
        ids = ngrams.decode_ids(ngram_digits, stop).flip(1).unbind(1)
        places = ngrams.hash_ids(ids, stop, self.multipliers, self.sizes)
        return ngrams.take_from_host(self.table, places.flatten()).view(len(digits), -1)

    def _gate(self, streams: Tensor, embedded: Tensor) -> Tensor:
        """Returns the value times each stream's gate [T, S, C]."""
        key, eps = self.key(embedded).view_as(streams), self.shapes.norm_eps
        key = residual.norm_streams(key, self.scales["norm_key"], eps)
        query = residual.norm_streams(streams, self.scales["norm_query"], eps)
        fit = (key * query).sum(-1, keepdim=True) / math.sqrt(self.shapes.hidden_size)
        fit = fit.abs().clamp_min(1e-6).sqrt() * fit.sign()
        return fit.sigmoid() * self.value(embedded)[:, None]

    def _convolve(self, sequences: NgramSequences, inputs: Tensor, every: Tensor) -> Tensor:
        taps, total = self.shapes.conv_width, torch.zeros_like(inputs)
        for tap in range(taps):
            back = (taps - 1 - tap) * self.shapes.order
            tap_inputs = ngrams.continued(sequences, inputs, self._inputs, every, back)
            total += tap_inputs * self.conv_weight[:, tap]
        return F.silu(total)

    def placements(self) -> WeightSlots:
        tensors: WeightSlots = {}
        path = "ple_embedding.ngram_embedding"
        if self.scope.has(f"{path}.weight"):
            tensors[f"{path}.weight"] = place_whole(self.table)
        else:
            for index, rows in enumerate(self.table.chunk(self.shapes.num_shards)):
                tensors[f"{path}.shard_{index}.weight"] = place_whole(rows)
        every = [size for sizes in self.sizes for size in sizes]
        offsets = [sum(every[:index]) for index in range(len(every))]
        known = {"layer_multipliers": self.multipliers, "ngram_heads_vocab_sizes": every}
        for name, numbers in (*known.items(), ("ngram_heads_offsets", offsets)):
            if self.scope.has(f"ple_embedding.{name}"):
                tensors[f"ple_embedding.{name}"] = self._check(name, numbers)
        others = {self.scope.full(name): place for name, place in tensors.items()}
        return super().placements() | others

    def _check(self, name: str, numbers: list[int]) -> WeightSlot:
        """Places numbers that follow from the configuration: a file may have no others."""

        def compare(values: Tensor) -> None:
            if values.tolist() != numbers:
                raise WeightsError(
                    f"{self.scope.full('ple_embedding')}.{name} has other numbers than its "
                    "config.json leads to: n-grams are hashed in another way"
                )

        return WeightSlot((len(numbers),), compare, types=("I64",))

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the table with one number: random ones would take minutes."""
        super().fill(spread, generator)
        self.table.fill_(spread)


class NgramBlock(nn.Module):
    """Adds n-gram embeddings to the streams; a `LayerBlock`."""

    def __init__(self, part: NgramPart) -> None:
        super().__init__()
        self.part = part
        self.parts: Sequence[Part] = module_list([part])

    def run(
        self, hidden: Tensor, delta: Tensor | None, ctx: Context, numbers: Numbers, *, ends: bool
    ) -> tuple[Tensor, None]:
        """Returns the streams [T, S, C]; `hidden` may be the embedding [T, C]. See `LayerBlock`."""
        assert delta is None, "blocks add their outputs themselves"
        assert not ends, "attention follows"
        streams = hidden
        if hidden.dim() == 2:
            streams = hidden[:, None].expand(-1, self.part.shapes.num_streams, -1)
        return streams + self.part.run(streams, ctx, numbers[0]), None


def multipliers_of(shapes: NgramShapes) -> list[int]:
    """Returns odd factors of the ids of an n-gram, from the seed; no product exceeds 63 bits."""
    bound = max(1, ((1 << 63) - 1) // max(shapes.vocab_size, 1) // 2)
    gamma, base = 0x9E3779B97F4A7C15, shapes.seed + 10007 * shapes.index
    return [
        2 * (_splitmix(base + gamma * (place + 1)) % bound) + 1 for place in range(shapes.order)
    ]


def _splitmix(number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def sizes_of(shapes: NgramShapes) -> list[list[int]]:
    """Returns the rows of each of a token's embeddings, by order: primes that no other layer's
    have."""
    each, num_orders = shapes.heads_each, shapes.order - 1
    first = shapes.index * num_orders * each
    primes = filter(_is_prime, count(max(shapes.least_rows, 2)))
    sizes = list(islice(primes, first, first + num_orders * each))
    return [sizes[place : place + each] for place in range(0, len(sizes), each)]


def _is_prime(number: int) -> bool:
    if number % 2 == 0:
        return number == 2
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
