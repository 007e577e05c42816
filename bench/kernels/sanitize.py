"""The newer kernels at the smallest shapes that take each of their ways, for compute-sanitizer.

    export PYTHONPATH=src:. PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 9 python bench/kernels/sanitize.py experts
    compute-sanitizer --tool racecheck --error-exitcode 9 python bench/kernels/sanitize.py decode

Inputs are made on the CPU and results compared there, so that nearly all that runs on the GPU is
what is to be checked. Without PyTorch's cache of memory each tensor is an allocation of its own,
and memcheck sees what leaves it. `planted` stores a row past a tensor's end: memcheck must object.

racecheck sees shared memory alone, and tools run kernels one by one: what overlaps is checked by
`tests/gpu/test_overlap.py`. Version 2025.3.1 reports races between the words by which Triton tells
divided warps what to do and the warps that read them, in attention's wide tiles. A barrier of all
warps lies between, but the tool loses it behind a barrier of some of them: it reports the same of
`divided`, which touches no shared memory itself, and nothing once `gl.thread_barrier` is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.attention_cases import Case, Step, build_projection
from tests.kernels.draws import defined, drawn, make_logits, make_rows, sampler_for
from tests.kernels.mixers import (
    Batch,
    Shapes,
    expected_decode,
    fused_decode,
    make_pools,
    make_projected,
    make_weights,
)
from tests.kernels.routed import apply, as_routed
from tests.kernels.verifying import Kind, Mixer
from tests.numbers import relative_error

from milepost.kernels import attention, products
from milepost.kernels.attention.pages import PagedKV
from milepost.kernels.attention.portable import prepare as preparation
from milepost.kernels.platform.device import probe
from milepost.kernels.products import Raw, experts_reference, multiply
from milepost.kernels.products.portable import gemv
from milepost.kernels.products.portable.row_tiles import GemvTiles

DTYPE, BOUND = torch.bfloat16, 1e-2
HIDDEN, SIZE, EXPERTS, CHOSEN = 256, 128, 8, 4
MIXER = Shapes(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
CASE = Case(
    starts=(130, 10, 0), lengths=(1, 70, 1), head_dim=128, dtype=DTYPE, num_heads=8, num_programs=4
)
CASES = {
    "two kinds of tiles": CASE,
    "wide heads": replace(CASE, head_dim=256),
    "narrow heads": replace(CASE, head_dim=64),
    "few rows": replace(CASE, wide_rows=64),
    "shared pages": replace(CASE, starts=(200, 150, 160), lengths=(1,) * 3, num_sharing=128),
    "small pages": replace(CASE, page_size=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=OPS, nargs="+")
    for op in parser.parse_args().op:
        OPS[op]()
        torch.cuda.synchronize()
        print(f"{op}: done")


def check_experts() -> None:
    """Alone, grouped (a part of a tile and a whole one), tall."""
    for num_tokens in (1, 9, 16, 33, 100):
        hidden, weights, experts, gate_up, down = make_experts(num_tokens)
        output = apply(*(each.cuda() for each in (hidden, weights, experts, gate_up, down)))
        wide = hidden.float(), weights.float(), experts.long(), gate_up.float(), down.float()
        compare(f"experts of {num_tokens}", output, experts_reference.apply(*wide))


def make_experts(num_tokens: int) -> tuple[Tensor, ...]:
    """Tokens, their choices by the kernel that routes, and weights, the shared expert last."""
    random = torch.Generator().manual_seed(num_tokens)

    def fill(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).mul_(shape[-1] ** -0.5).to(DTYPE)

    logits = fill(num_tokens, EXPERTS + 1).cuda()
    weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
    gate_up, down = fill(EXPERTS + 1, 2 * SIZE, HIDDEN), fill(EXPERTS + 1, HIDDEN, SIZE)
    return fill(num_tokens, HIDDEN), weights.cpu(), experts.cpu(), gate_up, down


def check_gemms() -> None:
    """Tiles of each regime and kind, the last one in part beyond the outputs."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(DTYPE)

    for num_tokens in (3, 16, 32, 50):
        for num_inputs, num_outputs in ((256, 8200), (8192, 2048), (4096, 4096), (4096, 2048)):
            hidden, weight = draw(num_tokens, num_inputs), draw(num_outputs, num_inputs)
            output = multiply(hidden.cuda(), Raw(values=weight.cuda()))
            assert isinstance(output, Tensor)
            expected = F.linear(hidden.float(), weight.float())
            compare(f"{num_tokens} by {num_inputs} by {num_outputs}", output, expected)


