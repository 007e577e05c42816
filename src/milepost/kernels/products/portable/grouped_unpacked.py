"""Experts of four-bit weights and many rows: 16-bit weights are made first, then multiplied."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from milepost.kernels.products.forms.matrix import Form, Raw
from milepost.kernels.products.forms.quantised import Fp4, Int4
from milepost.kernels.products.portable.quantised_gemm import unpack
from milepost.kernels.products.run_experts import RoutedRows, run_chosen


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""

    def widen(weight: Form) -> Raw:
        assert isinstance(weight, Int4 | Fp4), "the kernel's forms"
        return Raw(values=unpack(weight, routed.rows.dtype))

    return run_chosen(replace(routed, up=widen(routed.up), down=widen(routed.down)))
