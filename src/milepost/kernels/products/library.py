"""torch's own GEMMs, as entries of rows in `table`, where they are as fast as ours; and 16-bit
weights made of four-bit ones, for products with enough rows to pay for it.

Legend: T tokens, H hidden size; I inputs, O outputs; N outputs, K inputs of a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.emit import LINE
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms import Epilogue, Form, Raw
from milepost.kernels.products.forms.quantised import BLOCK, FourBits, Fp8
from milepost.kernels.products.portable import four_bits, rounding
from milepost.kernels.products.portable.weights import (
    ProductShape,
    WeightTensors,
    columns,
    find_row,
    lane,
    load_scales,
)
from milepost.kernels.products.run import Multiplication, RoutedRows, run_chosen

_BLOCK_N = 64
"""Outputs of a program that unpacks."""
_REDUCTIONS = tuple(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16"))
"""torch's settings of sums that cuBLAS splits."""
_SETTINGS = Lock()
"""Held by the thread that has changed torch's settings."""


def run(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies with raw weights."""
    weight = given.weight_as(Raw)
    if given.epilogue is Epilogue.FLOAT32:
        assert given.bias is None, "float32 outputs have no bias"
        return torch.mm(given.values, weight.values.t(), out_dtype=torch.float32)
    if given.bias is not None:
        return F.linear(given.values, weight.values, given.bias)
    return _multiply(given, weight.values)


def _multiply(given: Multiplication, weight: Tensor) -> Tensor:
    """Multiplies by a weight [O, I] in 16 bits, without bias. Strided rows are written in place,
    which saves a copy, where each begins at a multiple of 16 bytes."""
    into = given.into
    if into is None or into.stride(0) % 8:
        return F.linear(given.values, weight)
    return torch.mm(given.values, weight.t(), out=into)


def run_whole(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies with raw weights, and splits no sum."""
    weight, output = given.weight_as(Raw), given.output()
    if output.data_ptr() % 16 or output.stride(0) % 8:
        # cuBLAS would take another kernel, which may add up in another order.
        output = given.new_output()
    with _whole_sums():
        return torch.mm(given.values, weight.values.t(), out=output)


@contextmanager
def _whole_sums() -> Iterator[None]:
    """Forbids cuBLAS to split sums inside. torch knows this as a setting of the process alone, so
    one thread at a time changes it for a call, and changes it back."""
    settings = torch.backends.cuda.matmul
    with _SETTINGS:
        library = torch.backends.cuda.preferred_blas_library()
        kept = {
            name: (getattr(settings, name), getattr(settings, f"{name}_split_k"))
            for name in _REDUCTIONS
        }
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
            for name in _REDUCTIONS:
                setattr(settings, name, (False, False))
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(library)
            for name, value in kept.items():
                setattr(settings, name, value)


def run_scaled(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies with FP8 weights. torch takes rows in multiples of four, so other numbers of rows
    are not written `into` a tensor directly."""
    weight, num_rows = given.weight_as(Fp8), len(given.rows)
    values, scales = rounding.round_lines(given.rows, weight, given.chip)
    output = given.output()
    if num_rows % LINE:
        output = given.rows.new_empty(len(values), weight.num_outputs)
    torch._scaled_mm(
        values,
        weight.values.t(),
        scales.t(),
        weight.scales.t(),
        out_dtype=given.rows.dtype,
        out=output,
    )
    output = output[:num_rows] if num_rows % LINE else output
    return output if given.bias is None else output.add_(given.bias)


def run_unpacked(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Unpacks four-bit weights to 16 bits, then multiplies with those."""
    assert isinstance(given.weight, FourBits), "the kernel's forms"
    product = _multiply(given, unpack(given.weight, given.rows.dtype))
    return product if given.bias is None else product.add_(given.bias)


def unpack(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """Returns the weights [..., O, I] of one matrix or a stack, rounded to a 16-bit type."""
    device, num_inputs = weight.packed.device, weight.num_inputs
    output = torch.empty(*weight.packed.shape[:-1], num_inputs, dtype=dtype, device=device)
    num_rows, chip = output.numel() // num_inputs, probe(device)
    shape = ProductShape.of(weight, chip, block_n=_BLOCK_N, block_k=BLOCK)
    _unpack_kernel[(cdiv(num_rows, _BLOCK_N) * (num_inputs // shape.block_k),)](
        WeightTensors.of(weight, chip),
        output,
        SHAPE=shape._replace(outputs=num_rows),
        num_warps=4,
        **OVERLAPPED,
    )
    return output


def run_experts(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H] of experts, with the kernel for raw weights."""

    def widen(weight: Form) -> Raw:
        assert isinstance(weight, FourBits), "the kernel's forms"
        return Raw(values=unpack(weight, routed.rows.dtype))

    return run_chosen(routed._replace(up=widen(routed.up), down=widen(routed.down)))


@quick
@triton.jit
def _unpack_kernel(weight, output, SHAPE: tl.constexpr):
    launch_dependents()
    wait_for_inputs()
    TYPE: tl.constexpr = output.dtype.element_ty
    # Neighbours follow each other along the inputs, so memory is written a row at a time.
    STEPS: tl.constexpr = SHAPE.inputs // SHAPE.block_k
    o_n = tl.program_id(0) // STEPS * SHAPE.block_n + tl.arange(0, SHAPE.block_n)
    row = (o_n % SHAPE.outputs).to(tl.int64)
    i_k = tl.program_id(0) % STEPS * SHAPE.block_k
    o_x, o_w = columns(SHAPE)
    p_row = find_row(weight, 0, row, SHAPE)
    b_w = tl.load(p_row[0][:, None] + i_k // 2 + o_w[None, :])
    target = output + row[:, None] * SHAPE.inputs + i_k + o_x[None, :]
    mask = (o_n < SHAPE.outputs)[:, None]
    scales = load_scales(p_row, i_k, SHAPE)
    low, high = four_bits.weights(b_w, scales, TYPE, SHAPE)
    if SHAPE.group < 0:
        factor = four_bits.factors(p_row[2])[:, None]
        low, high = (low * factor).to(TYPE), (high * factor).to(TYPE)
    tl.store(target, low, mask=mask)
    tl.store(target + lane(SHAPE.group), high, mask=mask)
