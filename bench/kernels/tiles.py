"""Tiles of the portable kernels for quantised weights, timed beside each other and the floor.

    PYTHONPATH=src:. python bench/kernels/tiles.py [--model 35b] [--form int4 fp4]
        [--tokens 16 64 2048] [--only experts dense] [--out FILE]

The experts of the 35B-A3B shape (256 and a shared one, 8 chosen at random) or of Ling's, each
projection alone, and dense products of that shape and the 9B's. Tiles are written rows x outputs,
perhaps x inputs, warps, stages, and "u" where four bits are scaled before they are multiplied with
rows on the left, "s" where rows are on the right, and perhaps the steps of a round; "1 x outputs x
inputs, warps" is row by row, with "a" where all weights are loaded before the first are multiplied;
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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels import quantised
from bench.kernels.quantised import HIDDEN, SHAPES, SIZE, bytes_of

from milepost.kernels import products
from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import hopper_kernels, probe
from milepost.kernels.products import Epilogue, mix, multiply
from milepost.kernels.products.expert_table import SEARCHED
from milepost.kernels.products.forms.quantised import Int4, Quantised
from milepost.kernels.products.grouping import group
from milepost.kernels.products.portable import gemm, gemv, grouped
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.portable.row_tiles import GemvTiles
from milepost.kernels.products.portable.tiles import SplitTiles, Tiles, choose_split_k
from milepost.kernels.products.run import Multiplication, RoutedRows

FORMS = quantised.FORMS | {"int4, 32": partial(quantised.make_int4, group=32)}


class Model(NamedTuple):
    """The shapes of a model's products."""

    hidden: int
    size: int
    """Of an expert."""
    experts: int
    """With the shared one."""
    dense: dict[str, tuple[int, int]]
    """Inputs and outputs."""


CHOSEN = 8
LING_SHAPES = {
    "recurrent input": (2560, 20480),
    "mixer output": (4096, 2560),
    "latents": (2560, 576),
    "feed-forward": (2560, 12288),
}
MODELS = {
    "35b": Model(HIDDEN, SIZE, 257, SHAPES),
    "ling": Model(2560, 768, 513, LING_SHAPES),
}
COPY_GBPS = 4280
"""Of an H200, measured."""
FEW = "8x64,4,4 8x64,2,4 8x64,4,3 8x128,4,4 8x128,4,3 16x64,2,4"
FEW_FP8 = "16x32,2,6 16x64,4,4 16x64,4,6 16x64,8,4 16x128,4,4 16x128,4,6 16x128,8,4 16x256,8,3"
ROWS = "8x128,8,4 8x128,4,4 8x64,2,4 8x64,4,4 16x128,8,4 16x64,2,4"
SMALL_STEPS = (
    "8x64x64,4,6 8x64x64,4,8 8x64x64,2,8 8x32x64,2,8 8x128x64,8,6 8x128x64,4,8 16x64x64,4,6 "
    "16x128x64,8,6 8x128,8,4 8x64,4,4"
)
"""For groups of 32, a step of which has two."""
NUM_OF_ONE = 4
"""Tiles of several rows that are tried with one."""
ONE = (
    "1x4x512,1 1x4x512,1,a 1x8x512,1 1x8x512,1,a 1x2x512,1,a 1x4x1024,1 1x4x1024,1,a 1x8x1024,1 "
    "1x2x1024,1,a 1x4x2048,2 1x4x2048,2,a 1x8x2048,2 1x2x2048,2,a 1x4x4096,4 1x2x4096,4"
)
ONE_FP8 = (
    "1x4x2048,4 1x8x2048,4 1x16x2048,4 1x8x2048,8 1x16x2048,8 1x32x2048,8 1x8x1024,4 1x16x1024,4 "
    "1x32x1024,8 1x16x512,4 1x32x512,8"
)
SOME = "32x64,4,4 32x128,8,4 64x64,4,3 64x128,8,3 64x128,8,4"
SOME_FP8 = (
    "32x64,4,4 32x128,4,4 32x128,8,4 64x64,4,4 64x64,4,6 64x64,8,4 64x128,4,3 64x128,4,4 "
    "64x128,8,3 64x128,8,4 64x256,8,3"
)
MANY = (
    "32x64,4,4 64x64,4,3 64x128,8,3 64x64,4,3,s 64x128,4,3,s 64x64,4,3,u 64x64,4,2,u 64x64,8,3,u "
    "64x128,4,3,u 128x64,4,2,u 128x64,8,2,u 128x64,8,3,u 128x128,8,2,u 128x128,8,3,u 256x64,8,2,u"
)
MANY_FP8 = "32x64,4,4 32x128,4,3 64x64,4,3 64x128,8,3"

