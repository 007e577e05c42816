"""Tensors that a fused kernel would read wrongly are refused before it is launched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from milepost.kernels.attention import PagedKV
from milepost.kernels.attention import run as attention
from milepost.kernels.attention.portable import prepare
from milepost.kernels.norm import triton as norm
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.portable import gemm
from milepost.kernels.products.portable.tiles import SplitTiles
from milepost.kernels.products.run import run_mixture
from milepost.kernels.recurrent import (
    KDAProjected,
    LayerStates,
    MixerSizes,
    RecurrentOperation,
    RecurrentRule,
)
from tests.kernels.choices import multiplication

ROWS, SLOTS = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
STATES, CONV = torch.zeros(3, 2, 4, 4), torch.zeros(3, 8, 3)
MIXER = RecurrentOperation(
    sizes=MixerSizes(rule=RecurrentRule.GATED_DELTA, units=1, group=2, shared=4, own=4, taps=4)
)
CHOSEN = torch.zeros(2, 2, dtype=torch.int32)
UP, DOWN = Raw(values=STATES[0]), Raw(values=STATES[0].mT)
KV = PagedKV(STATES[None], SLOTS)


def apart(tensor: Tensor) -> Tensor:
    """The same, with something between any two neighbours."""
    return torch.stack((tensor, tensor), -1)[..., 0]


CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "attention": ("gate", lambda: attention.attend(STATES[0], apart(ROWS), KV, None, 1)),
    "prepare": (
        "projected",
        lambda: prepare.prepare(apart(ROWS), None, 0, None, KV, SLOTS, num_heads=1),
    ),
    "mla": (
        "shared_query",
        lambda: attention.attend(STATES[0], None, KV, None, 1, shared_query=apart(STATES[0])),
    ),
    "gated_delta": (
        "projected",
        lambda: MIXER.mix(apart(ROWS), None, LayerStates(CONV, STATES, SLOTS, SLOTS), 0),
    ),
    "gated_delta's states": (
        "recurrent_pool",
        lambda: MIXER.mix(ROWS, None, LayerStates(CONV, STATES.mT, SLOTS, SLOTS), 0),
    ),
    "kda": (
        "gate",
        lambda: MIXER.mix(
            KDAProjected(ROWS, ROWS, apart(ROWS)),
            None,
            LayerStates(CONV, STATES, SLOTS, SLOTS),
            0,
        ),
    ),
    "mamba2": (
        "conv_pool",
        lambda: MIXER.mix(ROWS, None, LayerStates(CONV.mT, STATES, SLOTS, SLOTS), None),
    ),
    "norm": ("delta", lambda: norm.add_norm(ROWS, apart(ROWS), ROWS[0], 1e-6)),
    "linear": (
        "weight",
        lambda: gemm.run(
            multiplication(ROWS, Raw(values=ROWS.T)), SplitTiles(tiles=None, split_k=1)
        ),
    ),
    "moe": ("down", lambda: run_mixture(ROWS, CHOSEN, CHOSEN, UP, DOWN)),
}


@pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=CALLS)
def test_a_tensor_that_lies_otherwise_is_refused_by_name(
    name: str, call: Callable[[], object]
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()
