"""The table of docs/deployment.md: what models take, and what a GPU then has room for.

    python tools/memory_table.py

Weights and shapes are those of the models as the engine builds them, on torch's `meta` device; the
rest is the engine's own division of memory. Only what a step takes besides is assumed, since it is
measured when an engine starts. Configurations are transformers' defaults, where its documentation
says whose they are, and those in bench/models.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers

from milepost.config import EngineConfig
from milepost.engine.assembly.sizing import pool_shape
from milepost.models.decoder import Decoder
from milepost.models.loading import outline
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import GIB, MIB, OneMemory, share, split

MODELS = Path(__file__).parent.parent / "bench" / "models"
CONFIGS: dict[str, str | Path] = {
    "Qwen3.5-35B-A3B": "Qwen3_5MoeTextConfig",
    "Qwen3-Next-80B-A3B": "Qwen3NextConfig",
    "Nemotron-3-Nano-30B-A3B": MODELS / "nemotron-3-nano",
    "Kimi-Linear-48B-A3B": MODELS / "kimi-linear-48b-a3b",
    "Bamba-9B": MODELS / "bamba-9b",
    "Olmo-Hybrid-7B": "OlmoHybridConfig",
}
GPUS = {"80 GB": 79, "141 GB": 139}
"""What torch sees of them, in GiB."""
BESIDES = int(2.75 * GIB)
"""A step's activations, 2 GiB, and captured graphs."""
UTILIZATION = EngineConfig().gpu_memory_utilization
WANTED = (("bfloat16", None), ("FP8 made while loading", "fp8"))


def main() -> None:
    print("\n".join(table()))


def table() -> list[str]:
    """Lines in Markdown."""
    columns = [*(f"cache on {name}" for name in GPUS)]
    lines = [
        f"| model | weights | KV of 1,000 tokens | a state | {' | '.join(columns)} |",
        f"|---|---|---|---|{'---|' * len(columns)}",
    ]
    for name, config in CONFIGS.items():
        for kind, quantization in WANTED:
            lines.append(_row(f"{name}, {kind}", config, quantization))
    return lines


def _row(name: str, source: str | Path, quantization: str | None) -> str:
    with tempfile.TemporaryDirectory() as made:
        folder = source if isinstance(source, Path) else _folder(Path(made), source)
        config = EngineConfig(model=str(folder), dtype="bfloat16", quantization=quantization)
        model = outline(folder, dtype="bfloat16", quantization=quantization)
    shape = pool_shape(config, model, torch.device("cpu"), None)
    weights = _weights(model)
    kv = shape.page_bytes / shape.page_size * 1000
    cells = [f"{weights / GIB:.1f} GiB"]
    cells += [f"{num_bytes / MIB:.1f} MiB" for num_bytes in (kv, shape.slot_bytes)]
    for total in GPUS.values():
        budget = int(total * GIB * UTILIZATION) - weights - BESIDES
        cells.append(_room(budget, shape))
    return f"| {name} | {' | '.join(cells)} |"


def _room(budget: int, shape: PoolShape) -> str:
    if budget < GIB:
        return "-"
    sizes = share(budget, shape) or split(budget, shape, max_num_seqs=EngineConfig().max_num_seqs)
    pages = sizes.num_units * sizes.pages_each if isinstance(sizes, OneMemory) else sizes.num_pages
    return f"{pages * shape.page_size / 1e6:.1f} M tokens"


def _weights(model: Decoder) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _folder(folder: Path, name: str) -> Path:
    config = getattr(transformers, name)().to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


if __name__ == "__main__":
    main()
