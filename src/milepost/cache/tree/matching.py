"""Finds how much of a prompt is cached, and says why the rest is lost. Read-only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from milepost.cache.placement import floor, gives_up_too_much
from milepost.cache.report import CacheReport, Lost, explain
from milepost.cache.tree.chain import Chain, common_tokens
from milepost.cache.tree.index import Tree
from milepost.cache.tree.kinds import CacheConfig, longest_usable
from milepost.cache.tree.links import MAX_TAILS_COMPARED
from milepost.cache.tree.nodes import Checkpoint, Node
from milepost.cache.tree.path import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Cached part of a prompt. Valid until the cache next changes."""

    path: Path
    checkpoint: Checkpoint | None
    branch_points: tuple[int, ...]
    """Positions that lack a state although their KV is there."""
    num_seen: int
    """Number of the prompt's pages that are resident or were evicted."""
    report: CacheReport
    version: int
    state_length: int
    """The position to resume from: the checkpoint's, if the model has states in slots."""

    @property
    def kv_length(self) -> int:
        return self.path.kv_length

    @property
    def slots(self) -> tuple[int, ...]:
        """Slot of the checkpoint to resume from, if there is one."""
        return (self.checkpoint.slot,) if self.checkpoint is not None else ()

    @property
    def tail(self) -> tuple[int, ...]:
        """The page of that checkpoint's last tokens, if it has one."""
        page = self.checkpoint.tail_page if self.checkpoint is not None else None
        return (page,) if page is not None else ()


class Finder:
    """Looks prompts up in `tree`. Where nothing is cached, nothing is ever found."""

    def __init__(self, tree: Tree, config: CacheConfig) -> None:
        self._tree = tree
        self._config = config
        self._last_walk: tuple[object, Node | None] = (None, None)

    def find(self, chain: Chain, limit: int | None, version: int) -> Match:
        """Find the cached part of a prompt, in a cache of this version.

        Where the prompt's digests are known, costs the logarithm of its pages, the resident pages
        after the state that it resumes from, and the evicted ones that are remembered.
        """
        last = chain.last_resume
        limit = last if limit is None else min(limit, last)
        path = self._path(chain, version)
        position = longest_usable(self._config.kinds, path, limit)
        resident = path.kv_length + self._tokens_past_nodes(path)
        num_seen = self._tree.num_seen(chain, path.num_pages) if self._config.enabled else 0
        has_state = position > 0 and self._config.slots_each > 0
        branch_points = self._branch_points(min(resident, last), position)
        return Match(
            path=path,
            checkpoint=path.deepest_checkpoint(position) if has_state else None,
            state_length=position,
            branch_points=branch_points,
            num_seen=num_seen,
            report=self._report(path, position, resident, num_seen, limit, branch_points),
            version=version,
        )

    def _branch_points(self, shared: int, position: int) -> tuple[int, ...]:
        """Finds where to keep states for what is shared with others and not covered by a state: on
        the grid, and at its very end where the grid would give up too much of it.
        """
        if not self._config.slots_each:
            return ()
        on_grid = floor(shared, self._config.grid)
        found = (on_grid,) if on_grid > position else ()
        most = self._config.max_rounded_off
        is_short = gives_up_too_much(shared, max(on_grid, position), most)
        return (*found, shared) if is_short else found

    def _path(self, chain: Chain, version: int) -> Path:
        """A prompt that arrives is looked up twice, most often in one state of the cache: its walk
        over hundreds of pages is kept.
        """
        moment = (chain, len(chain), version)
        if self._last_walk[0] != moment:
            self._last_walk = (moment, self._tree.deepest(chain))
        return Path(chain, self._last_walk[1])

    def _last_place(self, resident: int, reused: int, branch_points: tuple[int, ...]) -> int:
        """The last position in `resident` tokens at which a state is kept."""
        if not self._config.slots_each:  # beside a page that is there lies its state
            return reused
        kept = branch_points if self._config.mode == "auto" else ()
        return max(floor(resident, self._config.grid), *kept, 0)

    def _report(
        self,
        path: Path,
        reused: int,
        resident: int,
        num_seen: int,
        limit: int,
        branch_points: tuple[int, ...],
    ) -> CacheReport:
        num_tokens, last = len(path.chain), path.chain.last_resume
        num_given_up = path.evicted_position(reused)
        if limit < last:  # a deeper state has to give way to the request itself
            num_given_up = max(num_given_up, longest_usable(self._config.kinds, path, last))
        report = explain(
            num_tokens,
            reused=reused,
            kv_length=path.kv_length,
            checkpoint_evicted=num_given_up,
            last_place=self._last_place(resident, reused, branch_points),
            resident=max(resident, reused),
            evicted=num_seen * self._config.page_size,
            page_size=self._config.page_size,
            answered=self._tree.num_answered(path.chain, num_seen) * self._config.page_size,
        )
        if path.chain.pictures:
            spans = tuple((each.offset, each.end) for each in path.chain.pictures)
            report = replace(report, images=spans)
        return report if self._config.enabled else report.with_lost(Lost.DISABLED, num_tokens)

    def _tokens_past_nodes(self, path: Path) -> int:
        """Number of tokens that agree with a known page or tail after the last matching page."""
        end = path.end
        if end is None:
            return 0
        start = path.kv_length
        rest = path.chain.content(start, start + self._config.page_size)
        known = list(islice(reversed(end.checkpoints), MAX_TAILS_COMPARED))
        known += [child.content for child in end.alike(rest)]
        return max((common_tokens(rest, tokens) for tokens in known), default=0)
