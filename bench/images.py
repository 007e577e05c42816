"""Images a second through a vision tower on a GPU, beside its floor and beside transformers'.

    python bench/images.py --out images.jsonl
    python bench/images.py --pictures "256 tokens" 640x480 --alone --out small.jsonl

Towers of the three published sizes with random weights in bfloat16, and pictures of 512x512,
640x480, 1080p and 4K; the small ones also several in one run of the tower, in milliseconds each,
and from the host's memory launch by launch (`ms_sent`) and by a CUDA graph (`ms_by_graph`). The
floor is the operations at the measured rate of GEMMs, attention included. Preparing a picture on
one core of the host is timed too, beside transformers' Pillow processor; `--alone` leaves
transformers out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1]))

from rows import provenance, write

from milepost.images import ImageSettings, PreparedImage, normalisation, prepare
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower import Tower
from milepost.layers.tower_parts import TowerShapes
from milepost.runner.measuring import measure_tower
from milepost.runner.pictures import FEW_PATCHES, MOST_PATCHES
from milepost.runner.tower_graphs import MOST_GRAPH_PATCHES, TowerGraphs

SIZES = {"256 tokens": (512, 512), "640x480": (480, 640), "1080p": (1080, 1920), "4K": (2160, 3840)}
TOWERS = {
    "small": (12, 768, 12, 3072, 1024),
    "medium": (24, 1024, 16, 4096, 2560),
    "large": (27, 1152, 16, 4304, 2048),
}
"""Name -> depth, hidden size, heads, feed-forward size, size of the model."""
FLOPS_PER_S = 787e12
"""Rate of GEMMs measured on an H200."""
_MOST_COMPARED = 10_000
"""Patches of the largest picture that transformers encodes too."""


def shapes_of(name: str) -> TowerShapes:
    depth, hidden_size, num_heads, feed_forward_size, output_size = TOWERS[name]
    return TowerShapes(
        depth=depth,
        hidden_size=hidden_size,
        num_heads=num_heads,
        feed_forward_size=feed_forward_size,
        output_size=output_size,
        patch_size=16,
        merge_size=2,
        num_frames=2,
        num_channels=3,
        num_positions=2304,
        theta=10_000.0,
    )


def num_flops(shapes: TowerShapes, num_patches: int) -> tuple[int, int]:
    """Operations of the linear layers, and of attention."""
    linear = 2 * num_patches * shapes.num_weights // shapes.merge_size**2
    return linear, 4 * shapes.depth * num_patches**2 * shapes.hidden_size


def made(shapes: TowerShapes) -> Tower:
    tower = Tower(shapes, ModuleScope(dtype=torch.bfloat16, device=torch.device("cuda")))
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.uniform_(-0.03, 0.03)
    return tower


def theirs(shapes: TowerShapes) -> Qwen3_5VisionModel:
    config = Qwen3_5VisionConfig(
        depth=shapes.depth,
        hidden_size=shapes.hidden_size,
        num_heads=shapes.num_heads,
        intermediate_size=shapes.feed_forward_size,
        out_hidden_size=shapes.output_size,
    )
    model = Qwen3_5VisionModel(config)
    nn.Module.to(model, "cuda", torch.bfloat16)
    model.eval()
    return model


def median_ms(call: Callable[[], object]) -> float:
    return float(do_bench(call, warmup=50, rep=300, return_mode="median"))


@torch.inference_mode()
def from_the_host(
    tower: Tower, table: Tensor, graphs: TowerGraphs, image: PreparedImage
) -> dict[str, float]:
    """Times a small picture from pinned memory, launch by launch and by a graph."""
    rows, grids = torch.from_numpy(image.rows).pin_memory(), (image.grid,)

    def launch() -> Tensor:
        return tower.forward(rows.to("cuda", non_blocking=True), table, grids)

    def replay() -> Tensor | None:
        return graphs.run(rows, grids, is_fixed=False)

    launched = launch()
    made = [replay() for _ in range(3)]
    assert made[-1] is not None, "it came twice"
    assert torch.equal(made[-1], launched)
    return {"ms_sent": median_ms(launch), "ms_by_graph": median_ms(replay)}


@torch.inference_mode()
def on_the_device(
    images: dict[str, PreparedImage], *, is_compared: bool
) -> Iterator[dict[str, Any]]:
    table = torch.from_numpy(normalisation(ImageSettings())).cuda().bfloat16()
    for name in TOWERS:
        shapes = shapes_of(name)
        tower, reference = made(shapes), theirs(shapes) if is_compared else None
        most = measure_tower(tower, ImageSettings(), captures=True).tower_graphs
        graphs = TowerGraphs(tower, table, most_bytes=most)
        graphs.prepare()
        for picture, prepared in images.items():
            rows = torch.from_numpy(prepared.rows).cuda()
            linear, attention = num_flops(shapes, len(rows))
            values = torch.randn(len(rows), shapes.num_inputs, device="cuda").bfloat16()
            grid = torch.tensor([prepared.grid], device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            tower(rows, table, [prepared.grid])
            peak = torch.cuda.max_memory_allocated() - before
            own = median_ms(partial(tower, rows, table, [prepared.grid]))
            # As many as one run takes, each with the bits that it has alone.
            count = MOST_PATCHES // len(rows) if len(rows) <= FEW_PATCHES else 0
            together = {
                str(number): median_ms(
                    partial(
                        tower,
                        rows.repeat(number, 1),
                        table,
                        [prepared.grid] * number,
                        is_fixed=True,
                    )
                )
                / number
                for number in sorted({1, 4, count})
                if number <= count
            }
            # Of 4K it takes seconds an image.
            other = None
            if reference is not None and len(rows) <= _MOST_COMPARED:
                other = median_ms(partial(reference, values, grid_thw=grid))
            is_small = len(rows) <= MOST_GRAPH_PATCHES
            sent = from_the_host(tower, table, graphs, prepared) if is_small else {}
            floor = 1e3 * (linear + attention) / FLOPS_PER_S
            yield {
                "tower": name,
                "picture": picture,
                "tokens": prepared.num_tokens,
                "ms": own,
                "images_per_s": 1e3 / own,
                "ms_each_of_several": together,
                **sent,
                "graphs_mib": graphs.num_bytes / 2**20,
                "most_graphs_mib": most / 2**20,
                "floor_ms": floor,
                "times_floor": own / floor,
                "attention_share_of_flops": attention / (linear + attention),
                "transformers_ms": other,
                "times_faster": other and other / own,
                "peak_mib": peak / 2**20,
            }


def on_the_host(pictures: dict[str, Image.Image]) -> Iterator[dict[str, Any]]:
    settings = ImageSettings()
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    for name, picture in pictures.items():
        own = _seconds(partial(prepare, picture, settings))
        other = _seconds(partial(processor, images=[picture], return_tensors="np"))
        yield {"picture": name, "prepare_ms": 1e3 * own, "transformers_ms": 1e3 * other}


def _seconds(call: Callable[[], object], count: int = 5) -> float:
    call()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[count // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    pictures = {
        name: Image.fromarray(random.integers(0, 256, (*SIZES[name], 3), dtype=np.uint8))
        for name in options.pictures
    }
    images = {name: prepare(each, ImageSettings()) for name, each in pictures.items()}
    rows = []
    is_compared = not options.alone
    on_host = on_the_host(pictures) if is_compared else ()
    on_device = on_the_device(images, is_compared=is_compared) if has_gpu() else ()
    for row in chain(on_host, on_device):
        rows.append(row | provenance())
        print(row, flush=True)
    if options.out:
        write(options.out, rows)


def has_gpu() -> bool:
    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