def check_decode() -> None:
    """Of Gated DeltaNet: fewer units than SMs, and more, each with padding."""
    for num_sequences in (2, 150):
        slots = range(3, 3 + num_sequences)
        batch = Batch(starts=[], lengths=[], slot_in=[1] * num_sequences, slot_out=slots)
        projected = make_projected(MIXER, num_sequences + 1, DTYPE)
        weights, pools = make_weights(MIXER, DTYPE), make_pools(MIXER, slots.stop, DTYPE)
        ours = make_pools(MIXER, slots.stop, DTYPE, "cuda")
        padded = replace(batch, slot_in=[*batch.slot_in, 1], slot_out=[*slots, -1])
        moved = make_projected(MIXER, num_sequences + 1, DTYPE, "cuda")
        output = fused_decode(MIXER, moved, make_weights(MIXER, DTYPE, "cuda"), ours, padded)
        expected = expected_decode(MIXER, projected[:-1], weights, pools, batch)
        assert isinstance(output, torch.Tensor)
        compare(f"decode of {num_sequences}", output[:-1], expected)
        compare(f"states of {num_sequences}", ours.recurrent[3:], pools.recurrent[3:])


def check_verify() -> None:
    """Of Gated DeltaNet: drafts, beside them what is folded, and steps that only fold, behind whose
    tokens there is nobody's memory."""
    chip = probe(torch.device("cuda"))
    ours = Mixer(Kind(shapes=MIXER, dtype=DTYPE, device="cuda", chip=chip))
    theirs = Mixer(Kind(shapes=MIXER, dtype=DTYPE))
    tokens = make_projected(MIXER, 9, DTYPE)
    steps = [
        {0: (0, tokens[:3]), 1: (0, tokens[3:4])},
        {0: (2, tokens[4:9]), 1: (0, tokens[:2]), 2: (0, tokens[:1])},
        {1: (1, tokens[:2]), 0: (4, tokens[:0])},
        {1: (1, tokens[:0])},
    ]
    for number, parts in enumerate(steps):
        moved = {sequence: (fold, rows.cuda()) for sequence, (fold, rows) in parts.items()}
        output, expected = ours.step(moved), theirs.step(parts)
        if len(expected):
            compare(f"step {number}", output, expected)
    for sequence in range(3):
        states = zip(ours.state(sequence), theirs.state(sequence), strict=True)
        for name, pair in zip(("conv", "state"), states, strict=True):
            compare(f"{name} of {sequence}", *pair)


def check_attention() -> None:
    """Each kernel of it: wide tiles of both kinds, narrow ones, sums of parts, `prepare`."""
    for name, case in CASES.items():
        step = Step(case)
        expected = step.expected()
        step.device = "cuda"
        step.pool = step.pool.cuda()
        gate = None if step.gate is None else step.gate.cuda()
        items = step.on_device(step.items())
        output = attention.attend(step.query.cuda(), gate, step.kv(), items, case.head_dim**-0.5)
        compare(name, output, expected)
    cpu = build_projection(70, head_dim=128, half=16, dtype=DTYPE)
    query, pool = cpu.expected()
    kept = cpu.pool.cuda()
    assert cpu.norm_scale is not None
    assert cpu.angles is not None
    cosines, sines = cpu.angles
    prepared = preparation.prepare(
        cpu.projected.cuda(),
        cpu.norm_scale.cuda(),
        cpu.eps,
        (cosines.cuda(), sines.cuda()),
        PagedKV(kept),
        cpu.kv_rows.cuda(),
        num_heads=cpu.num_heads,
    )
    compare("queries", prepared, query)
    compare("pool", kept.nan_to_num(), pool.nan_to_num())


def check_sampling() -> None:
    """Rows of every kind over two blocks of logits."""
    rows = make_rows(9000, 3)
    logits = make_logits(len(rows), 9000, 3, DTYPE)
    found = drawn(sampler_for(logits.cuda()), logits.cuda(), rows)
    assert found == defined(logits, rows)


def check_divided() -> None:
    output = torch.zeros(384, dtype=torch.int32).cuda()
    _divided_kernel[(4,)](output, num_warps=4)
    assert torch.equal(output.cpu(), torch.arange(128).repeat(3).int())


@gluon.jit
def _divided_kernel(output):
    gl.thread_barrier()
    gl.warp_specialize(
        [(_count, (output, 0, 4)), (_count, (output, 128, 4)), (_count, (output, 256, 1))],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _count(output, first: gl.constexpr, num_warps: gl.constexpr):
    number = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    gl.store(output + first + number, number)


def check_planted() -> None:
    routed = as_routed(*(each.cuda() for each in make_experts(16)))
    active = routed.values.new_zeros(routed.num_routed, SIZE)
    output = routed.values.new_empty(15, CHOSEN + 1, HIDDEN)
    cut = GemvTiles(block_n=8, block_k=512, num_warps=4)
    gemv.project(active, routed, output, cut, is_up=False)


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    error = relative_error(actual.cpu(), expected)
    print(f"{name}: {error:.1e}", flush=True)
    assert error < BOUND, name


OPS: dict[str, Callable[[], None]] = {
    "experts": check_experts,
    "decode": check_decode,
    "verify": check_verify,
    "gemms": check_gemms,
    "attention": check_attention,
    "sampling": check_sampling,
    "divided": check_divided,
    "planted": check_planted,
}


if __name__ == "__main__":
    main()
