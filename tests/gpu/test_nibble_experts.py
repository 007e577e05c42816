"""Hopper's kernel of four-bit experts with few tokens, against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from milepost.kernels.products import mix
from milepost.kernels.products.forms.quantised import Int4
from tests.kernels.quantised_cases import make_int4, to
from tests.kernels.routed import as_routed, poisoned_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="a kernel for Hopper",
    ),
]

EXPERTS = 48
FORMS = {
    "gates": lambda: (
        make_int4(EXPERTS, 1024, 1024, group=128),
        make_int4(EXPERTS, 1024, 512, group=128),
    ),
    "channels, no gates": lambda: (
        make_int4(EXPERTS, 256, 768, group=768),
        make_int4(EXPERTS, 768, 256, group=256),
    ),
    "more inside": lambda: (
        make_int4(EXPERTS, 1536, 256, group=128),
        make_int4(EXPERTS, 256, 768, group=384),
    ),
    "half a step more": lambda: (
        make_int4(EXPERTS, 1280, 384, group=128),
        make_int4(EXPERTS, 384, 640, group=128),
    ),
    "64": lambda: (
        make_int4(EXPERTS, 1024, 1024, group=64),
        make_int4(EXPERTS, 1024, 512, group=64),
    ),
    "64, half a step more, no gates": lambda: (
        make_int4(EXPERTS, 384, 640, group=64),
        make_int4(EXPERTS, 640, 384, group=64),
    ),
    "32": lambda: (
        make_int4(EXPERTS, 1536, 1024, group=32),
        make_int4(EXPERTS, 1024, 768, group=32),
    ),
    "32 and 64, half a step more": lambda: (
        make_int4(EXPERTS, 1280, 384, group=32),
        make_int4(EXPERTS, 384, 640, group=64),
    ),
    "64 and 32, no gates": lambda: (
        make_int4(EXPERTS, 384, 640, group=64),
        make_int4(EXPERTS, 640, 384, group=32),
    ),
}
DTYPES = {
    "gates": torch.bfloat16,
    "channels, no gates": torch.float16,
    "64, half a step more, no gates": torch.float16,
    "64 and 32, no gates": torch.float16,
}
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(name: str) -> tuple[Int4, Int4]:
    """Weights with scales in the rows' type, as a model has them."""
    dtype = DTYPES.get(name, torch.bfloat16)
    up, down = (replace(each, scales=each.scales.to(dtype)) for each in FORMS[name]())
    return to("cuda", up), to("cuda", down)


def draw(
    num_tokens: int, num_chosen: int, num_among: int, up: Int4
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, and experts of which every token chooses the last one and others among so many."""
    random = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, up.num_inputs, generator=random) / 256
    shares = torch.rand(num_tokens, num_chosen, generator=random)
    others = [torch.randperm(num_among, generator=random) for _ in range(num_tokens)]
    chosen = torch.stack([each[:num_chosen] for each in others]).int()
    chosen[:, -1] = EXPERTS - 1
    dtype = up.scales.dtype
    return hidden.to("cuda", dtype), shares.to("cuda", dtype), chosen.cuda()


def expect(hidden: Tensor, shares: Tensor, experts: Tensor, up: Int4, down: Int4) -> Tensor:
    """[T, N, H]"""
    wide = [each.dequantise(torch.float32).double() for each in (up, down)]
    partials = hidden.new_empty(*experts.shape, down.num_outputs, dtype=torch.float64)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        inner = hidden[token].double() @ wide[0][expert].T
        if inner.shape[1] == 2 * down.num_inputs:
            gate, value = inner.chunk(2, 1)
            active = F.silu(gate) * value
        else:
            active = F.relu(inner) ** 2
        partials[token, place] = active @ wide[1][expert].T * shares[token, place, None].double()
    return partials


def error_of(mixed: Tensor, expected: Tensor) -> float:
    return float(((mixed - expected).norm(dim=2) / expected.norm(dim=2)).max())


@pytest.mark.parametrize("num_among", [11, EXPERTS - 1])
@pytest.mark.parametrize("num_tokens", [5, 16, 33, 64, 150])
@pytest.mark.parametrize("name", FORMS)
def test_partials(name: str, num_tokens: int, num_among: int) -> None:
    """A token's bits do not depend on its neighbours. With few experts to choose among they have
    several blocks of rows."""
    from milepost.kernels.products.hopper import int4_experts

    up, down = make(name)
    given = draw(num_tokens, 11, num_among, up)

    def mix_all(given: tuple[Tensor, ...]) -> Tensor:
        with poisoned_outputs():
            return int4_experts.run(as_routed(*given, up, down))

    mixed = mix_all(given)
    assert error_of(mixed, expect(*given, up, down)) < BOUNDS[mixed.dtype]
    for _ in range(8):
        assert torch.equal(mix_all(given), mixed), "a run with other bits"
    assert torch.equal(mix_all(tuple(each[-5:].contiguous() for each in given)), mixed[-5:])


@pytest.mark.parametrize("num_tokens", [5, 48])
def test_a_graph_holds_it(num_tokens: int) -> None:
    """Launches that overlap return the bits of one alone; `mix` launches it of so few rows."""
    from milepost.kernels.products.hopper import int4_experts

    up, down = make("gates")
    given = draw(num_tokens, 9, EXPERTS - 1, up)
    alone = int4_experts.run(as_routed(*given, up, down))
    assert torch.equal(mix(*given, up, down), alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [mix(*given, up, down) for _ in range(8)]
    for _ in range(10):
        for each in again:
            each.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(each, alone) for each in again)


def test_all_programs_are_resident(monkeypatch) -> None:
    """Or those that wait for others would do so for ever."""
    from milepost.kernels.products.hopper import experts, int4_experts

    class Watched:
        """Launches the kernel and keeps what it was compiled to."""

        def __getitem__(self, grid: tuple[int]):
            def launch(*args: object, **options: object) -> None:
                found.append(JITFunction.run(kernel, *args, grid=grid, warmup=False, **options))

            return launch

    found, kernel = [], experts.mix_kernel
    monkeypatch.setattr(experts, "mix_kernel", Watched())
    up, down = make("gates")
    given = draw(8, 9, EXPERTS - 1, up)
    int4_experts.run(as_routed(*given, up, down))
    (compiled,) = found
    chip = torch.cuda.get_device_properties()
    threads = 32 * compiled.metadata.num_warps
    registers = int4_experts.FORM.programs * threads * compiled.n_regs
    assert registers <= chip.regs_per_multiprocessor
    # A program has 1 KiB of the driver's.
    shared = int4_experts.FORM.programs * (compiled.metadata.shared + 1024)
    assert shared <= chip.shared_memory_per_multiprocessor
