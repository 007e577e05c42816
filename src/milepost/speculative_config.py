"""The configuration of speculative decoding: vLLM's `--speculative-config`.

Names are vLLM's where the meaning is the same. Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from milepost.checks import is_number, read_json, read_mapping, require

METHODS = ("auto", "mtp", "suffix", "ngram")
_MTP_ALIASES = ("qwen3_next_mtp", "qwen3_5_mtp", "nemotron_h_mtp")
_UNSUPPORTED = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "ngram_gpu", "dflash")
_DEFAULT_TOKENS = {"auto": 3, "mtp": 3, "suffix": 8}
MOST_TOKENS = 32
"""Largest number of drafts per step: each draft's record takes memory for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding. Raises ConfigError for values that no model could use."""

    method: str | tuple[str, ...] = "auto"
    """`mtp` (the checkpoint's own head), `suffix` (the text of the request and of earlier answers
    under the same prefix), `ngram` (the text of the request), or a list: the first with drafts is
    used. `auto` is `mtp` if the checkpoint has a usable head, else nothing."""
    num_speculative_tokens: int | None = None
    """Largest number of drafts of one step; by default 3 with `mtp` and `auto`, else 8. `ngram`
    alone has no default, as in vLLM."""
    prompt_lookup_max: int | None = None
    """Largest number of tokens that `ngram` looks up; by default 5, or `prompt_lookup_min` if that
    is set."""
    prompt_lookup_min: int | None = None
    """Fewest tokens that `ngram` looks up; by default 5, or `prompt_lookup_max` if that is set."""
    suffix_decoding_max_tree_depth: int = 24
    """Largest number of tokens that `suffix` compares."""
    suffix_decoding_max_cached_requests: int = 10000
    """Number of earlier answers that `suffix` keeps; 0 for none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Number of drafts that `suffix` makes per matched token."""
    suffix_decoding_min_token_prob: float = 0.1
    """Lowest probability of a draft of `suffix`, judging by earlier texts: a less likely token ends
    the drafts."""
    adaptive: bool = True
    """Draft only as many tokens as pay, judging by step times and acceptance, or none. If false,
    always draft as many as possible."""
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    """`synthetic` accepts drafts at given rates, whatever they are: answers are then wrong. For
    benchmarks."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """One rate per draft: how often it and all drafts before it are accepted. No rate may exceed
    the one before."""

    def __post_init__(self) -> None:
        method = self.method
        named = (method,) if isinstance(method, str) else tuple(method)
        methods = tuple("mtp" if name in _MTP_ALIASES else name for name in named)
        object.__setattr__(self, "method", methods[0] if len(methods) == 1 else methods)
        self._check_methods(methods)
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            require(
                value is None or (is_number(value) and value >= lowest),
                f"{name}={value!r}: use {lowest} or more",
            )
        self._check_lookup()
        require(isinstance(self.adaptive, bool), f"adaptive={self.adaptive!r}: use true or false")
        number = self.num_speculative_tokens
        require(
            number is not None or "ngram" not in methods or len(methods) > 1,
            "num_speculative_tokens must be provided with method='ngram'",
        )
        require(
            number is None or (isinstance(number, int) and number <= MOST_TOKENS),
            f"num_speculative_tokens={number!r}: use {MOST_TOKENS} or fewer",
        )
        self._check_rates()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in the order in which they are asked."""
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def num_tokens(self) -> int:
        """Largest number of drafts of one step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return min(_DEFAULT_TOKENS.get(method, MOST_TOKENS) for method in self.methods)

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that `ngram` looks up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or 5, high or low or 5

    def _check_methods(self, methods: Sequence[str]) -> None:
        require(bool(methods), "method=[]: name at least one")
        for name in methods:
            known = name in METHODS
            why = "not supported here, " if name in _UNSUPPORTED else ""
            require(known, f"method={name!r}: {why}use one of {', '.join(METHODS)}")
        require(len(set(methods)) == len(methods), f"method={list(methods)}: name each once")
        require("auto" not in methods or len(methods) == 1, "method='auto' stands alone")

    def _check_lookup(self) -> None:
        low, high = self.lookup
        require(low <= high, f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")

    def _check_rates(self) -> None:
        choices = ("standard", "synthetic")
        sampling, rates = self.rejection_sample_method, self.synthetic_acceptance_rates
        require(
            sampling in choices,
            f"rejection_sample_method={sampling!r}: use one of {', '.join(choices)}; drafts are "
            "accepted where they are what would have been sampled",
        )
        if rates is not None:
            rates = tuple(rates)
            object.__setattr__(self, "synthetic_acceptance_rates", rates)
        require(
            (rates is not None) == (sampling == "synthetic"),
            "synthetic_acceptance_rates goes with rejection_sample_method='synthetic'",
        )
        if rates is None:
            return
        require(
            len(rates) == self.num_tokens,
            f"synthetic_acceptance_rates={list(rates)}: name {self.num_tokens}, one a draft",
        )
        falls = all(1 >= a >= b >= 0 for a, b in zip((1.0, *rates), rates, strict=False))
        require(falls, f"synthetic_acceptance_rates={list(rates)}: from 1 to 0, none rising")


_LOWEST = {
    "num_speculative_tokens": 1,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
    "suffix_decoding_max_tree_depth": 1,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 0,
    "suffix_decoding_min_token_prob": 0,
}
_IGNORED = {"model": None, "draft_tensor_parallel_size": 1, "draft_sample_method": "greedy"}
"""Fields of vLLM's own command lines, with the only value that is accepted because it has no effect
here."""
_DROPPED = (
    "attention_backend",
    "disable_by_batch_size",
    "disable_padded_drafter_batch",
    "enforce_eager",
    "moe_backend",
    "use_local_argmax_reduction",
)
"""Fields of vLLM that are ignored with any value: they never change an answer, only how drafts are
made and when they do not pay."""


def read_speculative_config(value: object) -> SpeculativeConfig | None:
    """Reads a configuration, a mapping or its JSON. Raises ConfigError."""
    setting = "speculative_config"
    if isinstance(value, SpeculativeConfig):
        return value
    given = read_mapping(setting, value)
    if given is None:
        return None
    for name, only in _IGNORED.items():
        asked = given.get(name, only)
        require(asked == only, f"{setting}: {name}={asked!r}: not supported here, leave it out")
    kept = {name: given[name] for name in given if name not in (*_DROPPED, *_IGNORED)}
    return read_json(setting, SpeculativeConfig, kept)
