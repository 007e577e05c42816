"""Lists the kernels that multiply a model's weights, attend and run its recurrences on a chip;
needs only the model's configuration.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from milepost.kernels.attention.table import Served, heads_served, latents_served
from milepost.kernels.platform.device import Chip, find_chip, present_chip, require_fp4
from milepost.kernels.platform.tables import KernelTable, P, SumOrder
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms import Epilogue, Matrix
from milepost.kernels.products.table import PRODUCTS, Product
from milepost.kernels.recurrent import TABLES, MixerPart, RecurrentOperation
from milepost.layers.attention import Attention
from milepost.layers.linear import Linear
from milepost.layers.mla import MLA
from milepost.layers.moe import MoE
from milepost.models.folder import find_folder
from milepost.models.loading import LoadOptions, outline

_SUMMED = ("out", "down", "router")
"""Projections whose split-K partials are added up by their reader."""
_PROBED = (*range(1, 130), 160, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens that are looked up in the table."""
COLUMNS = ("weight", "form, O x I", "tokens", "kernel", "order", "instead of")


def list_kernels(
    model: str, chip_name: str, quantization: str | None, *, fp4_activations: bool = False
) -> Iterator[tuple[str, ...]]:
    """Yields rows of a table with the columns `COLUMNS`. Raises ConfigError and the errors of
    `outline`."""
    chip = find_chip(chip_name) if chip_name else present_chip()
    if fp4_activations:
        require_fp4(chip)
    folder = find_folder(model, revision=None, with_weights=False)
    options = LoadOptions(quantization=quantization, fp4_activations=fp4_activations)
    decoder, _ = outline(folder, options)
    seen: set[object] = set()
    layers = [(f"layer {index}", layer) for index, layer in enumerate(decoder.layers)]
    for owner, layer in (*layers, ("lm_head", decoder.lm_head)):
        for path, module in layer.named_modules():
            name = f"{owner} {path}".replace("blocks.", "").strip()
            if isinstance(module, Linear):
                for form in module.weight_forms:
                    matrix = Matrix.of(form)
                    make = products_of(path.rpartition(".")[2], matrix)
                    if (path, matrix) not in seen:
                        seen.add((path, matrix))
                        yield from _cells(name, matrix, spans(PRODUCTS, make, chip))
            elif isinstance(module, Attention | MLA):
                shape, served_tokens = _attention(module, decoder.dtype, chip)
                if (path, shape) not in seen:
                    seen.add((path, shape))
                    for each in served_tokens:
                        yield f"{name} KV", f"{shape}, {each.pages}", *each[1:]
            elif isinstance(module, MoE):
                make_mixture = mixtures_of(module)
                mixture = make_mixture(1)
                if (path, mixture) not in seen:
                    seen.add((path, mixture))
                    served = spans(EXPERTS, make_mixture, chip)
                    yield from _cells(f"{name} experts", mixture.up, served)
            operation = getattr(module, "operation", None)
            if isinstance(operation, RecurrentOperation) and operation not in seen:
                seen.add(operation)
                yield from _mixer_cells(name, operation, chip)


def _mixer_cells(name: str, operation: RecurrentOperation, chip: Chip) -> Iterator[tuple[str, ...]]:
    """Yields rows of a table, for sequences that decode and tokens of a prefill."""
    sizes = operation.sizes
    for phase, table in TABLES.items():

        def make(num: int) -> MixerPart:
            return MixerPart(sizes=sizes, num=num, chunk=operation.chunk)

        shape = f"{sizes.heads} heads, {sizes.shared} x {sizes.own}"
        for index, span in enumerate(spans(table, make, chip)):
            whose = ("", "") if index else (f"{name} {phase}", shape)
            yield *whose, span.tokens, span.kernel, span.order, span.refused


def _cells(name: str, matrix: Matrix, served: Sequence[Span]) -> Iterator[tuple[str, ...]]:
    """Yields rows of a table; only the first names the weight."""
    shape = f"{matrix.form.__name__.lower()}, {matrix.num_outputs} x {matrix.num_inputs}"
    for index, span in enumerate(served):
        whose = ("", "") if index else (name, shape)
        yield *whose, span.tokens, span.kernel, span.order, span.refused


def products_of(name: str, matrix: Matrix) -> Callable[[int], Product]:
    """Returns a function from the number of rows to their product with a projection's matrix."""
    epilogue = Epilogue.PARTIALS if name in _SUMMED else Epilogue.NONE
    return lambda num: Product(weight=matrix, num_rows=num, epilogue=epilogue)


def mixtures_of(module: MoE, order: SumOrder = SumOrder.FREE) -> Callable[[int], Mixture]:
    """Returns a function from the number of tokens to the mixture of experts that they need."""
    up, down = (Matrix.of(form, order) for form in module.experts.forms)
    sizes = module.experts.sizes
    return lambda num: Mixture(
        up=up,
        down=down,
        num_experts=sizes.num_experts + sizes.num_shared,
        num_tokens=num,
        num_chosen=module.shapes.num_chosen + sizes.num_shared,
    )


def _attention(
    module: Attention | MLA, dtype: torch.dtype, chip: Chip
) -> tuple[str, Iterator[Served]]:
    """Returns the heads of an attention layer, and which kernels serve them."""
    if isinstance(module, MLA):
        latents = module.operation
        width = latents.latent_dim + latents.shared_dim
        shape = f"{latents.num_heads} heads, latents of {width}"
        return shape, latents_served(latents.num_heads, width, dtype, chip)
    heads = module.operation
    shape = f"{heads.num_heads} / {heads.num_kv_heads} heads of {heads.head_dim}"
    group, is_windowed = heads.num_heads // heads.num_kv_heads, heads.window is not None
    shape += f", windows of {heads.window}" if is_windowed else ""
    return shape, heads_served(group, heads.head_dim, dtype, chip, is_windowed=is_windowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of numbers of tokens that one kernel serves."""

    first: int
    last: int
    kernel: str
    order: str
    refused: str
    """Why the kernel before it in the table does not serve them."""

    @property
    def tokens(self) -> str:
        if self.last == _PROBED[-1]:
            return f"from {self.first}"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


class _Served(NamedTuple):
    kernel: str
    order: str


def spans(table: KernelTable[P], make: Callable[[int], P], chip: Chip) -> list[Span]:
    """Returns which kernels of the table serve the problems that `make` returns for a number of
    tokens."""

    def find(num_tokens: int) -> _Served:
        choice = table.choose(make(num_tokens), chip)
        return _Served(choice.kernel.name, choice.order) if choice else _Served("two launches", "")

    def span(first: int, last: int) -> Span:
        refused = list(table.refusals(make(first), chip))
        reason = f"{refused[-1][0].name}: {refused[-1][1]}" if refused else ""
        return Span(first=first, last=last, **find(first)._asdict(), refused=reason)

    starts = [_PROBED[0], *_changes(find)]
    return [span(first, after - 1) for first, after in pairwise([*starts, _PROBED[-1] + 1])]


def _changes(find: Callable[[int], _Served]) -> Iterator[int]:
    """Yields the numbers of tokens at which another kernel takes over."""
    for before, num_tokens in pairwise(_PROBED):
        served = find(num_tokens)
        if served == find(before):
            continue
        while num_tokens - before > 1:
            middle = (before + num_tokens) // 2
            if find(middle) == served:
                num_tokens = middle
            else:
                before = middle
        yield num_tokens
