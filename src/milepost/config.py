"""Settings of the engine. The command line is generated from these dataclasses, so each default is
in one place.

Names are vLLM's where the meaning is the same. Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from milepost.cache.placement import Mode
from milepost.cache.tree import HYBRID, grid_of
from milepost.checks import check_types, decode_floats, json_text, read_json, require
from milepost.image_config import ImageConfig
from milepost.kv_config import KVEventsConfig, KVTransferConfig
from milepost.speculative_config import SpeculativeConfig, read_speculative_config

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
_DISK_GIB = 64.0
_FLUSH_S = 20.0
_MOST_GIB = 2.0**40
"""Upper limit of sizes in GiB; below it, floats can count bytes too."""
GenerationConfig = Literal["auto", "none", "vllm"]
KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]
CacheMemory = Literal["auto", "shared", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ImageConfig):
    """Configuration of one engine. Raises ConfigError for values that no model could use."""

    model: str | None = None
    """Local folder or hub id of a checkpoint in Hugging Face format; by default the embedded
    model."""
    tokenizer: str | None = None
    """Local folder or hub id of the tokenizer, if it isn't the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    download_dir: str | None = None
    """Where checkpoints from the hub are kept; by default the hub's own cache (`HF_HUB_CACHE`)."""
    hf_token: str | None = field(default=None, repr=False)
    """Token for restricted checkpoints of the hub. Other users can see a command line, but not the
    environment variable `HF_TOKEN`."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and outputs have no text."""
    load_format: LoadFormat = "auto"
    """`auto` and `safetensors` read safetensors files; `dummy` fills the weights from the seed."""
    dtype: DType = "auto"
    """Type of weights and activations; `auto` uses the checkpoint's, but float32 instead of half
    precision on a CPU."""
    quantization: str | None = None
    """`fp8` rounds the weights of an unquantised checkpoint while loading; a quantised checkpoint
    needs no setting."""
    hf_overrides: str | None = None
    """Replaces settings in the checkpoint's config.json: a JSON object such as {"rope_parameters":
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}}, for longer
    prompts."""
    device: str = "auto"
    """`auto` uses CUDA if available, else the CPU."""
    generation_config: GenerationConfig = "auto"
    """`auto` reads sampling parameters that a request does not set from the checkpoint's
    generation_config.json; `none` (or `vllm`) ignores that file."""
    seed: int = 0
    """Seeds dummy weights, and sampling if a request has no seed of its own."""

    enable_prefix_caching: bool = True
    """Reuse KV and recurrent states of earlier prompts and answers."""
    mamba_cache_mode: Mode = "auto"
    """Where recurrent states are kept: `auto` (branch points, marks, ends), `align` (end of each
    block-aligned prefill chunk), `all` (each block boundary), `none`."""
    mamba_block_size: int = 512
    """Tokens between states in `align` and `all`; a multiple of 64."""
    mamba_ssm_cache_dtype: DType = "auto"
    """Type of the recurrent states; `auto` is float32, or float64 for a float64 model."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Type of keys and values in the cache: `auto` is the model's, or float8 if the checkpoint's
    quantization_config says so; `fp8` is `fp8_e4m3`, with the checkpoint's scales if it has any:
    pages get half as large."""
    page_size: int = 64
    """Tokens in a KV page; a power of two from 16 to 1024."""
    num_pages: int | None = None
    """Number of KV pages; by default as many as fit the measured memory."""
    num_slots: int | None = None
    """Number of slots for recurrent states; by default as many as fit the measured memory. A model
    whose states are stored with its pages has no slots, whatever is set."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations (measured at start), pages and slots."""
    kv_cache_memory_bytes: int | None = None
    """Memory for pages and slots together on each device, in bytes. Overrides
    `gpu_memory_utilization` and `cpu_cache_gib`."""
    cpu_cache_gib: float = 1.0
    """Memory for pages and slots together on a device that isn't a GPU, in GiB."""
    cache_memory: CacheMemory = "auto"
    """`shared`: pages and slots have one memory, whose boundary moves with the traffic; leave out
    `num_pages` and `num_slots` then. `split`: each has its own memory. `auto` shares on a GPU if
    the model and the options allow it."""

    tensor_parallel_size: int = 1
    """Number of devices of this machine to split the model over, with one process each."""
    enable_expert_parallel: bool = False
    """Give each of these devices whole experts, instead of a part of every expert."""
    cache_host_gib: float | None = None
    """Host memory, in GiB, for pages and states evicted from the device; they are loaded again when
    needed."""
    cache_dir: str | None = None
    """Directory for pages and states evicted from the device. It outlives the engine, and engines
    of the same model may share it. Its data passes through host memory, by default 1 GiB."""
    cache_disk_gib: float = _DISK_GIB
    """The most that this engine keeps in `cache_dir`, in GiB."""
    cache_flush_timeout_s: float = _FLUSH_S
    """How long an engine that is stopped may go on writing to `cache_dir`, in seconds. Everything
    that is complete in memory is written; if the time is too short for that, a warning is
    logged."""

    max_model_len: int | None = None
    """Maximum length of prompt plus answer, in tokens; by default the model's own."""
    max_num_seqs: int = 64
    """Maximum number of requests that run at once; fewer do on a GPU without room for their
    states."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; longer prompts are prefilled in chunks. By default 8192, or less on
    a GPU with little memory besides the weights: 768 for each GiB, at least 2048."""
    max_queue_wait_s: float | None = None
    """Longest time that a request may wait for its turn: one that would wait longer, by the
    measured rates, is refused at once, and one that does is ended, both with 503 and `Retry-After`.
    By default only `--request-timeout-s` limits the wait. For servers only."""
    batch_invariant: bool = False
    """Make log-probabilities depend on the tokens before them alone, bit for bit: not on the
    requests beside them, on chunks, or on cache hits. See docs/determinism.md."""
    hopper_kernels: bool = True
    """Run the kernels made for Hopper where they can run. Without them, a Hopper chip runs the
    portable kernels of all other chips."""
    fp4_activations: bool = False
    """Round activations to four bits where the checkpoint was made for it (NVFP4, MXFP4), as vLLM
    does on the same chips: B200 and RTX 50. By default they keep 16 bits. Not tried on a GPU."""
    enforce_eager: bool = False
    """Launch kernels one by one, without CUDA graphs."""
    async_scheduling: bool | None = None
    """Launch a decode step before the previous step's tokens are read; by default on a GPU."""
    speculative_config: SpeculativeConfig | None = None
    """Draft tokens ahead and verify several in one step: a JSON object such as {"method": "suffix",
    "num_speculative_tokens": 4}. Answers stay the same. See docs/speculation.md."""
    max_cache_marks: int = 16
    """Maximum number of `cache_marks` in one prompt."""
    kv_events_config: KVEventsConfig | None = None
    """Tell routers what is cached: a JSON object such as {"enable_kv_cache_events": true,
    "endpoint": "tcp://*:5557"}. See docs/disaggregation.md."""
    kv_transfer_config: KVTransferConfig | None = None
    """Exchange KV and states with other engines: a JSON object such as {"kv_connector":
    "NixlConnector", "kv_connector_extra_config": {"peers": ["10.0.0.0/24"]}}. See
    docs/disaggregation.md."""
    record_plans: str | None = None
    """Write each step's plan and result to this file, from which the steps can be run again."""
    record_trace: str | None = None
    """Write lengths, times and hashes of all requests to this file, for `milepost simulate`; no
    words or tokens."""
    disable_log_stats: bool = False
    """Do not log the engine's counters. A server logs them at intervals, `LLM` after each call;
    `LLM` disables them by default."""

    def __post_init__(self) -> None:
        given = read_speculative_config(self.speculative_config)
        object.__setattr__(self, "speculative_config", given)
        events = read_json("kv_events_config", KVEventsConfig, self.kv_events_config)
        object.__setattr__(self, "kv_events_config", events)
        transfer = read_json("kv_transfer_config", KVTransferConfig, self.kv_transfer_config)
        object.__setattr__(self, "kv_transfer_config", transfer)
        object.__setattr__(self, "hf_overrides", json_text("hf_overrides", self.hf_overrides))
        self.check_images()
        check_types(self)
        self._check_values()
        self._check_combinations()

    @property
    def kv_exchange(self) -> KVTransferConfig | None:
        """Settings of the KV exchange with other engines, or None if no peers are listed."""
        wanted = self.kv_transfer_config
        return wanted if wanted is not None and wanted.exchange.peers else None

    def _check_values(self) -> None:
        """Checks each value by itself."""
        require(
            self.page_size in _PAGE_SIZES,
            f"page_size={self.page_size}: use a power of two from 16 to 1024",
        )
        require(
            self.mamba_block_size > 0 and self.mamba_block_size % _GRID == 0,
            f"mamba_block_size={self.mamba_block_size}: use a positive multiple of {_GRID}",
        )
        require(
            0.0 < self.gpu_memory_utilization <= 1.0,
            f"gpu_memory_utilization={self.gpu_memory_utilization}: use above 0, up to 1",
        )
        for name in ("cache_host_gib", "cache_disk_gib", "cpu_cache_gib"):
            gib = getattr(self, name)
            require(
                gib is None or 0 < gib < _MOST_GIB,
                f"{name}={gib}: use more than 0 and less than 2**40, or leave it out",
            )
        for name in ("model", "tokenizer", "revision", "cache_dir", "record_plans", "record_trace"):
            require(getattr(self, name) != "", f"{name}='': name one, or leave it out")
        wait_s = self.max_queue_wait_s
        require(wait_s is None or 0 < wait_s < inf, f"max_queue_wait_s={wait_s}: use more than 0")
        flush_s = self.cache_flush_timeout_s
        require(0 <= flush_s < inf, f"cache_flush_timeout_s={flush_s}: use 0 or more")
        given = self.kv_cache_memory_bytes
        require(given is None or given > 0, f"kv_cache_memory_bytes={given}: use more than 0")
        for name in (
            "num_pages",
            "num_slots",
            "max_model_len",
            "max_num_seqs",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value}: use 1 or more")
        require(self.max_cache_marks >= 0, f"max_cache_marks={self.max_cache_marks}: use 0 or more")
        require(self.seed >= 0, f"seed={self.seed}: use 0 or more")

    def _check_combinations(self) -> None:
        require(
            not self.has_tiers or (self.enable_prefix_caching and self.mamba_cache_mode != "none"),
            f"cache_host_gib={self.cache_host_gib}, cache_dir={self.cache_dir!r}: prefix caching "
            "is off; leave them out",
        )
        for name, default in (("cache_disk_gib", _DISK_GIB), ("cache_flush_timeout_s", _FLUSH_S)):
            value = getattr(self, name)
            require(
                self.cache_dir is not None or value == default,
                f"{name}={value}: nothing is kept on disk without cache_dir; name a directory, or "
                "leave it out",
            )
        require(
            not (self.has_tiers and self.record_plans),
            f"record_plans={self.record_plans!r}: what comes from host memory is in no plan; "
            "leave out cache_host_gib and cache_dir",
        )
        check_budget(
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.step_tokens(), grid=_GRID
        )
        require(
            self.cache_memory != "shared" or (self.num_pages is None and self.num_slots is None),
            f"cache_memory='shared' with num_pages={self.num_pages}, num_slots={self.num_slots}: "
            "numbers split the memory; leave them out",
        )

    def step_tokens(self, most: int = 8192) -> int:
        """Returns the token budget of a step: as configured, or `most`, but at least one token for
        each sequence."""
        return self.max_num_batched_tokens or max(most, self.max_num_seqs)

    @property
    def overrides(self) -> dict[str, Any]:
        """`hf_overrides` as a JSON object."""
        found: dict[str, Any] = json.loads(self.hf_overrides or "{}")
        decode_floats(found)
        return found

    @property
    def has_tiers(self) -> bool:
        """Whether anything is kept outside device memory."""
        return self.cache_host_gib is not None or self.cache_dir is not None

    @property
    def flush_s(self) -> float:
        """Seconds that the engine may take to write when it is stopped."""
        return self.cache_flush_timeout_s if self.cache_dir is not None else 0.0

    @property
    def host_bytes(self) -> int:
        return int((self.cache_host_gib or 1.0) * 2**30)


def check_budget(*, max_num_seqs: int, max_num_batched_tokens: int, grid: int) -> None:
    """Raises ConfigError unless a step has enough tokens for a prefill chunk that ends on the grid,
    and for one token of each sequence. With fewer, some request could wait forever."""
    require(
        max_num_batched_tokens >= grid,
        f"max_num_batched_tokens={max_num_batched_tokens}: use {grid} or more, so that a "
        "prefill chunk can end where a state can be kept",
    )
    require(
        max_num_batched_tokens >= max_num_seqs,
        f"max_num_batched_tokens={max_num_batched_tokens} with max_num_seqs={max_num_seqs}: "
        "each sequence needs a token of a step; raise the first or lower the second",
    )


_GRID = grid_of(HYBRID)
"""Grid of most models. The scheduler checks again, with the model's own grid."""
_PAGE_SIZES = tuple(1 << k for k in range(4, 11))
