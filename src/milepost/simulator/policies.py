"""Policies to compare with: where states are kept and what is evicted first.

Most are a placement and a score for our own cache; everything else (pages, slots, matching, the
scheduler) is ours, so a comparison isolates the policy. `Pooled` ones bring a memory of their own,
under the same scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil

from milepost.cache import Cache, Kind, Mode
from milepost.cache.eviction import Score
from milepost.cache.memory import Split, Storage, fit
from milepost.cache.placement import Placement, PromptFacts, floor, place_align
from milepost.cache.tree import Chain, Checkpoint, End, Node
from milepost.scheduler.memory import PrefixMemory
from milepost.simulator.cost import CostModel
from milepost.simulator.one_pool import one_pool

INTERVAL = 8192


class Lru:
    """Least recently used goes first. `touches_path`: a use counts for every state above too."""

    __slots__ = ("_touches_path", "clock")

    def __init__(self, *, touches_path: bool = False) -> None:
        self.clock = 0
        self._touches_path = touches_path

    def arrive(self, chain: Chain, nodes: Sequence[Node], num_seen: int) -> End:  # noqa: ARG002
        return End(position=len(chain), time=self.clock)

    def begin(self, end: End) -> None:
        self.clock += 1
        end.time = self.clock

    def ended(self, end: End, node: Node, position: int) -> None:  # noqa: ARG002
        end.position = position

    def evicted(self, checkpoint: Checkpoint) -> None:
        pass

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        return None, self.of(checkpoint)

    def steady(self, checkpoint: Checkpoint) -> int:  # noqa: ARG002
        return 0

    def is_expected(self, checkpoint: Checkpoint, within: int) -> bool:  # noqa: ARG002
        return False

    def growth(self, within: int) -> float:  # noqa: ARG002
        return 0.0

    def of_page(self, checkpoint: Checkpoint, num_pages: int) -> float:  # noqa: ARG002
        return self.of(checkpoint)

    def of(self, checkpoint: Checkpoint) -> float:
        return checkpoint.end.time if self._touches_path else checkpoint.used_at

    def of_sparse(self, end: End, position: int, above: int) -> float:  # noqa: ARG002
        return self.clock + 1


class Capped(Lru):
    """LRU of what was used, where no path keeps more than `cap` states: the shallowest go first."""

    __slots__ = ("_cap",)

    def __init__(self, cap: int) -> None:
        super().__init__()
        self._cap = cap

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        """One for each: the order changes with what is below."""
        return checkpoint, 0

    def of(self, checkpoint: Checkpoint) -> float:
        below, here = 0, checkpoint.deeper
        while here is not None and below < self._cap:
            below, here = below + 1, here.deeper
        return checkpoint.used_at - (self.clock if below >= self._cap else 0)


class Efficiency(Lru):
    """Recency plus tokens saved for each byte, both as ranks from 0 to 1 (Marconi, MLSys 2025,
    section 4, from the description in the paper). The weight is learned there, by replaying a
    window of requests with each of a grid; here it is given, so that the best one bounds it.
    """

    __slots__ = ("_longest", "_weight")

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self._weight = weight
        self._longest = 1

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        """One for each: the order changes as time goes by."""
        return checkpoint, 0

    def of(self, checkpoint: Checkpoint) -> float:
        saved = checkpoint.replay_tokens
        self._longest = max(self._longest, saved)
        return checkpoint.used_at / (self.clock or 1) + self._weight * saved / self._longest


def ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """The prompt's end."""
    last = floor(facts.prompt_length - 1, facts.grid)
    return {last: Kind.PROMPT_END} if start < last <= end else {}


def forks_and_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Where a prompt leaves known KV, and its end."""
    found = ends(facts, start, end)
    found |= {p: Kind.BRANCH_POINT for p in facts.branch_points if start < p <= end}
    return dict(sorted(found.items()))


def intervals_too(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Every 8192 tokens, forks and the prompt's end."""
    first = floor(start, INTERVAL) + INTERVAL
    found = dict.fromkeys(range(first, end + 1, INTERVAL), Kind.BOUNDARY)
    return dict(sorted((found | forks_and_ends(facts, start, end)).items()))


def chunk_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """The end of each chunk, and of the prompt."""
    last = floor(min(end, facts.prompt_length - 1), facts.grid)
    return {last: Kind.BOUNDARY} if last > start else {}


