"""The options of `LLM` and `AsyncLLM`, typed for checkers: a test compares them with the
configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from milepost.cache.placement import Mode
from milepost.config import (
    CacheMemory,
    DType,
    EngineConfig,
    GenerationConfig,
    KVCacheDType,
    LoadFormat,
)
from milepost.engine.vllm_names import own_options, refuse_unknown
from milepost.kv_config import KVEventsConfig, KVTransferConfig
from milepost.speculative_config import SpeculativeConfig

Json = Mapping[str, Any] | str


class EngineOptions(TypedDict, total=False):
    """The fields of `milepost.config.EngineConfig`, where each is described. Settings that have
    fields of their own may be mappings."""

    tokenizer: str | None
    revision: str | None
    download_dir: str | None
    hf_token: str | None
    skip_tokenizer_init: bool
    load_format: LoadFormat
    dtype: DType
    quantization: str | None
    hf_overrides: Json | None
    device: str
    generation_config: GenerationConfig
    seed: int
    enable_prefix_caching: bool
    mamba_cache_mode: Mode
    mamba_block_size: int
    mamba_ssm_cache_dtype: DType
    kv_cache_dtype: KVCacheDType
    page_size: int
    num_pages: int | None
    num_slots: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    cpu_cache_gib: float
    cache_memory: CacheMemory
    tensor_parallel_size: int
    enable_expert_parallel: bool
    cache_host_gib: float | None
    cache_dir: str | None
    cache_disk_gib: float
    cache_flush_timeout_s: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_queue_wait_s: float | None
    batch_invariant: bool
    hopper_kernels: bool
    fp4_activations: bool
    enforce_eager: bool
    async_scheduling: bool | None
    speculative_config: SpeculativeConfig | Json | None
    max_cache_marks: int
    language_model_only: bool
    limit_mm_per_prompt: Json | None
    mm_processor_kwargs: Json | None
    encoder_cache_size: int | None
    encode_images_together: bool
    allowed_media_domains: Sequence[str] | None
    allowed_local_media_path: str | None
    kv_events_config: KVEventsConfig | Json | None
    kv_transfer_config: KVTransferConfig | Json | None
    record_plans: str | None
    record_trace: str | None
    disable_log_stats: bool


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt."""

    tools: Sequence[Any] | None
    """Functions that the model may call, as OpenAI has them."""
    chat_template: str | None
    """Replaces the tokenizer's template."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables for the template, such as `{"enable_thinking": False}`."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Sizes of the images and videos of this conversation, such as `{"max_pixels": 262144}`."""
    add_generation_prompt: bool
    """Whether the prompt ends with the start of an answer; the default."""
    continue_final_message: bool
    """Whether the answer continues the last message; overrides `add_generation_prompt`."""
    cache_salt: str | None
    """Separates caches: prompts share cached tokens only with prompts of the same salt."""


CHAT_OPTIONS = tuple(ChatOptions.__annotations__)


def read_options(model: str | PathLike[str] | None, options: Mapping[str, Any]) -> EngineConfig:
    """Returns the configuration that options stand for, vLLM's among them. Raises ConfigError."""
    renamed = own_options(options)
    refuse_unknown(renamed)
    renamed.setdefault("disable_log_stats", True)
    return EngineConfig(model=str(model) if isinstance(model, PathLike) else model, **renamed)


def compose_options(options: ChatOptions) -> dict[str, Any]:
    """Returns the options of `chat.compose` among those of a chat."""
    found: dict[str, Any] = {key: value for key, value in options.items() if key in _COMPOSED}
    template_kwargs = dict(options.get("chat_template_kwargs") or {})
    if options.get("chat_template") is not None:
        template_kwargs["chat_template"] = options["chat_template"]
    return {**found, "chat_template_kwargs": template_kwargs}


_COMPOSED = ("tools", "add_generation_prompt", "continue_final_message")
