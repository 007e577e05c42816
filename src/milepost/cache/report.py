"""Why prompt tokens were not reused, and the counters of a cache.

Invariant R1: reused + sum(lost) == prompt_tokens, for each request and for the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self


class Lost(StrEnum):
    """Reasons why prompt tokens were computed, in the order in which they apply after the reused
    part."""

    phrase: str
    """Why tokens were computed, in words that follow their number."""

    def __new__(cls, value: str, phrase: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.phrase = value, phrase
        return member

    DISABLED = "disabled", "with the cache off"
    """Prefix caching is off, for the engine or the request."""
    LATE_COPY = "late_copy", "whose copy came too late"
    """In a tier or on another engine, but the copy failed or would have come too late."""
    NOT_WORTH_LOADING = "not_worth_loading", "sooner computed than loaded"
    """In a tier, but computed sooner than loaded."""
    CHECKPOINT_EVICTED = "checkpoint_evicted", "whose state was evicted"
    """The state after these tokens was evicted, or had to make room for the request itself."""
    NO_CHECKPOINT = "no_checkpoint", "without a saved state"
    """Their KV is cached, but no state had been kept after them. One is kept from now on."""
    GRID = "grid", "after the last saved state"
    """Seen before, but after the last position at which a state is kept."""
    UNDER_PAGE = "under_page", "too few to fill a page"
    """Seen before, but less than a page, and too few tokens to keep a state for."""
    KV_EVICTED = "kv_evicted", "whose KV was evicted"
    """Their KV was cached but has been evicted."""
    NOT_CANONICAL = "not_canonical", "seen only in an answer"
    """Computed before, but only as an answer or at the end of a prompt, which leaves other bits
    than a prompt that goes on. Bitwise mode only."""
    UNSEEN = "unseen", "not seen before"
    """Not seen before under this salt."""
    LAST_TOKEN = "last_token", "needed to start the answer"
    """The whole prompt was seen, but the last token is always computed, for its logits."""


PLACES: Mapping[str, str] = {"host": "host memory", "disk": "disk"}
"""Source of loaded tokens -> its name in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Where a request's prompt tokens came from. The losses add up to what was not reused."""

    prompt_tokens: int
    """Length of the prompt."""
    kv_length: int
    """Number of tokens, from the start, whose KV was cached."""
    state_length: int
    """Position of the checkpoint that the request resumed from."""
    reused: int
    """Prompt tokens that were not computed again."""
    lost: dict[Lost, int]
    """Reason -> number of prompt tokens that were computed for it."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Source outside the device -> number of reused tokens that were loaded from it."""
    images: tuple[tuple[int, int], ...] = ()
    """First token and end of each image in the prompt."""

    def __post_init__(self) -> None:
        assert self.reused + sum(self.lost.values()) == self.prompt_tokens, (
            f"R1: reused {self.reused} + lost {self.lost} == prompt {self.prompt_tokens}"
        )

    @property
    def computed(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt_tokens - self.reused

    def hint(self, page_size: int) -> str | None:
        """Explains why a prompt under one page got nothing from a cache that is on; None for other
        prompts."""
        if self.reused or self.prompt_tokens >= page_size or Lost.DISABLED in self.lost:
            return None
        tokens = "token is" if self.prompt_tokens == 1 else "tokens are"
        return (
            f"{self.prompt_tokens} prompt {tokens} less than one page ({page_size}): "
            "a prompt this short is reused late or not at all"
        )

    @property
    def image_tokens(self) -> int:
        """Prompt tokens of images."""
        return sum(end - first for first, end in self.images)

    @property
    def image_tokens_reused(self) -> int:
        """Number of image tokens that were not computed again."""
        return sum(max(min(end, self.reused) - first, 0) for first, end in self.images)

    @property
    def images_reused(self) -> int:
        """Number of images that were not encoded, since all of their tokens were reused."""
        return sum(end <= self.reused for _, end in self.images)

    def with_loaded(self, position: int, loaded: Mapping[str, int]) -> CacheReport:
        """Returns the report after tokens up to `position` were loaded; `loaded` counts them by
        source."""
        assert sum(loaded.values()) <= position - self.reused, "R1: what is loaded was lost"
        return replace(
            self,
            state_length=position,
            reused=position,
            loaded=dict(loaded),
            lost=_without_first(self.lost, position - self.reused),
        )

    def with_lost(self, reason: Lost, end: int) -> CacheReport:
        """Returns the report with `reason` for the lost tokens up to position `end`."""
        num_tokens = min(end, self.prompt_tokens) - self.reused
        if num_tokens <= 0:
            return self
        return replace(self, lost={reason: num_tokens, **_without_first(self.lost, num_tokens)})

    def head(self) -> str:
        """Says how many tokens were reused, and how many of them were loaded from where."""
        head = f"{self.reused} of {self.prompt_tokens} prompt tokens from the cache"
        if self.loaded:
            head += f" ({self.origins(self.loaded)})"
        if self.images:
            head += f", with {self.images_reused} of {len(self.images)} images"
        return head

    @staticmethod
    def origins(loaded: Mapping[str, int]) -> str:
        """Returns the numbers by source in words, such as "1472 from host memory, 64 from disk"."""
        return ", ".join(f"{num} from {PLACES.get(place, place)}" for place, num in loaded.items())

    def reasons(self) -> list[str]:
        """Returns the losses in words, the largest first."""
        losses = sorted(self.lost.items(), key=lambda loss: -loss[1])
        return [f"{count} {Lost(reason).phrase}" for reason, count in losses if count]

    def __str__(self) -> str:
        """Returns one line, such as "1472 of 2200 prompt tokens from the cache;
        computed 728: ..."."""
        head = self.head()
        if not self.computed:
            return head
        return f"{head}; computed {self.computed}: {', '.join(self.reasons())}"


def _without_first(lost: Mapping[Lost, int], num_tokens: int) -> dict[Lost, int]:
    """Returns losses, in the prompt's order, without the first `num_tokens` tokens."""
    left = {}
    for reason, count in lost.items():
        taken = min(count, num_tokens)
        num_tokens -= taken
        if count > taken:
            left[reason] = count - taken
    return left


def explain(
    prompt_tokens: int, *, reused: int, kv_length: int, page_size: int, ends: Mapping[Lost, int]
) -> CacheReport:
    """Splits the tokens that were not reused by reason. The KV that is cached reaches to
    `kv_length` in full pages. `ends` are the positions up to which reasons apply, in this order;
    the first one that applies to a token counts. For a prompt under a page that found nothing,
    `GRID` stands for `UNDER_PAGE`.
    """
    is_under_page = reused == 0 and ends[Lost.GRID] < page_size
    lost: dict[Lost, int] = {}
    done = reused
    for reason, position in ends.items():
        end = min(position, prompt_tokens - 1)
        if end > done:
            name = Lost.UNDER_PAGE if reason is Lost.GRID and is_under_page else reason
            lost[name] = end - done
            done = end
    whole_prompt_seen = max(ends.values()) >= prompt_tokens
    lost[Lost.LAST_TOKEN if whole_prompt_seen else Lost.UNSEEN] = prompt_tokens - done
    return CacheReport(
        prompt_tokens=prompt_tokens,
        kv_length=kv_length,
        state_length=reused,
        reused=reused,
        lost=lost,
    )


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one cache since it was made."""

    image_tokens: int = 0
    """Image tokens among the queries."""
    image_tokens_reused: int = 0
    images_reused: int = 0
    """Images that were not encoded, since all of their tokens were reused."""
    queries: int = 0
    """Prompt tokens of admitted requests; each request counts once."""
    hits: int = 0
    """Prompt tokens among the queries that were reused."""
    lost: dict[Lost, int] = field(default_factory=lambda: dict.fromkeys(Lost, 0))
    loaded: dict[str, int] = field(default_factory=dict)
    """Source outside the device -> number of reused tokens that were loaded from it."""
    resumed_tokens: int = 0
    """Tokens of preempted requests that were admitted again."""
    resumed_hits: int = 0
    """Reused tokens among `resumed_tokens`."""
    checkpoints_made: int = 0
    checkpoints_used: int = 0
    """How often a request resumed from a checkpoint."""
    checkpoints_skipped: int = 0
    """States that were not kept, since there was no slot for them."""
    checkpoints_declined: int = 0
    """Sparse states that were not kept, since they were worth less than what they would
    displace."""
    checkpoints_evicted: dict[str, int] = field(default_factory=dict)
    """Counts by cause: slots, pages, reset."""
    checkpoints_evicted_unused: int = 0
    pages_evicted: int = 0
    pages_duplicate: int = 0
    """Pages that requests running side by side computed twice."""

    def admitted(self, report: CacheReport, *, first_time: bool) -> None:
        """Counts an admission. A preempted request that comes back is counted separately."""
        if not first_time:
            self.resumed_tokens += report.prompt_tokens
            self.resumed_hits += report.reused
            return
        self.queries += report.prompt_tokens
        self.hits += report.reused
        self.image_tokens += report.image_tokens
        self.image_tokens_reused += report.image_tokens_reused
        self.images_reused += report.images_reused
        for reason, num_tokens in report.lost.items():
            self.lost[reason] += num_tokens
        for source, num_tokens in report.loaded.items():
            self.loaded[source] = self.loaded.get(source, 0) + num_tokens

    @property
    def num_evicted(self) -> int:
        """Number of checkpoints evicted for any cause."""
        return sum(self.checkpoints_evicted.values())

    def evicted(self, cause: str, *, used: bool) -> None:
        self.checkpoints_evicted[cause] = self.checkpoints_evicted.get(cause, 0) + 1
        self.checkpoints_evicted_unused += not used
