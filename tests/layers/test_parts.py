"""What a block asks of the norm ahead of its parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import ResidualBlock
from milepost.models.quantization import read_quantization
from milepost.models.registry import find_architecture, load_config

MODELS = Path(__file__).parents[2] / "bench" / "models"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GATES = [*(f"linear_attn.in_proj_{each}" for each in ("a", "b", "ba"))]
GATES += ["mlp.gate", "shared_expert_gate"]


class Norm(nn.Module):
    """Notes what is asked of it."""

    ranks = ModuleScope(dtype=torch.float32, device=torch.device("cpu")).ranks

    def add(
        self, hidden: Tensor, delta: Tensor | None, *, emit: Emit, begun: Any, order: SumOrder
    ) -> tuple[Tensor, Tensor]:
        assert delta is None
        assert begun is None
        self.emit, self.order = emit, order
        return hidden, hidden


class Part(nn.Module):
    """Reads its rows so."""

    def __init__(self, reads: Emit) -> None:
        super().__init__()
        self.reads = reads

    def run(self, hidden: Tensor, ctx: object, number: int) -> Tensor:  # noqa: ARG002
        return hidden


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((Emit.FP8, Emit.FP8), Emit.FP8),
        ((Emit.FP8, Emit.BOTH), Emit.BOTH),
        ((Emit.FP8, Emit.VALUES), Emit.BOTH),
        ((Emit.VALUES,), Emit.VALUES),
    ],
)
def test_rows_are_left_out_where_all_parts_read_their_rounding(
    parts: tuple[Emit, ...], expected: Emit
) -> None:
    norm = Norm()
    for order in SumOrder:
        ctx = SimpleNamespace(order=order)
        ResidualBlock(*map(Part, parts), pre=norm).run(
            torch.ones(3, 2), None, ctx, (0,) * len(parts), ends=False
        )
        assert norm.emit is expected
        assert norm.order is order


@pytest.mark.parametrize(
    ("name", "left", "expected"),
    [
        ("hybrid-35b-a3b", GATES, {"GatedDelta": True, "Attention": False, "MoE": True}),
        ("hybrid-9b", GATES, {"GatedDelta": True, "Attention": False, "MLP": False}),
        ("hybrid-9b", [], {"GatedDelta": False, "Attention": False, "MLP": False}),
        ("hybrid-9b", [*GATES, "self_attn.k_proj"], {"Attention": True, "MLP": False}),
        ("hybrid-9b", [*GATES, "mlp.up_proj"], {"Attention": False, "MLP": True}),
    ],
)
def test_who_needs_a_norms_rows(name: str, left: list[str], expected: dict[str, bool]) -> None:
    """Routers and gates, which are raw; projections that a checkpoint left so."""
    config = load_config(MODELS / name)
    text = config.get_text_config()
    text.layer_types, text.num_hidden_layers = text.layer_types[:4], 4
    modules = [f"model.layers.{i}.{each}" for i in range(4) for each in left]
    settings = FP8 | {"modules_to_not_convert": modules}
    forms = read_quantization(settings, (), has_files=False)
    kind = ModuleScope(
        dtype=torch.bfloat16, device=torch.device("meta"), precision_of=forms.precision_of
    )
    decoder = find_architecture(config.model_type).decoder(text, kind, is_tied=False)
    blocks = [block for layer in decoder.layers for block in layer.blocks]
    found = {type(block.parts[0]).__name__: block._emit is not Emit.FP8 for block in blocks}
    assert {part: found[part] for part in expected} == expected
