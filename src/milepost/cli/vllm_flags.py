"""Flags that people bring from vLLM and that do nothing here, so that its command lines run.

Those that mean something stand in the configurations under the same names. One that would change
what is served is taken only with the value that asks for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlags:
    """Raises ConfigError for what is not supported."""

    block_size: int | None = None
    """The same as --page-size."""
    kv_offloading_size: float | None = None
    """The same as --cache-host-gib."""
    disable_uvicorn_access_log: bool = False
    """The same as --no-access-log."""
    trust_remote_code: bool = False
    """Does nothing: no code of a checkpoint is run."""
    enable_auto_tool_choice: bool = False
    """Does nothing: tool calls are parsed where the model writes them."""
    enable_prompt_tokens_details: bool = False
    """Does nothing: `usage` always has them."""
    enable_chunked_prefill: bool | None = None
    """Does nothing: prefills are always chunked."""
    enable_log_requests: bool = False
    """Does nothing: the access log has a line for each request."""
    disable_log_requests: bool = False
    """Does nothing: prompts are never logged."""
    enable_server_load_tracking: bool = False
    """Does nothing: /load always tells."""
    uvicorn_log_level: str | None = None
    """Does nothing: see --verbose."""
    tokenizer_mode: str = "auto"
    """Does nothing: tokenizers are fast where they can be."""
    swap_space: float | None = None
    """Does nothing."""
    max_num_partial_prefills: int = 1
    """Does nothing: as many prefills run in a step as it has tokens for."""
    language_model_only: bool = False
    """Does nothing: only text is taken."""
    limit_mm_per_prompt: str | None = None
    """Does nothing: only text is taken."""
    distributed_executor_backend: str | None = None
    """Does nothing."""
    pipeline_parallel_size: int = 1
    """Only 1."""
    data_parallel_size: int = 1
    """Only 1: run several servers behind a router."""
    enable_lora: bool = False
    """Not supported."""
    chat_template_content_format: str = "auto"
    """Does nothing: parts of a message are joined to text."""

    def __post_init__(self) -> None:
        for name in _ONLY_DEFAULT:
            value, default = getattr(self, name), _default(name)
            if value != default:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {value}: not supported here, leave it out")

    def into(self, settings: dict[str, Any]) -> None:
        """Put those that have another name here under that, unless it is set too."""
        if self.block_size is not None:
            settings.setdefault("page_size", self.block_size)
        if self.kv_offloading_size is not None:
            settings.setdefault("cache_host_gib", self.kv_offloading_size)
        if self.disable_uvicorn_access_log:
            settings.setdefault("access_log", False)


_ONLY_DEFAULT = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_lora",
)


def _default(name: str) -> Any:
    return next(field.default for field in fields(VllmFlags) if field.name == name)
