"""Translates command lines of `vllm serve`, as people have them in scripts, to `milepost serve`.

Flags that mean the same have the same names in the configurations. Here are the others: those with
another name or another format of values, those that nothing here needs, which are ignored, and
those that would change what is served, which are refused with what to do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.server.config import ServerConfig


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHORT = {"-q": "--quantization", "-pp": "--pipeline-parallel-size", "-O": "--optimization-level"}
_SHORT |= {"-tp": "--tensor-parallel-size", "-sc": "--speculative-config"}
_SHORT |= {"-dp": "--data-parallel-size", "-ep": "--enable-expert-parallel"}
_SHORT |= {"-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size"}
_SHORT |= {"-cc": "--compilation-config", "-ac": "--attention-config"}
_SHORT |= {"-asc": "--api-server-count", "-n": "--nnodes", "-r": "--node-rank"}
_LEVEL = re.compile(r"-O\d")

_SAME = {
    "block-size": "page-size",
    "kv-offloading-size": "cache-host-gib",
    "shutdown-timeout": "shutdown-timeout-s",
    "disable-uvicorn-access-log": "no-access-log",
}
"""Other names for flags of ours."""

_VALUES: Mapping[str, Mapping[str, str | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "max-model-len": {"auto": None, "-1": None},
    "load-format": dict.fromkeys(("fastsafetensors", "instanttensor", "runai_streamer")),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "reasoning-parser": dict.fromkeys(("nano_v3", "super_v3"), "nemotron_v3"),
}
"""Other words for values; None is our default."""
_IN_THOUSANDS = ("max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")

_DROPPED = _names(
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
_DROPPED_WITH_VALUE = _names(
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
_ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {
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

_REFUSED: Mapping[str, tuple[int, str]] = {
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

_LISTS = _names(
    "served-model-name api-key cuda-graph-sizes cudagraph-capture-sizes ignore-patterns "
    "lora-modules disable-access-log-for-endpoints"
)
"""With any number of values."""
_SWITCHES = frozenset(
    field.name.replace("_", "-")
    for config in (ServerConfig, EngineConfig)
    for field in fields(config)
    if field.default is False
)
"""Flags of ours that are off by default, so that `--no-` before them asks for nothing."""

_SINGLE = {
    field.name.replace("_", "-"): 1 if str(field.type).startswith("bool") else 2
    for config in (ServerConfig, EngineConfig)
    for field in fields(config)
    if not str(field.type).startswith("Sequence")
}
"""Flags of ours that mean one thing, and how many words they take."""


def translated(arguments: Sequence[str]) -> list[str]:
    """The same in our flags; of one that is there several times the last, as argparse has it.
    Raises ConfigError for what is not supported."""
    found: list[str] = []
    objects: dict[str, dict[str, str]] = {}
    todo = list(reversed(arguments))
    names_model = any(token.partition("=")[0] == "--model" for token in arguments)
    while todo:
        token = todo.pop()
        name, sign, value = _split(token)
        if not name:
            found.append(token)
            continue
        if sign:
            todo.append(value)
        whole, _, key = name.partition(".")
        name = whole = whole.replace("_", "-")
        if key and whole in _DROPPED_WITH_VALUE:
            _value(todo, name)
        elif key:  # --speculative-config.method mtp
            objects.setdefault(whole, {})[key] = _value(todo, name)
        else:
            has_model = names_model or (bool(found) and not found[0].startswith("-"))
            found += _one(name, todo, has_model=has_model)
    found = _last_of_each(found)
    for name, parts in objects.items():
        found += [f"--{name}", json.dumps(_nested(name, parts))]
    return found


def _last_of_each(tokens: Sequence[str]) -> list[str]:
    flags: list[tuple[str, Sequence[str]]] = []
    while tokens:
        is_flag = tokens[0].startswith("-")
        name = full_name(tokens[0]).removeprefix("no-") if is_flag else ""
        num_words = _SINGLE.get(name, 1)
        flags.append((name if name in _SINGLE else "", tokens[:num_words]))
        tokens = tokens[num_words:]
    last = {name: place for place, (name, _) in enumerate(flags)}
    return [
        word
        for place, (name, words) in enumerate(flags)
        if not name or last[name] == place
        for word in words
    ]


def _nested(name: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """The object that `a.b` and its like are keys of, as the flag `name` has them."""
    found: dict[str, Any] = {}
    for path, part in parts.items():
        *outer, key = path.split(".")
        place = found
        for step in outer:
            inner = place.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--{name}.{path} {part}: {step} is {inner}, no object")
            place = inner
        if isinstance(place.get(key), dict):
            raise ConfigError(f"--{name}.{path} {part}: {key} is an object by what stands before")
        place[key] = _json(part)
    return found


def _split(token: str) -> tuple[str, str, str]:
    """Name without dashes, `=` if there is one, and what is behind it; no name if it is no flag."""
    if _LEVEL.fullmatch(token):
        return "optimization-level", "=", token[2:]
    name, sign, value = token.partition("=")
    short, dot, key = name.partition(".")
    name = _SHORT.get(short, short) + dot + key
    if not name.startswith("--") or len(name) == 2:
        return "", "", ""
    return name[2:], sign, value


def _one(name: str, todo: list[str], *, has_model: bool) -> list[str]:
    """One flag in our words; what follows it is taken from `todo`, whose end comes next."""
    positive = name.removeprefix("no-")
    if positive in _DROPPED or (positive != name and positive in _SWITCHES):
        return []
    if name in _DROPPED_WITH_VALUE:
        _values(todo, name)
        return []
    if name in _REFUSED:
        num_values, instead = _REFUSED[name]
        shown = _values(todo, name) if num_values else []
        raise ConfigError(f"{' '.join([f'--{name}', *shown])} is not supported: {instead}")
    if name in _ONLY:
        nothing, instead = _ONLY[name]
        value = _value(todo, name)
        if value.rpartition("/")[2] not in nothing:  # a plugin is named by its path
            raise ConfigError(f"--{name} {value} is not supported: {instead}")
        return []
    if name in ("served-model-name", "api-key") and has_model:
        return [part for value in _values(todo, name) for part in (f"--{name}", value)]
    if name == "hf-token" and (not todo or todo[-1].startswith("-")):
        return []  # then the one that `hf auth login` has left
    if name in _VALUES or name in _IN_THOUSANDS:
        own = _VALUES.get(name, {})
        value = _value(todo, name)
        said = own.get(value, _number(value) if name in _IN_THOUSANDS else value)
        return [] if said is None else [f"--{name}", said]
    return [f"--{_SAME.get(name, name)}"]


def _value(todo: list[str], name: str) -> str:
    if not todo:
        raise ConfigError(f"--{name}: a value is missing behind it")
    return todo.pop()


def _values(todo: list[str], name: str) -> list[str]:
    """One value; of a list those up to the next flag."""
    found = [_value(todo, name)]
    while name in _LISTS and todo and not todo[-1].startswith("-"):
        found.append(todo.pop())
    return found


def _number(text: str) -> str:
    """`32k` is 32000 and `32K` is 32768."""
    match = _NUMBER.fullmatch(text)
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else text


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def full_name(flag: str) -> str:
    """A flag's name in our words, without dashes before it."""
    name = _SHORT.get(flag, flag).lstrip("-").replace("_", "-")
    return _SAME.get(name, name)


def known() -> Iterable[str]:
    """All flags that are taken out, renamed or refused here."""
    return (*_SAME, *_DROPPED, *_DROPPED_WITH_VALUE, *_ONLY, *_REFUSED)
