"""Decode and verify steps of the recurrent mixers: Gated DeltaNet, KDA, Mamba2; one GPU.

    python bench/kernels/recurrent.py [--hopper]

Random inputs in bfloat16, states in float32. One JSON row for each mixer and number of sequences,
without drafts and with three: the median time of a layer's step in a CUDA graph. By default the
kernels for any chip run; `--hopper` allows Hopper's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests' inputs

from tests.batches import Part, build_batch
from tests.kernels import kimi, mixers, ssd
from tests.kernels.mixers import make_pools, make_projected

from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import hopper_kernels, probe
from milepost.runner.staging import on_device

DEVICE = torch.device("cuda")
SHAPES: dict[str, tuple[Any, Any]] = {
    "Gated DeltaNet, 35B": (mixers.REAL, mixers),
    "KDA, Kimi-Linear": (kimi.REAL, kimi),
    "Mamba2, Nemotron-3-Nano": (ssd.NEMOTRON, ssd),
    "Mamba2, Bamba": (ssd.BAMBA, ssd),
}
LAUNCHES, REPLAYS = 20, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hopper", action="store_true", help="allow Hopper's kernels")
    with hopper_kernels(parser.parse_args().hopper):
        measure(torch.cuda.get_device_name())


def measure(gpu: str) -> None:
    for name in SHAPES:
        for num_sequences in (1, 4, 16, 64):
            for num_drafts in (0, 3):
                row = {"mixer": name, "sequences": num_sequences, "drafts": num_drafts}
                us = time_us(make_step(name, num_sequences, num_drafts))
                print(json.dumps(row | {"us": round(us, 2), "gpu": gpu}), flush=True)


def make_step(name: str, num_sequences: int, num_drafts: int) -> Callable[[], Any]:
    """A layer's step of sequences that each have so many drafts, and one to fold if any."""
    shapes, module = SHAPES[name]
    num_tokens = num_sequences * (1 + num_drafts)
    weights = module.make_weights(shapes, torch.bfloat16, "cuda")
    pools = make_pools(shapes, num_sequences + 2, torch.bfloat16, "cuda", torch.float32)
    size = num_sequences, max(num_drafts, 1), len(shapes.recorded)
    records = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    fold = 1 if num_drafts else 0
    parts = [
        Part(pages=[1], start=9, length=1 + num_drafts, slot_in=s, slot_out=s, fold=fold)
        for s in range(1, num_sequences + 1)
    ]
    batch = replace(
        build_batch(parts, 64, 0, num_sequences),
        record_rows=np.arange(num_sequences),
        capacity=Capacity(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            decodes=True,
            num_drafts=num_drafts,
        ),
        chip=probe(DEVICE),
        device=DEVICE,
    )
    layout = on_device(shapes.operation.lay_out(batch), DEVICE)
    slots = tuple(torch.from_numpy(each).to(DEVICE) for each in (batch.slot_in, batch.slot_out))
    projected = make_projected(shapes, num_tokens, torch.bfloat16, "cuda")
    return lambda: module.launch(shapes, projected, weights, pools, layout, slots, records)


def time_us(step: Callable[[], Any]) -> float:
    """The median time of a step among others in a graph."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            step()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


if __name__ == "__main__":
    main()
