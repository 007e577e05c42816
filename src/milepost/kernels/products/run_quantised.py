"""Runs the kernel that `products.table` chooses for rows and a quantised weight on a GPU. Experts:
`triton_mix`.

Legend: T tokens, I inputs, O outputs, S splits along I.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.emit import LINE, Activations, values_of
from milepost.kernels.platform.device import probe
from milepost.kernels.products.forms.matrix import Epilogue, Matrix
from milepost.kernels.products.forms.quantised import FourBits, Fp8, Int4, Quantised
from milepost.kernels.products.kernels import KernelChoice
from milepost.kernels.products.portable import (
    quantised_gemm,
    quantised_gemv,
    rounding,
    unpack,
)
from milepost.kernels.products.portable.quantised_tiles import FEW, suits
from milepost.kernels.products.table import MANY_ROWS, PRODUCTS, Product


def multiply(
    rows: Activations, weight: Quantised, bias: Tensor | None, *, launch_dependents: bool
) -> Tensor | None:
    """`rows` [T, I] times `weight` [O, I], plus `bias` [O]: [T, O], or float32 partials [T, S, O];
    None where there is no kernel for it."""
    if not suits(rows, weight):
        return None
    if len(rows) == 0:
        return rows.new_empty(0, weight.num_outputs)
    choice = _choose(rows, weight, bias, Epilogue.PARTIALS)
    assert choice is not None, "the last kernel of the table serves all"
    if choice.kernel.rows.above >= MANY_ROWS:
        return _multiply_many(rows, weight, bias, None)
    output = _new_output(rows, weight.num_outputs, choice.split_k)
    _run(choice, output, rows, weight, bias, overlaps=launch_dependents)
    return output if choice.split_k == 1 else output.transpose(0, 1)


def multiply_into(
    output: Tensor,
    rows: Activations,
    weight: Quantised,
    bias: Tensor | None,
    *,
    launch_dependents: bool,
) -> bool:
    """Whether a kernel made `output` [T, O], whose rows may lie apart, the product."""
    if not suits(rows, weight) or len(rows) == 0:
        return False
    choice = _choose(rows, weight, bias, Epilogue.NONE)
    assert choice is not None, "the last kernel of the table serves all"
    if len(rows) <= MANY_ROWS:
        _run(choice, output, rows, weight, bias, overlaps=launch_dependents)
        return True
    if choice.kernel.rows.above < MANY_ROWS or not isinstance(weight, Fp8) or len(rows) % LINE:
        return False
    _multiply_many(rows, weight, bias, output)
    return True


def multiply_beside(output: Tensor, rows: Activations, weight: Quantised, raw: Tensor) -> bool:
    """Whether one launch made `output` [T, O + R] what `weight` [O, I] and `raw` [R, I] make of
    `rows`."""
    if not suits(rows, weight) or not isinstance(weight, Fp8) or len(rows) == 0:
        return False
    choice = _choose(rows, weight, None, Epilogue.NONE)
    if choice is None or not choice.kernel.module.endswith("fp8_small_m"):
        return False
    from milepost.kernels.products.hopper import fp8_small_m
    from milepost.kernels.products.hopper.beside import Beside

    beside = Beside(rows=values_of(rows), weight=raw)
    if not beside.is_small:
        return False
    chip = probe(rows.device)
    values, scales = rounding.round_lines(rows, weight, chip)
    fp8_small_m.multiply(values, scales, weight, output, choice.tiles, chip, beside)
    return True


def multiply_gated(rows: Activations, weight: Quantised) -> Tensor | None:
    """SiLU(gate) * up [T, O] of `rows` [T, I] and `weight` [2 * O, I], whose first half are the
    gates, if one launch does it, else None."""
    choice = None
    if suits(rows, weight) and len(rows) > 0:
        choice = _choose(rows, weight, None, Epilogue.GATED)
    if choice is None:
        return None
    output = rows.new_empty(1, weight.num_outputs // 2)
    _run_row(choice, output, values_of(rows), weight, None, is_gated=True)
    return output


def _choose(
    rows: Activations, weight: Quantised, bias: Tensor | None, epilogue: Epilogue
) -> KernelChoice[Product] | None:
    values, alignment = rows.values, 16
    if values is not None and (values.stride(0) % 16 or values.data_ptr() % 16):
        alignment = 1
    product = Product(
        weight=Matrix.of(weight),
        num_rows=len(rows),
        epilogue=epilogue,
        has_bias=bias is not None,
        alignment=alignment,
    )
    return PRODUCTS.choose(product, probe(rows.device))


def _new_output(rows: Activations, num_outputs: int, split_k: int) -> Tensor:
    """[T, O], or partials [S, T, O]."""
    if split_k == 1:
        return rows.new_empty(len(rows), num_outputs)
    return rows.new_empty(split_k, len(rows), num_outputs, dtype=torch.float32)


def _run(
    choice: KernelChoice[Product],
    output: Tensor,
    rows: Activations,
    weight: Quantised,
    bias: Tensor | None,
    *,
    overlaps: bool,
) -> None:
    """`output` [T, O], or partials [S, T, O], by a kernel of ours."""
    chip, name = probe(rows.device), choice.kernel.module.rpartition(".")[2]
    if name == "quantised_gemv":
        quantised_gemv.multiply(values_of(rows), weight, bias, output, chip)
    elif name == "quantised_gemm":
        tiles = choice.tiles.tiles
        are_few = tiles.block_m <= FEW.block_m
        values, scales = rounding.round_rows(rows, weight, chip, are_few=are_few)
        split = {"split_k": choice.split_k, "overlaps": overlaps}
        quantised_gemm.gemm(values, scales, weight, bias, output, tiles, chip, **split)
    elif name == "fp8_small_m":
        from milepost.kernels.products.hopper import fp8_small_m

        assert isinstance(weight, Fp8), "the kernel's form"
        values, scales = rounding.round_lines(rows, weight, chip)
        fp8_small_m.multiply(values, scales, weight, output, choice.tiles, chip)
    elif name == "int4_small_m":
        from milepost.kernels.products.hopper import int4_small_m

        assert isinstance(weight, Int4), "the kernel's form"
        int4_small_m.multiply(values_of(rows), weight, output, choice.tiles)
    else:
        _run_row(choice, output, values_of(rows), weight, bias, is_gated=False)


def _run_row(
    choice: KernelChoice[Product],
    output: Tensor,
    row: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    *,
    is_gated: bool,
) -> None:
    """`output` [1, O] by Hopper's own kernels."""
    from milepost.kernels.products.hopper import (
        gemv,
        gemv_ring,
    )

    chip = probe(row.device)
    if choice.kernel.module.endswith("gemv_ring"):
        assert isinstance(weight, Fp8), "the kernel's form"
        gemv_ring.multiply(row, weight, bias, output, chip, is_gated=is_gated)
    else:
        gemv.multiply(row, weight, bias, output, chip, is_gated=is_gated)


def _multiply_many(
    rows: Activations, weight: Quantised, bias: Tensor | None, output: Tensor | None
) -> Tensor:
    """The product by torch's GEMMs, of FP8 in `output` if it is given and rows are whole lines of
    four."""
    if isinstance(weight, FourBits):
        product = F.linear(values_of(rows), unpack.unpack(weight, rows.dtype))
        return product if bias is None else product.add_(bias)
    num_tokens = len(rows)
    values, scales = rounding.round_lines(rows, weight, probe(rows.device))
    if output is None or num_tokens != len(values):
        output = rows.new_empty(len(values), weight.num_outputs)
    torch._scaled_mm(
        values,
        weight.values.t(),
        scales.t(),
        weight.scales.t(),
        out_dtype=rows.dtype,
        out=output,
    )
    product = output[:num_tokens]
    return product if bias is None else product.add_(bias)
