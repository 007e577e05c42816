"""torch's own GEMMs, as entries of rows in `table`, where they are as fast as ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.emit import LINE
from milepost.kernels.products.forms.matrix import Epilogue, Raw
from milepost.kernels.products.forms.quantised import FourBits, Fp8
from milepost.kernels.products.hopper.tiles import LibraryTiles
from milepost.kernels.products.run import Multiplication


def run(given: Multiplication, tiles: LibraryTiles) -> Tensor:  # noqa: ARG001
    """Multiplies with raw weights."""
    weight = given.weight
    assert isinstance(weight, Raw), "the kernel's form"
    if given.epilogue is Epilogue.FLOAT32:
        assert given.bias is None, "float32 outputs have no bias"
        return torch.mm(given.values, weight.values.t(), out_dtype=torch.float32)
    return F.linear(given.values, weight.values, given.bias)


def run_scaled(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies with FP8 weights. torch takes rows in multiples of four, so other numbers of rows
    are not written `into` a tensor directly."""
    from milepost.kernels.products.portable import rounding

    weight, num_rows = given.weight, len(given.rows)
    assert isinstance(weight, Fp8), "the kernel's form"
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
    from milepost.kernels.products.portable.unpack import unpack

    assert isinstance(given.weight, FourBits), "the kernel's forms"
    product = F.linear(given.values, unpack(given.weight, given.rows.dtype))
    return product if given.bias is None else product.add_(given.bias)
