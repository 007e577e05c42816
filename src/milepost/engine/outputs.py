"""What a caller gets back, as vLLM users know it, and where each prompt token came from.

Plain values: no tokenizer, no torch. The reasons for which tokens were lost are the cache's; here
they are keys, and one table says them in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]

PHRASES: Mapping[str, str] = {
    "unseen": "not seen before",
    "no_checkpoint": "without a saved state",
    "checkpoint_evicted": "whose state was evicted",
    "kv_evicted": "whose KV was evicted",
    "grid": "beyond the 64-token grid",
    "salt": "cached under another salt",
    "last_token": "needed to start the answer",
    "disabled": "with the cache off",
}
"""After a number of tokens: why they were computed. Other reasons are shown as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Where a request's prompt tokens came from; the losses add up to what was not reused."""

    prompt_tokens: int
    kv_length: int
    """Tokens whose KV was in the cache, counted from the start."""
    state_length: int
    """Position of the checkpoint that the request resumed from."""
    reused: int
    """Prompt tokens that were not computed again."""
    lost: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were computed, by reason."""

    def __post_init__(self) -> None:
        accounted = self.reused + sum(self.lost.values())
        assert accounted == self.prompt_tokens, (
            f"every prompt token is reused or lost for a reason: {self.reused} + {self.lost} "
            f"is not {self.prompt_tokens}"
        )

    @property
    def computed(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt_tokens - self.reused

    def summary(self) -> str:
        """One line, such as "1472 of 2200 prompt tokens from the cache; computed 728: ..."."""
        head = f"{self.reused} of {self.prompt_tokens} prompt tokens from the cache"
        if not self.computed:
            return head
        return f"{head}; computed {self.computed}: {', '.join(self.reasons())}"

    def reasons(self) -> list[str]:
        """The losses in words, the largest first."""
        losses = sorted(self.lost.items(), key=lambda loss: -loss[1])
        return [f"{count} {PHRASES.get(reason, reason)}" for reason, count in losses if count]

    def __str__(self) -> str:
        return self.summary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely one token was."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None = None
    """None without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt, so far."""

    index: int
    """Which of the request's n answers this is."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, if they were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, the token itself and the likeliest others, if they were asked for."""
    finish_reason: FinishReason | None = None
    """`stop`: the model or a stop condition ended it; `length`: max_tokens or max_model_len."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""

    @property
    def finished(self) -> bool:
        """Whether this answer grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, so far."""

    request_id: str
    prompt: str | None
    """None if the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that came from the cache."""
    cache_report: CacheReport | None = None
    """None until the request was admitted."""


def token_logprobs(
    token_id: int,
    logprob: float,
    rank: int | None,
    top_logprobs: Mapping[int, float],
    decoded: Mapping[int, str] | None = None,
) -> dict[int, Logprob]:
    """One token's entry of `CompletionOutput.logprobs`: the chosen token first, then the likeliest.

    `decoded` holds the text of each id that has one.
    """
    texts = decoded or {}
    entry = {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=texts.get(token_id))}
    for place, (other, value) in enumerate(top_logprobs.items(), start=1):
        if other != token_id:
            entry[other] = Logprob(logprob=value, rank=place, decoded_token=texts.get(other))
    return entry