def aligned_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """The last block boundary in the prompt, and in the KV that is known of it."""
    last = floor(facts.prompt_length - 1, facts.block_size)
    found = {last: Kind.PROMPT_END} | dict.fromkeys(facts.branch_points, Kind.BRANCH_POINT)
    return {p: found[p] for p in sorted(found) if start < p <= end}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """How to build a cache that follows it."""

    name: str
    about: str
    mode: Mode = "auto"
    block_size: int = 2048
    placement: Placement | None = None
    score: Callable[[], Score] | None = None
    shares_memory: bool = False
    """Whether the boundary between pages and slots moves."""
    state_share: float | None = None
    """Of the bytes of both, what slots have; None: what they are asked for with."""

    def memory(
        self, cost: CostModel, *, num_pages: int, num_slots: int, page_size: int
    ) -> PrefixMemory:
        """The cache, as the pooled policies' memory is asked for: where the boundary moves, the two
        numbers say the bytes.
        """
        page_bytes = page_size * cost.page_token_bytes
        num_bytes = cost.bytes_of(num_pages, num_slots, page_size)
        if self.state_share is not None:
            num_slots = int(num_bytes * self.state_share) // cost.state_bytes
            num_pages = (num_bytes - num_slots * cost.state_bytes) // page_bytes
        if not self.shares_memory:
            return self.cache(num_pages=num_pages, num_slots=num_slots, page_size=page_size)
        storage = fit(num_bytes, page_bytes=page_bytes, slot_bytes=cost.state_bytes)
        return self._cache(storage, page_size)

    def cache(self, *, num_pages: int, num_slots: int, page_size: int) -> Cache:
        """With so many of each."""
        return self._cache(Split(num_pages, num_slots), page_size)

    def _cache(self, storage: Storage, page_size: int) -> Cache:
        return Cache(
            storage=storage,
            page_size=page_size,
            grid=page_size,
            mode=self.mode,
            block_size=self.block_size,
            placement=self.placement,
            score=self.score() if self.score is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """States and KV in one pool of equal blocks. Needs time: without it KV is not limited."""

    name: str
    about: str
    block_size: int | None
    """None: what a third of a state takes, rounded up to a multiple of 64 tokens."""
    placement: Placement = place_align
    state_share: float = 1.0
    """What a state takes of a float32 one's bytes."""

    def memory(
        self, cost: CostModel, *, num_pages: int, num_slots: int, page_size: int
    ) -> PrefixMemory:
        """A pool of as many bytes as the pages and the slots together."""
        return one_pool(
            cost,
            num_pages=num_pages,
            num_slots=num_slots,
            page_size=page_size,
            block_size=self.block_size or self._third_of_a_state(cost),
            placement=self.placement,
            state_share=self.state_share,
        )

    def _third_of_a_state(self, cost: CostModel) -> int:
        tokens = int(cost.state_bytes * self.state_share) / 3 / cost.page_token_bytes
        return ceil(tokens / 64) * 64


AUTO = CachePolicy(
    name="auto", about="Milepost's, in one memory for pages and slots", shares_memory=True
)

POLICIES: dict[str, CachePolicy | Pooled] = {
    policy.name: policy
    for policy in (
        AUTO,
        CachePolicy(name="auto-split", about="the same with pages and slots apart"),
        CachePolicy(name="none", about="no reuse", mode="none"),
        Pooled(
            name="vllm",
            about="vLLM 0.33's defaults: retain with blocks of a third of a state",
            block_size=None,
            placement=aligned_ends,
        ),
        CachePolicy(
            name="sglang",
            about="SGLang 0.5.23's defaults: the end of each chunk; LRU, 47 % for states",
            placement=chunk_ends,
            score=lambda: Lru(touches_path=True),
            state_share=0.9 / 1.9,
        ),
        CachePolicy(
            name="align",
            about="the last multiple of 2048 in each chunk; LRU",
            mode="align",
            score=Lru,
        ),
        Pooled(
            name="align-1088",
            about="one pool of blocks of 1088 tokens; the last multiple in each chunk; LRU",
            block_size=1088,
        ),
        Pooled(
            name="retain-1088",
            about="one pool of blocks of 1088 tokens; the prompt's last multiple, forks; LRU",
            block_size=1088,
            placement=aligned_ends,
        ),
        Pooled(
            name="retain-576",
            about="the same with blocks of 576 tokens and states in half precision",
            block_size=576,
            placement=aligned_ends,
            state_share=0.5,
        ),
        CachePolicy(name="all", about="each multiple of 2048; LRU", mode="all", score=Lru),
        CachePolicy(
            name="interval-path",
            about="every 8192, forks, ends; LRU, a use touches the path",
            placement=intervals_too,
            score=lambda: Lru(touches_path=True),
        ),
        CachePolicy(
            name="interval",
            about="every 8192, forks, ends; LRU of what was used",
            placement=intervals_too,
            score=Lru,
        ),
        CachePolicy(
            name="interval-cap3",
            about="the same, at most 3 on a path",
            placement=intervals_too,
            score=lambda: Capped(3),
        ),
        CachePolicy(name="ends", about="the prompt's end; LRU", placement=ends, score=Lru),
        CachePolicy(
            name="forks-cap2",
            about="forks and ends; LRU, at most 2 on a path",
            placement=forks_and_ends,
            score=lambda: Capped(2),
        ),
        CachePolicy(
            name="efficiency",
            about="forks and ends; recency plus tokens saved per byte",
            placement=forks_and_ends,
            score=Efficiency,
        ),
        CachePolicy(
            name="efficiency-quarter",
            about="the same, savings weighing a quarter",
            placement=forks_and_ends,
            score=lambda: Efficiency(0.25),
        ),
        CachePolicy(
            name="efficiency-four",
            about="the same, savings weighing four times as much",
            placement=forks_and_ends,
            score=lambda: Efficiency(4.0),
        ),
    )
}