Calls = list[Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="35b", choices=list(MODELS))
    parser.add_argument("--form", nargs="+", default=["int4"], choices=list(FORMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 2048, 8192])
    parser.add_argument("--only", nargs="+", default=["experts", "dense"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for form in options.form:
        for name in options.only:
            time = {"experts": time_experts, "dense": time_dense}[name]
            for row in time(form, MODELS[options.model], options.tokens):
                rows.append(json.dumps({"form": form, **row}))
                print(rows[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(rows) + "\n")


def time_experts(form: str, model: Model, counts: list[int]) -> Iterator[dict[str, Any]]:
    up = FORMS[form](model.experts, 2 * model.size, model.hidden)
    down = FORMS[form](model.experts, model.hidden, model.size)
    few, many = (FEW_FP8, MANY_FP8) if form == "fp8" else (FEW, MANY)
    few = SMALL_STEPS if form == "int4, 32" else few
    one = ONE_FP8 if form == "fp8" else ONE
    for num_tokens in counts:
        draws = [draw(num_tokens, up, down) for _ in range(6 if num_tokens <= 64 else 2)]
        touched = sum(each.experts.unique().numel() for each in draws) / len(draws)
        for is_up, weight in ((True, up), (False, down)):
            named = {"op": "up" if is_up else "down", "tokens": num_tokens}
            floor = bytes_of(weight) * touched / model.experts / COPY_GBPS / 1e3
            tiles = few if num_tokens <= 128 else many
            calls = {
                each: project(draws, parse(each), is_up=is_up)
                for each in tiles.split()[: None if num_tokens > 1 else NUM_OF_ONE]
            }
            if num_tokens <= 16:
                calls |= {each: project_one(draws, each, is_up=is_up) for each in one.split()}
            yield {**named, "floor_us": round(floor, 1), "us": time_all(calls)}
        whole: dict[str, Calls] = {
            "chosen": [partial(run_mix, each, False) for each in draws],
            "Hopper's": [partial(run_mix, each, True) for each in draws],
            "grouped": [partial(grouped.run, each) for each in draws],
            "grouping alone": [
                partial(group, each.experts, each.num_experts, 16) for each in draws
            ],
        }
        yield {"op": "experts", "tokens": num_tokens, "us": time_all(whole)}


def draw(num_tokens: int, up: Quantised, down: Quantised) -> RoutedRows:
    hidden = torch.randn(num_tokens, up.num_inputs, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, len(up.scales), device="cuda", dtype=torch.bfloat16)
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
            groups = group(routed.experts, routed.num_experts, tiles.block_m)
        active = torch.randn(routed.num_routed, routed.size, device="cuda", dtype=torch.bfloat16)
        given, output = (routed.rows, active) if is_up else (active, routed.new_output(CHOSEN + 1))
        are_few = (tiles.block_m <= 16 or tiles.scales_first) and isinstance(weight, Int4)
        rows = round_rows(given, weight, routed.chip, are_few=are_few)
        calls.append(partial(grouped.project, rows, routed, output, groups, tiles, is_up=is_up))
    return calls


def project_one(draws: list[RoutedRows], name: str, *, is_up: bool) -> Calls:
    calls: Calls = []
    for routed in draws:
        tiles = parse_one(name)
        active = torch.randn(routed.num_routed, routed.size, device="cuda", dtype=torch.bfloat16)
        rows, output = (routed.values, active) if is_up else (active, routed.new_output(CHOSEN + 1))
        calls.append(partial(gemv.project, rows, routed, output, tiles, is_up=is_up))
    return calls


def parse_one(name: str) -> GemvTiles:
    """Returns the tiles of one row that are written so."""
    sizes, num_warps, *how = name.split(",")
    _, block_n, block_k = map(int, sizes.split("x"))
    return GemvTiles(block_n, block_k, int(num_warps), is_ahead=how == ["a"])


def time_dense(form: str, model: Model, counts: list[int]) -> Iterator[dict[str, Any]]:
    few = FEW_FP8 if form == "fp8" else SMALL_STEPS if form == "int4, 32" else ROWS
    one = ONE_FP8 if form == "fp8" else ONE
    for name, (num_inputs, num_outputs) in model.dense.items():
        count = max(3, int(120e6 * 2 // (num_inputs * num_outputs)))
        weights = [FORMS[form](num_outputs, num_inputs) for _ in range(count)]
        floor = bytes_of(weights[0]) / COPY_GBPS / 1e3
        for num_tokens in (each for each in counts if each <= 64):
            hidden = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
            tiles = few if num_tokens <= 16 else SOME_FP8 if form == "fp8" else SOME
            calls: dict[str, Calls] = {
                each: [partial(run_dense, hidden, weight, each) for weight in weights]
                for each in tiles.split()[: None if num_tokens > 1 else NUM_OF_ONE]
            }
            if num_tokens == 1:
                calls |= {
                    each: [partial(run_one, hidden, weight, each) for weight in weights]
                    for each in one.split()
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
    return gemv.run(Multiplication(as_activations(hidden), weight), parse_one(name))


def run_chosen(hidden: Tensor, weight: Quantised, allowed: bool) -> Tensor:
    with hopper_kernels(allowed):
        return multiply(hidden, weight, epilogue=Epilogue.PARTIALS)


def parse(name: str) -> Tiles:
    """Returns the tiles that are written so."""
    sizes, num_warps, num_stages, *how = name.split(",")
    block_m, block_n, *block_k = map(int, sizes.split("x"))
    steps = [int(each) for each in how if each.isdecimal()]
    how = [each for each in how if not each.isdecimal()]
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k[0] if block_k else 128,
        num_warps=int(num_warps),
        num_stages=int(num_stages),
        is_swapped=how != ["u"],
        scales_first=bool(how),
        steps=steps[0] if steps else 1,
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
