"""Hopper's kernels of four-bit experts with many rows, against their definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.products import expert_table, mix
from milepost.kernels.products.forms.quantised import Int4
from tests.kernels.quantised_cases import make_int4, to
from tests.kernels.routed import as_routed, poisoned_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="kernels for Hopper",
    ),
]

HIDDEN, EXPERTS, CHOSEN = 1024, 48, 5
FORMS = {
    "gates": lambda: (
        make_int4(EXPERTS, 1024, HIDDEN, group=128),
        make_int4(EXPERTS, HIDDEN, 512, group=128),
    ),
    "channels, no gates": lambda: (
        make_int4(EXPERTS, 256, HIDDEN, group=HIDDEN),
        make_int4(EXPERTS, HIDDEN, 256, group=256),
    ),
    "32": lambda: (
        make_int4(EXPERTS, 1280, HIDDEN, group=32),
        make_int4(EXPERTS, HIDDEN, 640, group=32),
    ),
    "64 and 32, no gates": lambda: (
        make_int4(EXPERTS, 256, HIDDEN, group=64),
        make_int4(EXPERTS, HIDDEN, 256, group=32),
    ),
}


def make(name: str, dtype: torch.dtype) -> tuple[Int4, Int4]:
    """Weights with scales in the rows' type, as a model has them."""
    up, down = (replace(each, scales=each.scales.to(dtype)) for each in FORMS[name]())
    return to("cuda", up), to("cuda", down)


def draw(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, and experts of which every one has another number of them: none, or some blocks and a
    bit."""
    random = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=random) / 256
    shares = torch.rand(num_tokens, CHOSEN, generator=random)
    most = torch.randint(1, EXPERTS - 1, (num_tokens, 1), generator=random)
    chosen = torch.randint(0, EXPERTS, (num_tokens, CHOSEN), generator=random) % most
    return hidden.to("cuda", dtype), shares.to("cuda", dtype), chosen.int().cuda()


def expect(hidden: Tensor, shares: Tensor, experts: Tensor, up: Int4, down: Int4) -> Tensor:
    """[P, H], of weights that are rounded to the rows' type, as where they are made it first."""
    wide = [each.dequantise(hidden.dtype).double() for each in (up, down)]
    rows, flat = hidden.repeat_interleave(CHOSEN, 0).double(), experts.flatten()
    partials = torch.zeros_like(rows)
    for expert in flat.unique().tolist():
        own = flat == expert
        inner = rows[own] @ wide[0][expert].T
        if inner.shape[1] == 2 * down.num_inputs:
            gate, value = inner.chunk(2, 1)
            active = F.silu(gate) * value
        else:
            active = F.relu(inner) ** 2
        partials[own] = active @ wide[1][expert].T * shares.flatten()[own, None]
    return partials


@pytest.mark.parametrize("num_tokens", [29, 150, 1500])
@pytest.mark.parametrize("name", FORMS)
def test_partials(name: str, num_tokens: int) -> None:
    """A token's bits depend neither on the blocks' height nor on its neighbours."""
    from milepost.kernels.products.hopper import int4_grouped

    dtype = torch.bfloat16 if name in ("gates", "32") else torch.float16
    up, down = make(name, dtype)
    given = draw(num_tokens, dtype)
    expected = expect(*given, up, down)

    def mix_all(given: tuple[Tensor, ...], block_m: int) -> Tensor:
        with poisoned_outputs():
            return int4_grouped.run_blocks(as_routed(*given, up, down), block_m)

    made = mix_all(given, 128)
    error = (made.view(-1, HIDDEN) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-2 if dtype == torch.bfloat16 else 2e-3)
    assert torch.equal(mix_all(given, 64), made)
    last = tuple(each[-9:].contiguous() for each in given)
    assert torch.equal(mix_all(last, 64), made[-9:])


def test_mix_takes_them() -> None:
    """From so many rows an expert on, in place of kernels for any chip."""
    from milepost.kernels.products.hopper import int4_grouped

    up, down = make("gates", torch.bfloat16)
    hidden, shares, _ = draw(EXPERTS * (expert_table._FEW_INT4 + 1) // CHOSEN + 1, torch.bfloat16)
    # The kernel of fewer rows takes no token that has an expert twice.
    chosen = torch.rand(len(hidden), EXPERTS, device="cuda").argsort(1)[:, :CHOSEN]
    given = hidden, shares, chosen.int()
    output = int4_grouped.run_blocks(as_routed(*given, up, down), 64)
    assert torch.equal(mix(*given, up, down), output)
    few = tuple(each[: EXPERTS * expert_table._FEW_INT4 // CHOSEN] for each in given)
    assert not torch.equal(mix(*few, up, down), output[: len(few[0])])
