"""What models take, and what a GPU then has room for: tables of docs/deployment.md and README.md.

    python tools/memory_table.py        (python tools/tables.py writes them into the pages)

The figures are those of `milepost plan` for an L4 (sm_89), without vision towers. Configurations
are transformers' defaults, where its documentation says whose they are, those in bench/models, and
for the 27B its published sizes. Prints both tables as JSON, in a process of its own, since it
pretends to have a GPU.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from milepost.config import EngineConfig
from milepost.engine.assembly import MemoryPlan, MemoryPlanner
from milepost.kernels.platform.device import find_chip
from milepost.kernels.platform.pretending import pretend
from milepost.runner.pool_sizes import GIB, MIB

MODELS = Path(__file__).parent.parent / "bench" / "models"


@dataclass(frozen=True, slots=True)
class Source:
    """A class of transformers whose defaults are a model's, and what differs from them."""

    config: str
    settings: tuple[tuple[str, Any], ...] = ()


_LONG = ("max_position_embeddings", 262_144)
_27B = Source(
    "Qwen3_5TextConfig",
    (
        _LONG,
        *(("hidden_size", 5120), ("num_hidden_layers", 64), ("intermediate_size", 17408)),
        *(("num_attention_heads", 24), ("linear_num_value_heads", 48)),
    ),
)
CONFIGS: dict[str, Source | Path] = {
    "Qwen3.5 and 3.6-35B-A3B": Source("Qwen3_5MoeTextConfig", (_LONG,)),
    "Qwen3.5, 3.6 and 3.8-27B": _27B,
    "Qwen3.5-9B": Source("Qwen3_5TextConfig", (_LONG,)),
    "Qwen3-Next-80B-A3B": Source("Qwen3NextConfig", (_LONG,)),
    "Nemotron-3-Nano-30B-A3B": MODELS / "nemotron-3-nano",
    "Kimi-Linear-48B-A3B": MODELS / "kimi-linear-48b-a3b",
    "Ling-3.0-tiny": MODELS / "ling-3.0-tiny",
    "Bamba-9B": MODELS / "bamba-9b",
    "Olmo-Hybrid-7B": Source("OlmoHybridConfig"),
}
GPUS = {"24 GiB": 24, "32 GiB": 32, "48 GiB": 48, "80 GB": 79, "141 GB": 139}
"""What torch sees of them, in GiB."""
LARGE = ("80 GB", "141 GB")
CHAT_TOKENS = 8192
FOUR_BITS = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
KEPT = ("lm_head", "gate", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b", "conv1d")
"""Projections that four-bit checkpoints leave in 16 bits."""
KINDS = ("bfloat16", "FP8", "four bits")
IN_FOUR_BITS = ("Qwen3.5 and 3.6-35B-A3B", "Qwen3.5, 3.6 and 3.8-27B", "Qwen3.5-9B")
"""Models whose four-bit checkpoints people run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model with one kind of weights, planned for each of `GPUS`."""

    name: str
    kind: str
    plans: dict[str, MemoryPlan]

    @property
    def weights(self) -> str:
        return f"{next(iter(self.plans.values())).weights_bytes / GIB:.1f} GiB"

    def fits(self, gpu: str) -> str:
        """Returns the context that fits, and how many chats do."""
        plan = self.plans[gpu]
        if plan.sizes is None:
            return "-"
        context = plan.max_model_len
        length = f"{context // 1024}K" if context >= 1024 else str(context)
        return f"{length} / {plan.num_chats(CHAT_TOKENS)}"

    def room(self, gpu: str) -> str:
        """Returns the room of the cache, as tokens of KV."""
        plan = self.plans[gpu]
        if plan.sizes is None or not plan.token_bytes:
            return "-"
        return f"{plan.cache_bytes / plan.token_bytes / 1e6:.1f} M tokens"


def main() -> None:
    with pretend(find_chip("sm_89")) as meter:
        planner = MemoryPlanner(meter)
        rows = [
            planned(planner, name, source, kind)
            for name, source in CONFIGS.items()
            for kind in KINDS
            if kind != "four bits" or name in IN_FOUR_BITS
        ]
    print(json.dumps({"table": table(rows), "summary": summary(rows)}))


def table(rows: list[Row]) -> str:
    """Returns what fits, in Markdown."""
    head = ("model", "weights", "KV of 1,000 tokens", "a state", *GPUS)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        plan = row.plans["24 GiB"]
        kv = f"{1000 * plan.token_bytes / MIB:.1f} MiB"
        state = f"{plan.shape.state_bytes / MIB:.1f} MiB"
        cells = (f"{row.name}, {row.kind}", row.weights, kv, state, *map(row.fits, GPUS))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Returns weights, and the cache beside them, in Markdown."""
    gpus = [f"on {name}" for name in LARGE]
    lines = [
        f"| model | weights, bfloat16 | cache {' | '.join(gpus)} | weights, FP8 | "
        f"cache {' | '.join(gpus)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CONFIGS:
        own = [row for row in rows if row.name == name and row.kind != "four bits"]
        cells = [cell for row in own for cell in (row.weights, *map(row.room, LARGE))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def planned(planner: MemoryPlanner, name: str, source: Source | Path, kind: str) -> Row:
    """Plans a model for every GPU."""
    with tempfile.TemporaryDirectory() as made:
        folder = source if isinstance(source, Path) else _folder(Path(made), source, kind)
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", quantization="fp8" if kind == "FP8" else None
        )
        plans = {gpu: planner.plan(config, size * GIB) for gpu, size in GPUS.items()}
    return Row(name=name, kind=kind, plans=plans)


def _folder(folder: Path, source: Source, kind: str) -> Path:
    config = getattr(transformers, source.config)(**dict(source.settings)).to_dict()
    if kind == "four bits":
        config["quantization_config"] = {**FOUR_BITS, "modules_to_not_convert": list(KEPT)}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


if __name__ == "__main__":
    main()
