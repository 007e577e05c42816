"""What vLLM's names are here: for command lines of `vllm serve` (`cli.vllm_flags`) and for the
arguments of its `LLM`.

Names stand as flags do, with `-` and without dashes before them. Those that mean the same stand in
the configurations alone. Here are the others: those that have another name or write their values
otherwise, those that nothing here needs, which are dropped, and those that would change what is
served, which are refused with what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from milepost.errors import ConfigError


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


SAME = {
    "block-size": "page-size",
    "kv-offloading-size": "cache-host-gib",
    "shutdown-timeout": "shutdown-timeout-s",
    "disable-uvicorn-access-log": "no-access-log",
}
"""Other names for flags of ours."""

VALUES: Mapping[str, Mapping[str, str | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "max-model-len": {"auto": None, "-1": None},
    "load-format": dict.fromkeys(("fastsafetensors", "instanttensor", "runai_streamer")),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "reasoning-parser": dict.fromkeys(("nano_v3", "super_v3"), "nemotron_v3"),
}
"""Other words for values; None is our default."""
IN_THOUSANDS = ("max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")

DROPPED = names(
    "trust-remote-code enable-auto-tool-choice enable-prompt-tokens-details enable-chunked-prefill "
    "enable-log-requests disable-log-requests enable-server-load-tracking enable-reasoning "
    "language-model-only disable-custom-all-reduce disable-frontend-multiprocessing "
    "disable-hybrid-kv-cache-manager disable-cascade-attn enable-eplb enable-dbo numa-bind "
    "use-v2-block-manager multi-step-stream-outputs worker-use-ray engine-use-ray "
    "enable-mfu-metrics disable-mm-preprocessor-cache "
    "enable-flashinfer-autotune skip-mm-profiling use-tqdm-on-load disable-chunked-mm-input "
    "interleave-mm-strings kv-cache-metrics cudagraph-metrics enable-layerwise-nvtx-tracing "
    "scheduler-reserve-full-isl enable-ep-weight-filter aggregate-engine-logging "
    "disable-nccl-for-dp-synchronization enable-offline-docs fail-on-environ-validation "
    "log-error-stack disable-async-output-proc enable-flash-late-interaction enable-elastic-ep "
    "kv-sharing-fast-prefill fully-sharded-loras allow-deprecated-quantization "
    "ray-workers-use-nsight cohere-is-reasoning-model enable-log-deltas"
)
"""Without a value."""
DROPPED_WITH_VALUE = names(
    "uvicorn-log-level tokenizer-mode swap-space max-num-partial-prefills limit-mm-per-prompt "
    "max-long-partial-prefills long-prefill-token-threshold distributed-executor-backend "
    "chat-template-content-format mm-processor-kwargs mm-processor-cache-gb mm-encoder-tp-mode "
    "compilation-config optimization-level attention-backend moe-backend all2all-backend "
    "max-seq-len-to-capture max-context-len-to-capture cuda-graph-sizes cudagraph-capture-sizes "
    "api-server-count max-log-len guided-decoding-backend structured-outputs-config "
    "prefix-caching-hash-algo num-scheduler-steps num-lookahead-slots preemption-mode "
    "stream-interval code-revision model-loader-extra-config max-parallel-loading-workers "
    "safetensors-load-strategy ignore-patterns h11-max-incomplete-event-size "
    "h11-max-header-count show-hidden-metrics-for-version performance-mode "
    "disable-access-log-for-endpoints master-addr master-port mamba-backend mamba-ssu-algorithm "
    "gdn-prefill-backend linear-backend attention-config kernel-config mm-processor-cache-type "
    "mm-encoder-attn-backend mm-shm-cache-max-object-size-mb max-cudagraph-capture-size "
    "renderer-num-workers ubatch-size numa-bind-nodes additional-config media-io-kwargs "
    "video-pruning-rate kda-prefill-backend expert-placement-strategy eplb-config "
    "kv-cache-metrics-sample distributed-timeout-seconds cp-kv-cache-interleave-size "
    "tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config scheduler-delay-factor "
    "data-parallel-supervisor-port data-parallel-rpc-port dp-supervisor-probe-interval-s "
    "dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold cohere-format "
    "prefill-schedule-interval"
)

_ROUTER = "run one server for each GPU behind a router, or on Ray Serve (docs/disaggregation.md)"
_TEXT = "only text generation is served"
_MERGE = "merge the adapter into the weights"
_OVERRIDE = "use --hf-overrides, with rope_parameters"
_DRAFTS = "use --speculative-config, a JSON object"
_COPY = "edit config.json in a copy of the checkpoint, and serve that folder"
_ONE_MACHINE = "a server runs on one machine"
_TOOL_PLUGINS = (
    tuple(f"nemotron_toolcall_parser_{how}streaming.py" for how in ("", "no_")),
    "--tool-call-parser lists the formats that there are",
)
_REASONING_PLUGINS = (
    ("nano_v3_reasoning_parser.py", "super_v3_reasoning_parser.py"),
    "--reasoning-parser lists the formats that there are",
)
"""Files that come with checkpoints whose formats we know."""
ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "pipeline-parallel-size": (("1",), "use --tensor-parallel-size"),
    "data-parallel-size": (("1",), _ROUTER),
    "data-parallel-size-local": (("1",), _ROUTER),
    "decode-context-parallel-size": (("1",), "use --tensor-parallel-size"),
    "prefill-context-parallel-size": (("1",), "use --tensor-parallel-size"),
    "nnodes": (("1",), _ONE_MACHINE),
    "node-rank": (("0",), _ONE_MACHINE),
    "data-parallel-start-rank": (("0",), _ROUTER),
    "config-format": (("auto", "hf"), "checkpoints are in Hugging Face's format"),
    "fingerprint-mode": (("none",), "responses have no system_fingerprint"),
    "offload-backend": (("auto",), "weights stay on the GPU"),
    "task": (("auto", "generate"), _TEXT),
    "runner": (("auto", "generate"), _TEXT),
    "convert": (("auto", "none"), _TEXT),
    "model-impl": (("auto", "vllm"), "see README.md for the models that are supported"),
    "cpu-offload-gb": (
        ("0",),
        "weights stay on the GPU: use --quantization fp8, or --tensor-parallel-size for more GPUs",
    ),
    "response-role": (("assistant",), "answers have the role assistant"),
    "logprobs-mode": (
        ("raw_logprobs",),
        "logprobs are those of the model, before penalties and temperature",
    ),
    "max-logprobs": (("20",), "a request may ask for 20 at most"),
    "mamba-cache-dtype": (("auto",), "use --mamba-ssm-cache-dtype"),
    "kv-offloading-backend": (("native",), "use --cache-host-gib"),
    "ssl-cert-reqs": (("0",), "--ssl-ca-certs makes clients' certificates required"),
    **dict.fromkeys(("tool-parser-plugin", "tool-call-parser-plugin"), _TOOL_PLUGINS),
    "reasoning-parser-plugin": _REASONING_PLUGINS,
}
"""Which values ask for nothing; what to do instead of others."""

REFUSED: Mapping[str, tuple[int, str]] = {
    "enable-lora": (0, _MERGE),
    "lora-modules": (1, _MERGE),
    "max-loras": (1, _MERGE),
    "max-lora-rank": (1, _MERGE),
    "max-cpu-loras": (1, _MERGE),
    "lora-dtype": (1, _MERGE),
    "enable-lora-bias": (0, _MERGE),
    "default-mm-loras": (1, _MERGE),
    "speculative-model": (1, _DRAFTS),
    "num-speculative-tokens": (1, _DRAFTS),
    "spec-method": (1, _DRAFTS),
    "spec-model": (1, _DRAFTS),
    "spec-tokens": (1, _DRAFTS),
    "rope-scaling": (1, _OVERRIDE),
    "rope-theta": (1, _OVERRIDE),
    "hf-config-path": (1, _COPY),
    "disable-sliding-window": (0, "leave it out"),
    "headless": (0, _ONE_MACHINE),
    "data-parallel-rank": (1, _ROUTER),
    "data-parallel-address": (1, _ROUTER),
    "data-parallel-backend": (1, _ROUTER),
    "data-parallel-hybrid-lb": (0, _ROUTER),
    "data-parallel-external-lb": (0, _ROUTER),
    "tokenizer-revision": (1, "use --tokenizer with a folder"),
    "num-gpu-blocks-override": (1, "use --num-pages, which counts pages of --page-size tokens"),
    "calculate-kv-scales": (0, "the scales are the checkpoint's, or 1"),
    "log-config-file": (1, "logs go to standard error; see --verbose and --no-access-log"),
    "enable-log-outputs": (0, "answers are never logged"),
    "middleware": (1, "put a proxy in front of the server"),
    "otlp-traces-endpoint": (1, "see /metrics and the access log, which has a line per request"),
    "collect-detailed-traces": (1, "see /metrics and the access log"),
    "disable-fastapi-docs": (0, "use --api-key: /docs is behind it"),
    "enable-ssl-refresh": (0, "restart the server for a new certificate"),
    "return-tokens-as-token-ids": (0, "set return_tokens_as_token_ids in requests"),
    "trust-request-chat-template": (0, "use --chat-template: requests cannot bring one"),
    "enable-mamba-cache-stochastic-rounding": (0, "states are rounded to the nearest value"),
    "mamba-cache-philox-rounds": (1, "states are rounded to the nearest value"),
    "logits-processors": (1, "leave it out"),
    "logits-processor-pattern": (1, "leave it out"),
    "io-processor-plugin": (1, "leave it out"),
    "profiler-config": (1, "see bench/profile_step.py"),
    "model-class-overrides": (1, "leave it out"),
    "weight-transfer-config": (1, "restart the server for new weights"),
    "ec-transfer-config": (1, _TEXT),
    "pooler-config": (1, _TEXT),
    "override-pooler-config": (1, _TEXT),
    "enable-return-routed-experts": (0, "leave it out"),
    "kv-cache-dtype-skip-layers": (1, "--kv-cache-dtype is that of all layers"),
    "reasoning-config": (1, "leave it out: thinking_token_budget needs none"),
    "tool-server": (1, "clients run the tools"),
    "tokens-only": (0, "see --skip-tokenizer-init"),
    "grpc": (0, "only HTTP is served"),
    "ssl-ciphers": (1, "put a proxy in front of the server"),
    "enable-per-request-metrics": (0, "see /metrics and the access log"),
    "enable-tokenizer-info-endpoint": (0, "see the checkpoint's tokenizer_config.json"),
    "fingerprint-value": (1, "responses have no system_fingerprint"),
    "scheduler-cls": (1, "leave it out"),
    "worker-cls": (1, "leave it out"),
    "worker-extension-cls": (1, "leave it out"),
    "allowed-local-media-path": (1, _TEXT),
}
"""How many values each has, and what to do instead."""


def number(text: str) -> str:
    """`32k` is 32000 and `32K` is 32768."""
    match = _NUMBER.fullmatch(text)
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else text


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` as ours; those that ask for nothing are left out. Raises
    ConfigError for what is not supported."""
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = given.replace("_", "-")
        if name in DROPPED or name in DROPPED_WITH_VALUE or _asks_for_nothing(name, value):
            continue
        if name in REFUSED or name in ONLY:
            instead = (REFUSED.get(name) or ONLY[name])[1]
            raise ConfigError(f"{given}={value!r} is not supported: {_FLAG.sub(_option, instead)}")
        # A torch.dtype calls itself by its library's name, too.
        said = str(value).removeprefix("torch.")
        words = VALUES.get(name, {})
        if said in words and words[said] is None:
            continue
        if name == "dtype":
            value = words.get(said, said)
        elif isinstance(value, str):
            value = words.get(value, value)
            shown = number(value) if name in IN_THOUSANDS else ""
            value = int(shown) if shown.isdecimal() else value
        found[SAME.get(name, name).replace("-", "_")] = value
    return found


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


def _option(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")


def _asks_for_nothing(name: str, value: object) -> bool:
    """Whether a setting that is not supported has a value that changes nothing."""
    if name in REFUSED:
        return value is None or value is False
    return name in ONLY and (value is None or str(value).removesuffix(".0") in ONLY[name][0])
