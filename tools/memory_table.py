"""What models take, and what a GPU then has room for: tables of docs/deployment.md and README.md.

    python tools/memory_table.py        (python tools/tables.py writes them into the pages)

Weights and shapes are those of the models as the engine builds them, on torch's `meta` device; the
rest is the engine's own division of memory. Only what a step takes besides is assumed, since it is
measured when an engine starts. Configurations are transformers' defaults, where its documentation
says whose they are, those in bench/models, and for the 27B its published sizes.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from milepost.config import EngineConfig
from milepost.engine.assembly.sizing import pool_shape
from milepost.models.decoder import Decoder
from milepost.models.loading import outline
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import GIB, MIB, OneMemory, share, split

MODELS = Path(__file__).parent.parent / "bench" / "models"


@dataclass(frozen=True, slots=True)
class Source:
    """A class of transformers whose defaults are a model's, and what differs from them."""

    config: str
    settings: tuple[tuple[str, Any], ...] = ()


_27B = Source(
    "Qwen3_5TextConfig",
    (
        *(("hidden_size", 5120), ("num_hidden_layers", 64), ("intermediate_size", 17408)),
        *(("num_attention_heads", 24), ("linear_num_value_heads", 48)),
    ),
)
CONFIGS: dict[str, Source | Path] = {
    "Qwen3.5 and 3.6-35B-A3B": Source("Qwen3_5MoeTextConfig"),
    "Qwen3.5, 3.6 and 3.8-27B": _27B,
    "Qwen3.5-9B": Source("Qwen3_5TextConfig"),
    "Qwen3-Next-80B-A3B": Source("Qwen3NextConfig"),
    "Nemotron-3-Nano-30B-A3B": MODELS / "nemotron-3-nano",
    "Kimi-Linear-48B-A3B": MODELS / "kimi-linear-48b-a3b",
    "Bamba-9B": MODELS / "bamba-9b",
    "Olmo-Hybrid-7B": Source("OlmoHybridConfig"),
}
GPUS = {"80 GB": 79, "141 GB": 139}
"""What torch sees of them, in GiB."""
BESIDES = int(2.75 * GIB)
"""A step's activations, 2 GiB, and captured graphs."""
UTILIZATION = EngineConfig().gpu_memory_utilization
WANTED = {"bfloat16": None, "FP8 made while loading": "fp8"}


@dataclass(frozen=True, slots=True)
class Size:
    """What one model takes with one kind of weights."""

    weights: str
    kv: str
    state: str
    caches: tuple[str, ...]
    """Room on each of `GPUS`, as tokens."""


def main() -> None:
    print(table())


def table() -> str:
    """Returns every figure, in Markdown."""
    columns = [*(f"cache on {name}" for name in GPUS)]
    lines = [
        f"| model | weights | KV of 1,000 tokens | a state | {' | '.join(columns)} |",
        f"|---|---|---|---|{'---|' * len(columns)}",
    ]
    for name, config in CONFIGS.items():
        for kind, quantization in WANTED.items():
            size = measured(config, quantization)
            cells = (f"{name}, {kind}", size.weights, size.kv, size.state, *size.caches)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary() -> str:
    """Returns weights, and the cache beside them, in Markdown."""
    gpus = [f"on {name}" for name in GPUS]
    lines = [
        f"| model | weights, bfloat16 | cache {' | '.join(gpus)} | weights, FP8 | "
        f"cache {' | '.join(gpus)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in CONFIGS.items():
        sizes = [measured(config, quantization) for quantization in WANTED.values()]
        cells = [cell for size in sizes for cell in (size.weights, *size.caches)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@functools.cache
def measured(source: Source | Path, quantization: str | None) -> Size:
    """Returns what a model takes; each takes about half a second."""
    with tempfile.TemporaryDirectory() as made:
        folder = source if isinstance(source, Path) else _folder(Path(made), source)
        config = EngineConfig(model=str(folder), dtype="bfloat16", quantization=quantization)
        model = outline(folder, dtype="bfloat16", quantization=quantization)
    shape = pool_shape(config, model, torch.device("cpu"), None)
    weights = _weights(model)
    kv = shape.page_bytes / shape.page_size * 1000
    budgets = [int(total * GIB * UTILIZATION) - weights - BESIDES for total in GPUS.values()]
    return Size(
        weights=f"{weights / GIB:.1f} GiB",
        kv=f"{kv / MIB:.1f} MiB",
        state=f"{shape.state_bytes / MIB:.1f} MiB",
        caches=tuple(_room(budget, shape) for budget in budgets),
    )


def _room(budget: int, shape: PoolShape) -> str:
    if budget < GIB:
        return "-"
    sizes = share(budget, shape) or split(budget, shape, max_num_seqs=EngineConfig().max_num_seqs)
    pages = sizes.num_units * sizes.pages_each if isinstance(sizes, OneMemory) else sizes.num_pages
    return f"{pages * shape.page_size / 1e6:.1f} M tokens"


def _weights(model: Decoder) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _folder(folder: Path, source: Source) -> Path:
    config = getattr(transformers, source.config)(**dict(source.settings)).to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


if __name__ == "__main__":
    main()
