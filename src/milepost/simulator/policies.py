"""Policies that a trace can be replayed with: Milepost's, and the defaults of vLLM and SGLang.

A policy is a placement, which says where states are saved, and a score, which says what is evicted
first. Milepost's own cache runs both, and the scheduler is always Milepost's, so a comparison
isolates the policy. vLLM's default needs a memory of its own (`simulator.vllm`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil

from milepost.cache import Cache, Kind, Mode
from milepost.cache.eviction import Score
from milepost.cache.memory import Split, Storage, fit
from milepost.cache.placement import Placement, PromptFacts, floor
from milepost.cache.tree import Chain, Checkpoint, End, Node
from milepost.scheduler.memory import PrefixMemory
from milepost.simulator.cost import CostModel
from milepost.simulator.vllm import OnePool


class Lru(Score):
    """Evicts the least recently used state first; a use counts for all states on its path."""

    def __init__(self) -> None:
        super().__init__(num_slots=1, grid=1)

    def arrive(self, chain: Chain, nodes: Sequence[Node], num_seen: int) -> End:  # noqa: ARG002
        return End(position=len(chain), time=self.clock)

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        return None, self.of(checkpoint)

    def steady(self, checkpoint: Checkpoint) -> int:  # noqa: ARG002
        return 0

    def is_expected(self, checkpoint: Checkpoint, within: int) -> bool:  # noqa: ARG002
        return False

    def of_page(self, checkpoint: Checkpoint, num_pages: int) -> float:  # noqa: ARG002
        return self.of(checkpoint)

    def of(self, checkpoint: Checkpoint) -> float:
        return checkpoint.end.time

    def of_sparse(self, end: End, position: int, above: int) -> float:  # noqa: ARG002
        return self.clock + 1


def chunk_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Places a state at the end of each chunk of a prompt."""
    last = floor(min(end, facts.prompt_length - 1), facts.grid)
    return {last: Kind.BOUNDARY} if last > start else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """A policy that Milepost's own cache runs."""

    name: str
    about: str
    mode: Mode = "auto"
    placement: Placement | None = None
    score: Callable[[], Score] | None = None
    shares_memory: bool = False
    """Whether the boundary between pages and slots moves."""
    state_share: float | None = None
    """Share of the bytes that slots have; by default the caller's number of slots."""

    def memory(
        self, cost: CostModel, *, num_pages: int, num_slots: int, page_size: int
    ) -> PrefixMemory:
        """Returns a cache with the bytes of the pages and slots, divided as the policy has it."""
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
        """Returns a cache with a pool of pages and a pool of slots."""
        return self._cache(Split(num_pages, num_slots), page_size)

    def _cache(self, storage: Storage, page_size: int) -> Cache:
        return Cache(
            storage=storage,
            page_size=page_size,
            grid=page_size,
            mode=self.mode,
            placement=self.placement,
            score=self.score() if self.score is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """vLLM's policy: states and KV in one pool of equal blocks, a third of a state each."""

    name: str
    about: str
    state_share: float = 1.0
    """Bytes of a state relative to a float32 one."""

    def memory(
        self, cost: CostModel, *, num_pages: int, num_slots: int, page_size: int
    ) -> PrefixMemory:
        """Returns a pool with the bytes of the pages and the slots together."""
        state_bytes = int(cost.state_bytes * self.state_share)
        block_size = ceil(state_bytes / 3 / cost.page_token_bytes / 64) * 64
        block_bytes = block_size * cost.page_token_bytes
        return OnePool(
            num_blocks=cost.bytes_of(num_pages, num_slots, page_size) // block_bytes,
            block_size=block_size,
            blocks_a_state=ceil(state_bytes / block_bytes),
            page_size=page_size,
        )


AUTO = CachePolicy(
    name="auto", about="Milepost's, in one memory for pages and slots", shares_memory=True
)

POLICIES: dict[str, CachePolicy | Pooled] = {
    policy.name: policy
    for policy in (
        AUTO,
        CachePolicy(name="auto-split", about="the same with pages and slots apart"),
        CachePolicy(name="none", about="no reuse", mode="none"),
        Pooled(name="vllm", about="vLLM 0.33's defaults: the last whole block, and forks; LRU"),
        CachePolicy(
            name="sglang",
            about="SGLang 0.5.23's defaults: the end of each chunk; LRU, 47 % for states",
            placement=chunk_ends,
            score=Lru,
            state_share=0.9 / 1.9,
        ),
    )
}
"""The policies of `milepost simulate`, by name."""
