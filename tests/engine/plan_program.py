"""Run by test_plan in a process of its own, which pretends to have a GPU: prints plans as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3_5Config

from milepost.config import EngineConfig
from milepost.engine.assembly.planning import DRIVER_BYTES, MemoryPlan, MemoryPlanner, changes
from milepost.kernels.platform.device import find_chip
from milepost.kernels.platform.pretending import Meter, pretend
from milepost.runner.pool_sizes import GIB

MODELS = Path(__file__).parents[2] / "bench" / "models"
INT4_27B = str(MODELS / "hybrid-27b-awq")
INT4_35B = str(MODELS / "hybrid-35b-a3b-awq")


def main() -> None:
    with pretend(find_chip("sm_89")) as meter:
        found = {"metered": metered(), "plans": {}, "changes": []}
        planner = MemoryPlanner(meter)
        for name, config, size in [*cases(), *pictured_cases()]:
            found["plans"][name] = described(planner.plan(config, size * GIB))
        plan = planner.plan(EngineConfig(model=INT4_27B), 24 * GIB)
        found["changes"] = [flag for flag, _ in changes(EngineConfig(model=INT4_27B), plan)]
    json.dump(found, sys.stdout)


def cases() -> list[tuple[str, EngineConfig, int]]:
    return [
        ("27b 24", EngineConfig(model=INT4_27B), 24),
        ("27b 24 fp8", EngineConfig(model=INT4_27B, kv_cache_dtype="fp8"), 24),
        ("27b 24 large", EngineConfig(model=INT4_27B, max_num_batched_tokens=8192), 24),
        ("27b 24 two", EngineConfig(model=INT4_27B, tensor_parallel_size=2), 24),
        ("27b 141", EngineConfig(model=INT4_27B), 139),
        ("27b 141 2", EngineConfig(model=INT4_27B, kv_cache_memory_bytes=2 * GIB), 139),
        ("27b 16", EngineConfig(model=INT4_27B), 16),
        ("27b 24 long", EngineConfig(model=INT4_27B, max_model_len=200_000), 24),
        ("35b 24", EngineConfig(model=INT4_35B), 24),
    ]


def pictured_cases() -> list[tuple[str, EngineConfig, int]]:
    """A model of some 8B with a vision tower, on GPUs that leave it much room and little."""
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    }
    vision = {"num_heads": 16, "out_hidden_size": 4096}
    folder = tempfile.mkdtemp()
    Qwen3_5Config(text_config=text, vision_config=vision, dtype="bfloat16").save_pretrained(folder)
    config = EngineConfig(model=folder)
    small = replace(config, mm_processor_kwargs='{"max_pixels": 1048576}')
    return [
        ("pictured 141", config, 139),
        ("pictured 24", config, 24),
        ("pictured 22", config, 22),
        ("pictured 20", config, 20),
        ("pictured 24 small", small, 24),
        ("pictured 24 set", replace(config, encoder_cache_size=1000), 24),
        ("pictured 24 without", replace(config, language_model_only=True), 24),
    ]


def described(plan: MemoryPlan) -> dict[str, object]:
    return {
        "weights": plan.weights_bytes,
        "forms": sorted({form for _, form in plan.weights}),
        "step": plan.step_bytes.largest,
        "graphs": plan.step_bytes.graphs,
        "tokens": plan.steps.largest.num_tokens,
        "sequences": plan.steps.largest.num_sequences,
        "context": plan.max_model_len,
        "chats": plan.num_chats(8192),
        "cache": plan.cache_bytes,
        "encoded": plan.config.encoder_cache_size,
        "encoded bytes": plan.step_bytes.encoded,
        "items": sum(num_bytes for _, num_bytes in plan.items()),
        "gpu": plan.gpu_bytes,
        "driver": DRIVER_BYTES,
        "refused": plan.refused,
    }


def metered() -> list[int]:
    """Bytes after each step of a small program on the device `meta`, and the most there were."""
    meter = Meter()
    with meter:
        weights = torch.empty(1024, dtype=torch.bfloat16, device="meta")
        meter.num_bytes = 0
        meter.leave_out([weights])
        first = torch.zeros(1000, device="meta")
        sizes = [meter.num_bytes]
        view = first[:10]
        sizes.append(meter.num_bytes)
        second = weights.float() + 1
        sizes.append(meter.num_bytes)
        del first, second
        sizes.append(meter.num_bytes)
        del view
        sizes += [meter.num_bytes, meter.peak]
    return sizes


if __name__ == "__main__":
    main()
