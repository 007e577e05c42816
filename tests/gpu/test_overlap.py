"""Kernels that overlap with the one before them read what it wrote, also in a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from milepost.kernels import attention, norm, products, recurrent
from milepost.kernels.attention import items as work
from milepost.kernels.attention.tiles import ItemShapes
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.layout.chunks import lay_out
from milepost.kernels.platform.tensors import FP8
from milepost.kernels.products import Epilogue, Raw
from milepost.runner import staging
from tests.kernels.mixers import (
    REAL,
    Batch,
    lay_out_decode,
    make_pools,
    make_weights,
    send_layout,
)
from tests.kernels.routed import partials

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, SIZE, EXPERTS, LAYERS, REPLAYS = 2048, 512, 33, 6, 20


def fill(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 64, 256, 1024])
def test_a_chain_of_layers(num_tokens: int) -> None:
    """A graph of layers, each kernel short, gives the bits of kernels that run one by one."""
    weights = [(fill(8192, HIDDEN), fill(HIDDEN, 4096), fill(40, HIDDEN)) for _ in range(LAYERS)]
    gate_up, down = fill(EXPERTS, 2 * SIZE, HIDDEN), fill(EXPERTS, HIDDEN, SIZE)
    dense = [(fill(2 * 8192, HIDDEN), fill(HIDDEN, 8192)) for _ in range(LAYERS)]
    scale = torch.ones(HIDDEN, device="cuda")
    first = fill(num_tokens, HIDDEN)

    def run(pause: Callable[[], object]) -> list[Tensor]:
        hidden, delta, outputs = first, None, []
        for (enter, leave, router), (widen, narrow) in zip(weights, dense, strict=True):
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6)
            pause()
            wide = products.multiply(normed, Raw(values=enter))
            pause()
            active = norm.silu_mul(wide)
            pause()
            mixed = products.multiply(active, Raw(values=leave), epilogue=Epilogue.PARTIALS)
            pause()
            if products.norms_too(hidden, Raw(values=router)):
                logits = torch.empty_like(hidden[:, : len(router)])
                how = scale, 1e-6, 1.0, router, logits
                hidden, normed = norm.add_norm_and_multiply(hidden, mixed, *how)
            else:
                hidden, normed = norm.add_norm(hidden, mixed, scale, 1e-6)
                pause()
                logits = products.multiply(normed, Raw(values=router), epilogue=Epilogue.PARTIALS)
            logits = logits[..., :EXPERTS]
            pause()
            how = {"normalise": True, "num_shared": 1, "dtype": normed.dtype}
            shares, experts = products.route(logits, 8, **how)
            pause()
            delta = partials(normed, shares, experts, gate_up, down)
            pause()
            outputs += [hidden, wide, active, mixed, normed, shares, experts, delta]
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6)
            pause()
            active = products.multiply_gated(normed, Raw(values=widen))
            pause()
            delta = products.multiply(active, Raw(values=narrow), epilogue=Epilogue.PARTIALS)
            pause()
            outputs += [hidden, normed, active, delta]
        return outputs

    compare(run, lambda: first.copy_(fill(num_tokens, HIDDEN)))


def compare(
    run: Callable[[Callable[[], object]], list[Tensor]], change_input: Callable[[], object]
) -> None:
    """What `run` gives in a graph, and where it pauses after every kernel."""
    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(lambda: None)
    for _ in range(REPLAYS):
        change_input()
        for output in outputs:
            output.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for output, expected in zip(outputs, run(torch.cuda.synchronize), strict=True):
            assert torch.equal(output, expected)


HEADS, KV_HEADS, HEAD_DIM, KV_LENGTH = 16, 2, 256, 200


@pytest.mark.parametrize(
    ("length", "kv_dtype"),
    [(1, torch.bfloat16), (1, FP8), (40, torch.bfloat16)],
    ids=["decode", "decode-float8", "prefill"],
)
@pytest.mark.parametrize("num_sequences", [1, 8, 64])
def test_a_chain_of_mixers(num_sequences: int, length: int, kv_dtype: torch.dtype) -> None:
    """The same for Gated DeltaNet and attention, whose states and KV are changed in place."""
    num_tokens = num_sequences * length
    columns = sum(REAL.sizes), 2 * (HEADS + KV_HEADS) * HEAD_DIM
    weights = [
        (fill(columns[0], HIDDEN), fill(HIDDEN, REAL.values), fill(columns[1], HIDDEN),
         fill(HIDDEN, HEADS * HEAD_DIM))
        for _ in range(LAYERS)
    ]  # fmt: skip
    scale, first = torch.ones(HIDDEN, device="cuda"), fill(num_tokens, HIDDEN)
    mix, reset, changed = _recurrent(num_sequences, length)
    attend, pool = _attention(num_sequences, length, kv_dtype)

    def run(pause: Callable[[], object]) -> list[Tensor]:
        reset()
        hidden, delta, outputs = first, None, []
        for enter, leave, enter_attention, leave_attention in weights:
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6)
            pause()
            projected = products.multiply(normed, Raw(values=enter))
            pause()
            mixed = mix(projected, pause)
            delta = products.multiply(mixed, Raw(values=leave))
            pause()
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6)
            pause()
            projected = products.multiply(normed, Raw(values=enter_attention))
            pause()
            attended = attend(projected, pause)
            delta = products.multiply(attended, Raw(values=leave_attention))
            pause()
            outputs += [mixed, attended, delta]
        return [*outputs, *(tensor.clone() for tensor in (*changed, pool))]

    compare(run, lambda: first.copy_(fill(num_tokens, HIDDEN)))


def _recurrent(num_sequences: int, length: int):
    """Gated DeltaNet of all sequences, what sets their states back, and the states."""
    kept = make_pools(REAL, num_sequences + 1, torch.bfloat16, "cuda")
    for pool in (kept.conv, kept.recurrent):
        pool[1:] = pool[1].clone()
    pools, mixer = kept.clone(), make_weights(REAL, torch.bfloat16, "cuda")
    slots = range(1, num_sequences + 1)
    batch = Batch(starts=[], lengths=[], slot_in=slots, slot_out=slots)
    common = mixer, pools.states(batch.slots(torch.device("cuda")))
    if length > 1:
        laid_out = lay_out([0] * num_sequences, [length] * num_sequences, chunk=recurrent.CHUNK)
        layout = send_layout(laid_out, "cuda")
    else:
        layout = staging.on_device(lay_out_decode(REAL, num_sequences), torch.device("cuda"))

    def mix(projected: Tensor, pause: Callable[[], object]) -> Tensor:
        output = REAL.operation.mix(projected, *common, layout)
        pause()
        return output

    def reset() -> None:
        pools.conv.copy_(kept.conv)
        pools.recurrent.copy_(kept.recurrent)

    return mix, reset, (pools.conv, pools.recurrent)


def _attention(num_sequences: int, length: int, kv_dtype: torch.dtype):
    """Attention of all sequences behind KV of their own, and its pool's bytes."""
    pages = -(-(KV_LENGTH + length) // 64)
    tables = np.arange(num_sequences * pages, dtype=np.int32).reshape(num_sequences, pages)
    room = Capacity(num_tokens=num_sequences * length, num_sequences=num_sequences)
    tiling = work.Tiling(
        heads_per_kv=HEADS // KV_HEADS,
        num_kv_heads=KV_HEADS,
        page_size=64,
        num_programs=132,
        capacity=room,
        shapes=ItemShapes(narrow_rows=8, num_beside=2, narrow_waves=4)
        if kv_dtype == FP8
        else ItemShapes(),
    )
    starts, lengths = [KV_LENGTH] * num_sequences, [length] * num_sequences
    items = work.lay_out(starts, lengths, range(num_sequences), tiling)
    names = ("narrow", "wide", "bases")
    arrays = {name: torch.from_numpy(getattr(items, name)).cuda() for name in names}
    items, on_device = replace(items, **arrays), torch.from_numpy(tables).cuda()
    pool = fill(tables.size, 2, 64, KV_HEADS, HEAD_DIM).to(kv_dtype)
    kv = attention.PagedKV(pool, on_device, torch.ones(2, KV_HEADS, device="cuda"))
    new = torch.arange(length) + KV_LENGTH
    page_ids = torch.arange(num_sequences)[:, None] * pages + new // 64
    kv_rows = (page_ids * (2 * 64) + new % 64).flatten().cuda()
    norms = torch.ones(HEADS + KV_HEADS, HEAD_DIM, device="cuda")
    operation = attention.AttentionOperation(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    angles = torch.rand(num_sequences * length, 1, 32, device="cuda", dtype=torch.bfloat16)

    def attend(projected: Tensor, pause: Callable[[], object]) -> Tensor:
        query = attention.prepare(
            operation, projected, norms, 1e-6, (angles, angles), kv, kv_rows, items
        )
        pause()
        gate = projected[:, -HEADS * HEAD_DIM :]
        output = attention.attend(query, gate, kv, items, HEAD_DIM**-0.5)
        pause()
        return output

    return attend, pool.view(torch.int8)
