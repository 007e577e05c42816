"""Gated DeltaNet's fused token mixer on a GPU, beside the least time that its work can take.

    PYTHONPATH=src:. python bench/kernels/gated_delta.py [--spacing N] [--out FILE]

A row holds the median time of one layer's call, replayed from a CUDA graph over pools larger than
the L2 cache, and its floor: the larger of bytes moved over the copy rate and operations over the
matrix rate. --spacing elements stand between slots, as where pages and slots share one memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.mixers import (
    REAL,
    Batch,
    Pools,
    lay_out_decode,
    make_pools,
    make_projected,
    make_weights,
    send_layout,
    space,
)

from milepost.kernels.layout.chunks import lay_out
from milepost.kernels.recurrent import CHUNK, DeltaWeights
from milepost.runner.staging import on_device

STATE_BYTES = 4 * REAL.value_heads * REAL.key_dim * REAL.value_dim
CONV_BYTES = 2 * REAL.channels * (REAL.taps - 1)
TOKEN_BYTES = 2 * (sum(REAL.sizes) + REAL.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spacing", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--copy-gbps", type=float, default=4280)
    parser.add_argument("--tflops", type=float, default=787)
    arguments = parser.parse_args()
    spacing = arguments.spacing
    rows = [decode_row(count, spacing) for count in (1, 16, 64)]
    rows += [prefill_row(1, tokens, spacing) for tokens in (64, 512, 2048, 8192)]
    rows.append(prefill_row(32, 256, spacing))
    for row in rows:
        moved_us = row["bytes"] / arguments.copy_gbps / 1e3
        floor_us = max(moved_us, row["flops"] / arguments.tflops / 1e6)
        row |= {"floor_us": floor_us, "times_floor": row["median_us"] / floor_us}
        print(json.dumps(row | {"gpu": torch.cuda.get_device_name()}))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def decode_row(num_sequences: int, spacing: int) -> dict[str, Any]:
    weights, pools, slots = _prepare(num_sequences, spacing)
    projected = make_projected(REAL, num_sequences, torch.bfloat16, "cuda")
    layout = on_device(lay_out_decode(REAL, num_sequences), projected.device)

    def call(turn: int) -> None:
        REAL.operation.mix(projected, weights, pools.states(slots[turn]), layout)

    return {
        "op": f"decode, {num_sequences} sequences",
        "median_us": time_us(call, len(slots)),
        "bytes": num_sequences * (2 * STATE_BYTES + 2 * CONV_BYTES + TOKEN_BYTES),
        "flops": 0,
    }


def prefill_row(num_sequences: int, length: int, spacing: int) -> dict[str, Any]:
    weights, pools, slots = _prepare(num_sequences, spacing)
    tokens = num_sequences * length
    projected = make_projected(REAL, tokens, torch.bfloat16, "cuda")
    layout = lay_out([0] * num_sequences, [length] * num_sequences, chunk=CHUNK)
    chunks = send_layout(layout, "cuda")

    def call(turn: int) -> None:
        REAL.operation.mix(projected, weights, pools.states(slots[turn]), chunks)

    return {
        "op": f"prefill, {num_sequences} x {length} tokens",
        "median_us": time_us(call, len(slots)),
        "bytes": num_sequences * 2 * (STATE_BYTES + CONV_BYTES) + tokens * TOKEN_BYTES,
        "flops": tokens * token_flops(),
    }


def token_flops() -> int:
    """Operations of the matrix products for one token, all heads."""
    key, value = REAL.key_dim, REAL.value_dim
    of_key_head = 2 * 2 * CHUNK * key
    of_value_head = 2 * (CHUNK * (key + 2 * value) + 3 * key * value)
    return REAL.key_heads * of_key_head + REAL.value_heads * of_value_head


def time_us(call: Callable[[int], None], turns: int) -> float:
    """Median over replays of `turns` calls, for one of them."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            call(turn)
    milliseconds: float = do_bench(graph.replay, warmup=50, rep=200, return_mode="median")
    return milliseconds * 1e3 / turns


def _prepare(
    num_sequences: int, spacing: int
) -> tuple[DeltaWeights, Pools, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Weights, pools, and (slot_in, slot_out) for turns that together outgrow the cache."""
    turns = max(2, -(-64 // num_sequences))
    num_slots = 1 + turns * num_sequences
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    pools = make_pools(REAL, 3, torch.bfloat16, "cuda")
    pools = Pools(
        conv=space(pools.conv[1:2].expand(num_slots, -1, -1), spacing),
        recurrent=space(pools.recurrent[1:2].expand(num_slots, -1, -1, -1), spacing),
    )
    slots = []
    for turn in range(turns):
        first = 1 + turn * num_sequences
        batch = Batch(
            starts=[],
            lengths=[],
            slot_in=range(first, first + num_sequences),
            slot_out=range(first, first + num_sequences),
        )
        slots.append(batch.slots(torch.device("cuda")))
    return weights, pools, slots


if __name__ == "__main__":
    main()
