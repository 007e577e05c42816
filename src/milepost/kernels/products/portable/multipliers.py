"""The functions of the device that multiply by a weight of some form, as kernels take them."""

from __future__ import annotations

from typing import Any

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.forms.quantised import Fp8, Int8, Quantised
from milepost.kernels.products.portable import fp8_weights, gemm_step, gemv_step, int8_step


def for_tiles(weight: Raw | Quantised, chip: Chip) -> Any:
    """Returns the loop of a GEMM."""
    if isinstance(weight, Fp8) and not chip.rounds_to_fp8:
        return fp8_weights.multiply
    return gemm_step.multiply_raw if isinstance(weight, Raw) else gemm_step.multiply_quantised


def for_row(weight: Raw | Quantised, chip: Chip) -> Any:
    """Returns the sums of a matrix-vector product."""
    if isinstance(weight, Int8):
        return int8_step.multiply_row
    if isinstance(weight, Fp8) and not chip.rounds_to_fp8:
        return fp8_weights.multiply_row
    return gemv_step.multiply_raw if isinstance(weight, Raw) else gemv_step.multiply_quantised
