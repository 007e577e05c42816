"""vLLM's scheduler on a machine without a GPU, with the memory of an H200.

What they import but never call while they plan is replaced by empty modules: compiled kernels,
which need a driver, and libraries for structured output. The platform is an H200 on paper.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIBRARIES = ("xgrammar", "tvm_ffi", "torchvision")
_MODULES = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
)
_CAPABILITIES = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
"""Operators that vLLM asks as its modules are imported."""
_LARGEST_PICTURE = 16_384
"""Tokens of the largest picture of the Qwen3.5 family."""


class _Empty(types.ModuleType):
    """A module in which every name is a class that can be called with anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda *_args, **_kwargs: None})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _LIBRARIES and name not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Empty(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Leaves the module empty."""


@dataclass(frozen=True)
class OpenedScheduler:
    scheduler: Any
    hasher: Any
    """Hashes the blocks of a request."""
    step_tokens: int


def open_scheduler(whole: Mapping[str, Any], gib: float, unit: int | None) -> OpenedScheduler:
    """Returns the scheduler of a model with Gated DeltaNet and this config.json, as `vllm serve`
    makes it, with so much memory for the cache; `unit` is its --prefix-match-unit."""
    import_vllm()
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.mamba import abstract
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.gdn_attn import FLASHINFER_GDN_CHECKPOINT_ALIGNMENT
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core import kv_cache_planning, kv_cache_utils
    from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget
    from vllm.v1.core.sched import scheduler as schedulers
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(whole), encoding="utf-8")
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=65536,
            max_num_seqs=4,
            mamba_ssm_cache_dtype="float32",
            prefix_match_unit=unit,
            async_scheduling=False,
        )
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # What it asks of layers, which are not made here: on Hopper, FlashInfer prefills.
        abstract.get_mamba_prefill_checkpoint_alignment = lambda _: (
            FLASHINFER_GDN_CHECKPOINT_ALIGNMENT
        )
        kind = type(current_platform)
        kind._find_non_ssm_backends = classmethod(lambda *_: [FlashAttentionBackend])
        kind.update_block_size_for_backend(config)
        model, _ = ModelRegistry.resolve_model_cls(
            config.model_config.architecture, model_config=config.model_config
        )
    cache, text = config.cache_config, config.model_config.hf_text_config
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=text.num_key_value_heads,
        head_size=text.head_dim,
        dtype=torch.bfloat16,
    )
    recurrent = MambaSpec(
        shapes=tuple(model.get_mamba_state_shape_from_config(config)),
        dtypes=model.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=abstract.get_mamba_prefill_checkpoint_grid(config),
    )
    layers = {
        f"layers.{index}": attention if kind == "full_attention" else recurrent
        for index, kind in enumerate(text.layer_types)
    }
    layouts = [each.name for each in get_supported_kv_cache_layouts([FlashAttentionBackend])]
    resolve_kv_cache_layout(config, [layouts], layers.values())
    groups = kv_cache_planning.get_global_kv_cache_groups(config, [layers])
    memory = [int(gib * 2**30)]
    (planned,) = kv_cache_planning.get_kv_cache_configs(config, [layers], memory, groups)
    cache.num_gpu_blocks = planned.num_blocks
    block, unit = kv_cache_utils.resolve_kv_cache_block_sizes(planned, config)
    budget = compute_mm_encoder_budget(config.scheduler_config, {"image": _LARGEST_PICTURE})
    schedulers.MultiModalBudget = lambda *_: types.SimpleNamespace(
        encoder_compute_budget=budget[0], encoder_cache_size=budget[1]
    )
    hash_ = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_)
    hasher = kv_cache_utils.get_request_block_hasher(unit, hash_, config.num_hash_lookahead_tokens)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=planned,
        structured_output_manager=types.SimpleNamespace(accept_tokens=lambda *_: True),
        block_size=block,
        hash_block_size=unit,
    )
    print(f"vllm: {planned.num_blocks} blocks of {block} tokens, hits every {unit}")

    return OpenedScheduler(
        scheduler=scheduler,
        hasher=hasher,
        step_tokens=config.scheduler_config.max_num_batched_tokens,
    )


def import_vllm() -> None:
    """Makes vLLM importable. Raises SystemExit without it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Triton may then be imported without a driver
    try:
        import torch
        import transformers.image_utils
        import transformers.models.auto.image_processing_auto  # noqa: F401

        sys.meta_path.insert(0, _Finder())  # after transformers has looked for torchvision
        for name in _CAPABILITIES:
            setattr(torch.ops._C, name, lambda _: True)
        from vllm import platforms
        from vllm.model_executor.models import registry
        from vllm.platforms.cuda import CudaPlatformBase
        from vllm.platforms.interface import DeviceCapability
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error}: this needs vllm==0.33.0 and what it imports, in an environment of its own; "
            "the first lines of bench/vllm_screenshots.py say how"
        ) from error

    class Paper(CudaPlatformBase):
        """An H200 that nothing runs on."""

        @classmethod
        def import_kernels(cls) -> None:
            """Loads nothing."""

        @classmethod
        def get_device_capability(cls, *_: Any, **__: Any) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, *_: Any, **__: Any) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, *_: Any, **__: Any) -> int:
            return 141 * 2**30

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 12

        @classmethod
        def num_compute_units(cls, *_: Any, **__: Any) -> int:
            return 132

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    platforms._current_platform = Paper()
    registry._run_in_subprocess = lambda call: call()  # a new process would lack all of this
