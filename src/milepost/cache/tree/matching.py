"""Finds how much of a prompt is cached, and explains why the rest is not. Read-only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.cache.placement import floor, gives_up_too_much
from milepost.cache.report import CacheReport, Lost, explain
from milepost.cache.tree.chain import Chain, common_tokens
from milepost.cache.tree.index import Tree
from milepost.cache.tree.kinds import CacheConfig
from milepost.cache.tree.nodes import Checkpoint
from milepost.cache.tree.path import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The cached part of a prompt. Valid until the cache next changes."""

    path: Path
    checkpoint: Checkpoint | None
    branch_points: tuple[int, ...]
    """Positions whose KV is cached but whose state is not; it will be kept."""
    num_seen: int
    """Number of the prompt's pages that are cached or were evicted."""
    report: CacheReport
    version: int
    state_length: int
    """The position to resume from. In models with states in slots it is the checkpoint's."""

    @property
    def kv_length(self) -> int:
        return self.path.kv_length

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of the checkpoint to resume from, if there is one."""
        return (self.checkpoint.slot,) if self.checkpoint is not None else ()

    @property
    def tail(self) -> tuple[int, ...]:
        """The checkpoint's tail page, if it has one."""
        return self.checkpoint.tail_pages if self.checkpoint is not None else ()


class Finder:
    """Looks prompts up in `tree`. If caching is off, it never finds anything."""

    def __init__(self, tree: Tree, config: CacheConfig) -> None:
        self._tree = tree
        self._config = config

    def find(self, chain: Chain, limit: int | None, version: int) -> Match:
        """Finds the cached part of a prompt. `version` is the cache's current version.

        If the prompt's digests are known, this costs the logarithm of its pages, plus the resident
        pages after the state to resume from, plus the evicted pages that are remembered.
        """
        last = chain.last_resume
        limit = last if limit is None else min(limit, last)
        path = Path(chain, self._tree.deepest(chain))
        position, checkpoint = self._resume(path, limit)
        # With a lower limit, a deeper state must make room for the request itself.
        deepest = position if limit == last else self._resume(path, last)[0]
        resident = path.kv_length + self._tokens_past_nodes(path)
        num_seen = self._tree.num_seen(chain, path.num_pages) if self._config.enabled else 0
        branch_points = self._branch_points(min(resident, last), position)
        size = self._config.page_size
        report = explain(
            len(chain),
            reused=position,
            kv_length=path.kv_length,
            page_size=size,
            ends={
                Lost.CHECKPOINT_EVICTED: max(path.evicted_position(position), deepest),
                Lost.NO_CHECKPOINT: self._last_place(resident, position, branch_points),
                Lost.GRID: max(resident, position),
                Lost.KV_EVICTED: num_seen * size,
                Lost.NOT_CANONICAL: self._tree.num_answered(chain, num_seen) * size,
            },
        )
        if chain.pictures:
            spans = tuple((each.offset, each.end) for each in chain.pictures)
            report = replace(report, images=spans)
        if not self._config.enabled:
            report = report.with_lost(Lost.DISABLED, len(chain))
        return Match(
            path=path,
            checkpoint=checkpoint,
            state_length=position,
            branch_points=branch_points,
            num_seen=num_seen,
            report=report,
            version=version,
        )

    def _resume(self, path: Path, limit: int) -> tuple[int, Checkpoint | None]:
        """Returns the largest position up to `limit` at which all layers can resume, and the
        checkpoint there. Without states in slots, any position with KV will do."""
        step = self._config.resume_step
        if not self._config.slots_each:
            return floor(min(limit, path.kv_length), step), None
        checkpoint = path.deepest_checkpoint(limit)
        while checkpoint is not None and checkpoint.position % step:
            checkpoint = path.deepest_checkpoint(checkpoint.position - 1)
        return (checkpoint.position, checkpoint) if checkpoint is not None else (0, None)

    def _branch_points(self, shared: int, position: int) -> tuple[int, ...]:
        """Returns where to keep states for the prefix that is shared with others beyond the last
        state: at its last grid position, and also at its very end if the grid would give up too
        much of it."""
        if not self._config.slots_each:
            return ()
        on_grid = floor(shared, self._config.grid)
        found = (on_grid,) if on_grid > position else ()
        most = self._config.max_rounded_off
        is_short = gives_up_too_much(shared, max(on_grid, position), most)
        return (*found, shared) if is_short else found

    def _last_place(self, resident: int, reused: int, branch_points: tuple[int, ...]) -> int:
        """Returns the last position within `resident` tokens at which a state is kept."""
        if not self._config.slots_each:  # each resident page has its state beside it
            return reused
        kept = branch_points if self._config.mode == "auto" else ()
        return max(floor(resident, self._config.grid), *kept, 0)

    def _tokens_past_nodes(self, path: Path) -> int:
        """Returns the number of tokens after the last matching page that agree with a known page or
        tail."""
        start, end = path.kv_length, path.kv_length + self._config.page_size
        rest = path.chain.content(start, end)
        known = [checkpoint.tail for checkpoint in path.end.newest()]
        known += [child.content for child in path.end.alike(rest)]
        return max((common_tokens(rest, tokens) for tokens in known), default=0)
