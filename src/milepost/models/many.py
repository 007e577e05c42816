"""Whether the prefills of a model have one order of sums, however few tokens a cache hit leaves.

After a hit a step has fewer rows than the cold run had. If every operation adds up its few rows as
it does many, the tokens after the hit get the bits of the cold run. A difference in one operation
reaches all after it, so a model pays for that order only if all of its operations have it.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import KernelTable, P, SumOrder
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.forms import Matrix
from milepost.kernels.products.table import PRODUCTS
from milepost.layers.attention import Attention
from milepost.layers.gated_delta import GatedDelta
from milepost.layers.linear import Linear
from milepost.layers.mlp import MLP
from milepost.layers.moe import MoE
from milepost.layers.norm import RMSNorm
from milepost.models.decoder import Decoder
from milepost.models.kernel_list import mixtures_of, products_of

FEW = (1, 4, 5, 16, 17, 32, 48, 64, 65, 96, 128, 129, 256, 384, 512)
"""Rows of a step after a hit."""
MANY = 2048
UNKNOWN = "cuBLAS"
"""Order of a library that chooses it by the number of rows."""


def follows_many(model: Decoder, chip: Chip, *, has_float8_kv: bool) -> bool:
    """Whether steps of few tokens are added up as those of many are."""
    return next(exceptions(model, chip, has_float8_kv=has_float8_kv), None) is None


def exceptions(model: Decoder, chip: Chip, *, has_float8_kv: bool = False) -> Iterator[str]:
    """Yields why the model's prefills do not have one order of sums on the chip."""
    if not model.ranks.is_alone:
        yield "sums over ranks have an order for few rows and one for many"
    if model.dtype.itemsize != 2:
        yield f"no kernel multiplies {model.dtype}"
    if has_float8_kv:
        yield "few tokens read FP8 pages as they are, many a copy in 16 bits"
    for layer in model.layers:
        for block in layer.blocks:
            others = [getattr(block, "pre", block), getattr(block, "post", None), *block.parts]
            for other in others:
                if other is not None and (reason := _why_other(other)):
                    yield reason
        for path, module in layer.named_modules():
            if isinstance(module, Linear):
                yield from _why_not_dense(path.rpartition(".")[2], module, chip)
            elif isinstance(module, MoE):
                yield from _why_not_experts(module, chip)


def _why_other(module: object) -> str:
    """Why a part or norm has no such order; empty if its products and norms alone decide."""
    if isinstance(module, Attention):
        return "an indexer selects what is attended to" if module.indexer is not None else ""
    if isinstance(module, MoE) and module.shapes.scores.kind == "sigmoid":
        return "unrounded products of a router are a library's"
    are_known = isinstance(module, GatedDelta | MLP | MoE | RMSNorm)
    return "" if are_known else f"{type(module).__name__} was not compared"


def _why_not_dense(name: str, linear: Linear, chip: Chip) -> Iterator[str]:
    for form in linear.weight_forms:
        matrix = Matrix.of(form, SumOrder.LIKE_MANY)
        if matrix.order.is_fixed:
            yield "batch_invariant has orders of its own"
        make = products_of(name, matrix)
        problems = {num: make(num) for num in (*FEW, MANY)}
        yield from _compare(PRODUCTS, problems, chip, f"{name} {_shape(matrix)}")


def _why_not_experts(module: MoE, chip: Chip) -> Iterator[str]:
    make = mixtures_of(module, SumOrder.LIKE_MANY)
    problems = {num: make(num) for num in (*FEW, MANY)}
    yield from _compare(EXPERTS, problems, chip, f"experts {_shape(problems[MANY].up)}")


def _compare(table: KernelTable[P], problems: dict[int, P], chip: Chip, name: str) -> Iterator[str]:
    """Yields the first number of rows whose order is not that of many rows."""
    orders = {}
    for num, problem in problems.items():
        choice = table.choose(problem, chip)
        orders[num] = UNKNOWN if choice is None else choice.order
    last = orders[MANY]
    for num, order in orders.items():
        if order != last or order == UNKNOWN:
            yield f"{name}: {order} for {num} rows, {last} for {MANY}"
            return


def _shape(matrix: Matrix) -> str:
    return f"{matrix.form.__name__.lower()}, {matrix.num_outputs} x {matrix.num_inputs}"
