"""Times paged attention's kernels on a GPU, each beside its floor.

    python bench/kernels/attention.py --out attention.jsonl

A floor is the longer of the bytes over the chip's copy bandwidth and the operations over its
matrix rate, both as measured on an H200. KV that several sequences share counts once. Steps are
captured in a graph that passes over several layers of the same pages, so none finds its KV in the
cache. --padding rows stand between two pages, as where pages and slots share one memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from milepost.kernels.attention.items import Tiling, lay_out
from milepost.kernels.attention.pages import PagedKV, rows_per_page
from milepost.kernels.attention.portable.prepare import prepare
from milepost.kernels.attention.portable.tiles import KVTiles
from milepost.kernels.attention.run import attend
from milepost.kernels.attention.tiles import ItemShapes
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import num_sms
from milepost.runner.staging import on_device

BYTES_PER_S = 4.28e12
FLOPS_PER_S = 787e12
HEADS, HEAD_DIM, PAGE_SIZE = 16, 256, 64
ROTATED_BYTES = 300e6
FLOAT8_ITEMS = {"narrow_rows": 8, "num_beside": 2, "narrow_waves": 4}
"""As `AttentionOperation` has them on Hopper."""
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step; the first `shared` tokens of all its sequences stand in the same pages."""

    name: str
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_kv_heads: int = 2
    shared: int = 0
    kv_dtype: torch.dtype = torch.bfloat16
    capacity: Capacity | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        seen = sum(n * s + n * (n + 1) / 2 for s, n in zip(self.starts, self.lengths, strict=True))
        return 4 * seen * HEADS * HEAD_DIM

    @property
    def bytes(self) -> float:
        ends = [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
        tokens = sum(ends) - self.shared * (len(ends) - 1)
        kv = 2 * self.kv_dtype.itemsize * tokens * self.num_kv_heads * HEAD_DIM
        return kv + 6 * self.num_tokens * HEADS * HEAD_DIM

    @property
    def prepare_floor_us(self) -> float:
        """Query, key and value heads are read and written once."""
        written = HEADS + self.num_kv_heads * self.kv_dtype.itemsize
        moved = 2 * (HEADS + 2 * self.num_kv_heads + written)
        return 1e6 * moved * self.num_tokens * HEAD_DIM / BYTES_PER_S

    @property
    def floor_us(self) -> float:
        return 1e6 * max(self.bytes / BYTES_PER_S, self.flops / FLOPS_PER_S)


def cases(num_kv_heads: int, kv_dtype: torch.dtype) -> list[Case]:
    some = [
        *(decodes(f"1 decode, {n} KV", [n]) for n in (100, 1000, 4000, 31700)),
        decodes("64 decodes, 1000 KV each", [1000] * 64),
        decodes("64 decodes, 32768 KV each", [32767] * 64),
        decodes("64 decodes, 8192 shared of 8448", [8447] * 64, shared=8192),
        *(Case(name=f"{n} new after 31700", starts=(31700,), lengths=(n,)) for n in (20, 64)),
        *(Case(name=f"{n} new", starts=(0,), lengths=(n,)) for n in (64, 512, 2048, 8192)),
        Case(name="8192 new after 23808", starts=(23808,), lengths=(8192,)),
        Case(
            name="64 decodes of 1000 + 2048 new",
            starts=(1000,) * 64 + (0,),
            lengths=(1,) * 64 + (2048,),
        ),
    ]
    return [replace(case, num_kv_heads=num_kv_heads, kv_dtype=kv_dtype) for case in some]


def decodes(name: str, starts: list[int], shared: int = 0) -> Case:
    room = Capacity(num_tokens=len(starts), num_sequences=len(starts))
    return Case(
        name=name, starts=tuple(starts), lengths=(1,) * len(starts), shared=shared, capacity=room
    )


class Step:
    """A case's tensors on the device, with as many layers' pools as overflow the cache."""

    def __init__(self, case: Case, *, padding: int = 0, share: bool = True, **options: int) -> None:
        self.case = case
        ends = [s + n for s, n in zip(case.starts, case.lengths, strict=True)]
        needed = [-(-end // PAGE_SIZE) for end in ends]
        num_shared = case.shared // PAGE_SIZE
        tables = np.zeros((len(ends), max(needed)), np.int32)
        ids = iter(np.random.default_rng(0).permutation(sum(needed) + num_shared))
        prefix = [next(ids) for _ in range(num_shared)]
        for table, count in zip(tables, needed, strict=True):
            table[:count] = [*prefix, *(next(ids) for _ in range(count - num_shared))]
        num_pages = int(tables.max()) + 1
        count = int(np.clip(ROTATED_BYTES // case.bytes, 1, 16))
        num_rows = 2 * PAGE_SIZE * count
        shape = (num_pages, num_rows + padding, case.num_kv_heads, HEAD_DIM)
        kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        layers = torch.empty(shape, dtype=case.kv_dtype, device="cuda")
        for part in layers.split(1024):
            part.copy_(torch.randn(part.shape, **kind))
        self.pools = layers[:, :num_rows].unflatten(1, (count, 2, PAGE_SIZE)).unbind(1)
        self.kv_scales = torch.ones(2, case.num_kv_heads, device="cuda")
        columns = (2 * HEADS + 2 * case.num_kv_heads) * HEAD_DIM
        self.projected = torch.randn(case.num_tokens, columns, **kind)
        self.query = self.projected[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
        self.gate = self.projected[:, -HEADS * HEAD_DIM :]
        self.scale = torch.rand(HEADS + case.num_kv_heads, HEAD_DIM, device="cuda")
        self.angles = torch.rand(case.num_tokens, 1, 32, **kind)
        places = torch.randperm(num_pages * PAGE_SIZE, device="cuda")[: case.num_tokens]
        self.kv_rows = places // PAGE_SIZE * rows_per_page(self.pools[0]) + places % PAGE_SIZE
        self.tables = torch.from_numpy(tables).cuda()
        tiling = Tiling(
            heads_per_kv=HEADS // case.num_kv_heads,
            num_kv_heads=case.num_kv_heads,
            page_size=PAGE_SIZE,
            num_programs=num_sms(torch.device("cuda", 0)),
            capacity=case.capacity,
            shapes=ItemShapes(**(FLOAT8_ITEMS if case.kv_dtype.itemsize == 1 else {}) | options),
        )
        shared = tables if share else None
        items = lay_out(case.starts, case.lengths, range(len(ends)), tiling, shared)
        self.items = on_device(items, torch.device("cuda"))

    def attend(self, **shapes: KVTiles) -> None:
        for pool in self.pools:
            kv = PagedKV(pool, self.tables, self.kv_scales)
            attend(self.query, self.gate, kv, self.items, HEAD_DIM**-0.5, tiles=shapes)

    def prepare(self) -> None:
        for pool in self.pools:
            angles = self.angles, self.angles
            given = self.projected, self.scale, 1e-6, angles
            prepare(*given, PagedKV(pool, scales=self.kv_scales), self.kv_rows, num_heads=HEADS)

    def time_us(self, run: Any) -> float:
        """Median time of one layer."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        milliseconds: float = triton.testing.do_bench(
            graph.replay, warmup=20, rep=100, return_mode="median"
        )
        return 1e3 * milliseconds / len(self.pools)


def measure(case: Case, padding: int) -> dict[str, Any]:
    step = Step(case, padding=padding)
    microseconds = step.time_us(step.attend)
    return {
        "case": case.name,
        "kv_heads": case.num_kv_heads,
        "kv_dtype": str(case.kv_dtype).removeprefix("torch."),
        "padding": padding,
        "attend_us": round(microseconds, 1),
        "floor_us": round(case.floor_us, 1),
        "of_floor": round(case.floor_us / microseconds, 3),
        "tflops": round(case.flops / microseconds / 1e6, 1),
        "prepare_us": round(step.time_us(step.prepare), 1),
        "prepare_floor_us": round(case.prepare_floor_us, 1),
        "gpu": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--padding", type=int, default=0)
    parser.add_argument("--kv-dtype", choices=DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    padding = arguments.padding
    kinds = itertools.product(arguments.kv_heads, arguments.kv_dtype)
    every = [case for heads, dtype in kinds for case in cases(heads, DTYPES[dtype])]
    rows = [measure(case, padding) for case in every]
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
