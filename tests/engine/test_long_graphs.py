"""Which engines may have graphs of long steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.engine.assembly.fitting import copies_pages
from milepost.kernels.platform.device import CHIPS, hopper_kernels
from milepost.kernels.platform.tensors import FP8
from milepost.layers.context import AttentionSpec
from milepost.runner.pool_shape import PoolShape

HEADS = AttentionSpec(num_kv_heads=4, head_dim=256)
LATENTS = AttentionSpec(num_kv_heads=1, head_dim=576, rows_each=1)


@pytest.mark.parametrize(
    ("arch", "has_hopper", "spec", "copies"),
    [
        ("sm_90", True, HEADS, True),
        ("sm_90", False, HEADS, False),
        ("sm_89", True, HEADS, False),
        ("sm_89", True, LATENTS, True),
        ("sm_89", True, replace(LATENTS, window=512), False),
    ],
)
def test_fp8_pages_are_copied_for_hoppers_attention_and_latents(
    arch: str, has_hopper: bool, spec: AttentionSpec, copies: bool
) -> None:
    """Of other pages a graph may hold steps of up to 3,072 tokens; so it may of 16 bits."""
    shape = PoolShape(
        specs=(spec,),
        page_size=64,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        kv_dtype=FP8,
    )
    with hopper_kernels(has_hopper):
        assert copies_pages(shape, CHIPS[arch][1]) == copies
        assert not copies_pages(replace(shape, kv_dtype=None), CHIPS[arch][1])
