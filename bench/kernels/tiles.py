"""Tiles of the portable kernels for quantised weights, timed beside each other and the floor.

    PYTHONPATH=src:. python bench/kernels/tiles.py [--form int4 fp4] [--tokens 16 64 2048]
        [--only experts dense] [--out FILE]

The experts of the 35B-A3B shape (256 and a shared one, 8 chosen at random), each projection alone,
and dense products of that shape and the 9B's. Tiles are written rows x outputs, warps, stages,
and "u" where four bits are scaled before they are multiplied with rows on the left, "s" where rows
are on the right; "1xweights,warps" is row by row;
"chosen" are those that the tables choose, in whole layers of experts with grouping and beside
Hopper's kernels. Experts of few tokens are not grouped. The floor is the time to read what is
touched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels import quantised
from bench.kernels.quantised import HIDDEN, SHAPES, SIZE, bytes_of

from milepost.kernels import products
from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import hopper_kernels, probe
from milepost.kernels.platform.tiles import Tiles, choose_split_k
from milepost.kernels.products import Epilogue, mix, multiply
from milepost.kernels.products.expert_table import SEARCHED
from milepost.kernels.products.forms.quantised import Int4, Quantised
from milepost.kernels.products.grouping import group
from milepost.kernels.products.portable import gemm, gemv, grouped
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.portable.tiles import GemvTiles, SplitTiles
from milepost.kernels.products.run import Multiplication, RoutedRows

FORMS = quantised.FORMS | {"int4, 32": partial(quantised.make_int4, group=32)}
EXPERTS, CHOSEN = 257, 8
COPY_GBPS = 4280
"""Of an H200, measured."""
FEW = "8x64,4,4 8x64,2,4 8x64,4,3 8x128,4,4 8x128,4,3 16x64,2,4"
FEW_FP8 = "16x64,4,3 16x64,4,4 16x64,4,5 16x64,8,3 16x128,4,3 16x128,4,4 16x128,8,3 16x32,2,4"
ROWS = "8x128,8,4 8x128,4,4 8x64,2,4 8x64,4,4 16x128,8,4 16x64,2,4"
ONE = "1x8192,4 1x16384,4 1x16384,8 1x4096,4"
SOME = "32x64,4,4 32x128,8,4 64x64,4,3 64x128,8,3 64x128,8,4"
MANY = (
    "32x64,4,4 64x64,4,3 64x128,8,3 64x64,4,3,s 64x128,4,3,s 64x64,4,3,u 64x64,4,2,u 64x64,8,3,u "
    "64x128,4,3,u 128x64,4,2,u 128x64,8,2,u 128x64,8,3,u 128x128,8,2,u 128x128,8,3,u 256x64,8,2,u"
)
MANY_FP8 = "32x64,4,4 32x128,4,3 64x64,4,3 64x128,8,3"

Calls = list[Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", nargs="+", default=["int4"], choices=list(FORMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 2048, 8192])
    parser.add_argument("--only", nargs="+", default=["experts", "dense"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for form in options.form:
        for name in options.only:
            for row in {"experts": time_experts, "dense": time_dense}[name](form, options.tokens):
                rows.append(json.dumps({"form": form, **row}))
                print(rows[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(rows) + "\n")


def time_experts(form: str, counts: list[int]) -> Iterator[dict[str, Any]]:
    up = FORMS[form](EXPERTS, 2 * SIZE, HIDDEN)
    down = FORMS[form](EXPERTS, HIDDEN, SIZE)
    few, many = (FEW_FP8, MANY_FP8) if form == "fp8" else (FEW, MANY)
    for num_tokens in counts:
        draws = [draw(num_tokens, up, down) for _ in range(6 if num_tokens <= 64 else 2)]
        touched = sum(each.experts.unique().numel() for each in draws) / len(draws)
        for is_up, weight in ((True, up), (False, down)):
            named = {"op": "up" if is_up else "down", "tokens": num_tokens}
            floor = bytes_of(weight) * touched / EXPERTS / COPY_GBPS / 1e3
            calls = {
                each: project(draws, parse(each), is_up=is_up)
                for each in (few if num_tokens <= 128 else many).split()
            }
            if num_tokens <= 4:
                calls |= {each: project_one(draws, each, is_up=is_up) for each in ONE.split()}
            yield {**named, "floor_us": round(floor, 1), "us": time_all(calls)}
        whole: dict[str, Calls] = {
            "chosen": [partial(run_mix, each, False) for each in draws],
            "Hopper's": [partial(run_mix, each, True) for each in draws],
            "grouped": [partial(grouped.run, each) for each in draws],
            "grouping alone": [partial(group, each.experts, EXPERTS, 16) for each in draws],
        }
        yield {"op": "experts", "tokens": num_tokens, "us": time_all(whole)}


def draw(num_tokens: int, up: Quantised, down: Quantised) -> RoutedRows:
    hidden = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, EXPERTS, device="cuda", dtype=torch.bfloat16)
    weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
    return RoutedRows(as_activations(hidden), weights, experts, up, down)


def run_mix(routed: RoutedRows, allowed: bool) -> Tensor:
    with hopper_kernels(allowed):
        return mix(routed.values, routed.routing_weights, routed.experts, routed.up, routed.down)


def project(draws: list[RoutedRows], tiles: Tiles, *, is_up: bool) -> Calls:
    calls: Calls = []
    for routed in draws:
        weight = routed.up if is_up else routed.down
        groups = None
        if len(routed.experts) > min(SEARCHED, tiles.block_m):
            groups = group(routed.experts, EXPERTS, tiles.block_m)
        active = torch.randn(routed.num_routed, SIZE, device="cuda", dtype=torch.bfloat16)
        given, output = (routed.rows, active) if is_up else (active, routed.new_output(CHOSEN + 1))
        are_few = (tiles.block_m <= 16 or tiles.scales_first) and isinstance(weight, Int4)
        rows = round_rows(given, weight, routed.chip, are_few=are_few)
        calls.append(partial(grouped.project, rows, routed, output, groups, tiles, is_up=is_up))
    return calls


def project_one(draws: list[RoutedRows], name: str, *, is_up: bool) -> Calls:
    calls: Calls = []
    for routed in draws:
        tiles = parse_one(name, routed.up if is_up else routed.down, 1 + is_up)
        active = torch.randn(routed.num_routed, SIZE, device="cuda", dtype=torch.bfloat16)
        rows, output = (routed.values, active) if is_up else (active, routed.new_output(CHOSEN + 1))
        calls.append(partial(gemv.project, rows, routed, output, tiles, is_up=is_up))
    return calls


def parse_one(name: str, weight: Quantised, num_matrices: int = 1) -> GemvTiles:
    """Returns the tiles of one row that are written so."""
    num_weights, num_warps = map(int, name.removeprefix("1x").split(","))
    block_k = min(weight.num_inputs, 2048)
    block_n = num_weights // (num_matrices * block_k)
    return GemvTiles(block_n=block_n, block_k=block_k, num_warps=num_warps)


def time_dense(form: str, counts: list[int]) -> Iterator[dict[str, Any]]:
    few = FEW_FP8 if form == "fp8" else ROWS
    for name, (num_inputs, num_outputs) in SHAPES.items():
        count = max(3, int(120e6 * 2 // (num_inputs * num_outputs)))
        weights = [FORMS[form](num_outputs, num_inputs) for _ in range(count)]
        floor = bytes_of(weights[0]) / COPY_GBPS / 1e3
        for num_tokens in (each for each in counts if each <= 64):
            hidden = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
            calls: dict[str, Calls] = {
                each: [partial(run_dense, hidden, weight, each) for weight in weights]
                for each in (few if num_tokens <= 16 else SOME).split()
            }
            if num_tokens == 1:
                calls |= {
                    each: [partial(run_one, hidden, weight, each) for weight in weights]
                    for each in ONE.split()
                }
            for allowed, each in ((False, "chosen"), (True, "Hopper's")):
                calls[each] = [partial(run_chosen, hidden, weight, allowed) for weight in weights]
            named = {"op": name, "tokens": num_tokens, "floor_us": round(floor, 1)}
            yield {**named, "us": time_all(calls)}


def run_dense(hidden: Tensor, weight: Quantised, name: str) -> Tensor:
    chip, tiles = probe(hidden.device), parse(name)
    split_k = choose_split_k(weight.num_outputs, weight.num_inputs, tiles, chip.num_sms)
    given = Multiplication(as_activations(hidden), weight, epilogue=Epilogue.PARTIALS)
    return gemm.run(given, SplitTiles(tiles=tiles, split_k=split_k))


def run_one(hidden: Tensor, weight: Quantised, name: str) -> Tensor:
    return gemv.run(Multiplication(as_activations(hidden), weight), parse_one(name, weight))


def run_chosen(hidden: Tensor, weight: Quantised, allowed: bool) -> Tensor:
    with hopper_kernels(allowed):
        return multiply(hidden, weight, epilogue=Epilogue.PARTIALS)


def parse(name: str) -> Tiles:
    """Returns the tiles that are written so."""
    sizes, num_warps, num_stages, *how = name.split(",")
    block_m, block_n = map(int, sizes.split("x"))
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        block_k=128,
        num_warps=int(num_warps),
        num_stages=int(num_stages),
        is_swapped=how != ["u"],
        scales_first=bool(how),
    )


def time_all(calls: dict[str, Calls]) -> dict[str, Any]:
    """Times each of the calls by name; compiles them side by side first."""
    errors: dict[str, str] = {}

    def compile_(name: str) -> None:
        try:
            calls[name][0]()
        except Exception as error:  # noqa: BLE001  what does not run is a result
            errors[name] = str(error).strip().splitlines()[-1][:80]

    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_, calls))
    torch.cuda.synchronize()
    return {name: errors.get(name) or round(time_us(calls[name]), 1) for name in calls}


def time_us(calls: Calls) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replay = partial(do_bench, graph.replay, warmup=5, rep=25, return_mode="median")
    return float(replay()) * 1e3 / len(calls)


if __name__ == "__main__":
    main()
