"""The score of a checkpoint: the number of tokens that it is expected to save, learned from what
returns.

Remembers where known paths ended and where they forked, and the counts learned from that. Knows
nothing of pools, and evicts nothing. There is nothing to tune: the constants are priors, which
evidence overrides.

A request *returns* to a known path in one of two ways. It continues where the path ended (the next
turn of a chat, an agent's next step), or it leaves the path some tokens before that end (an edited
message, another question about the same document). So a checkpoint is needed again

- if it is the deepest one left on its path, whenever the path is continued, and
- whenever the path is left between this checkpoint and the next deeper one;
- at a fork, also whenever yet another prompt leaves the path there.

    path    0 ------- a ------------ b ------- end
    cuts                             |--- few ---|     b serves paths cut back by no more than this
                      |------ b's loss costs a to b -----

How likely a return is at which age is learned for ends and for forks (return_rates.py), whether or
not their states are still cached. Score = that chance x share of the returns that need the state x
tokens to compute again without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import log, log2

from milepost.cache.eviction.return_rates import MAX_RETURNS, Cuts, ReturnRates
from milepost.cache.placement import SPARSE, floor
from milepost.cache.tree import Chain, Checkpoint, End, Node, num_tokens

EVEN_ODDS = log(4 / 3)
"""Expected returns above which a path counts as likely to be asked for: there, one return is a
quarter as likely as none."""
MEMORY = 4
"""Number of ends, and of forks, remembered per slot."""
STEADY = 32
"""A score stays about the same while its age grows by one part in this many."""
PRIOR_GROWTH = 1024.0
"""Prior for the number of tokens by which a request lengthens a known path."""
PRIOR_REQUESTS = 32
"""Weight of `PRIOR_GROWTH`, in requests."""
GROWTH_REQUESTS = 256
"""Number of requests over which growth is averaged."""
MAX_WALK = 4096
"""Largest number of pages walked to find the end of a path that a request leaves."""


class Known:
    """The newest places of one kind (ends, or forks) that requests may return to, and how often
    they do."""

    def __init__(self, size: int) -> None:
        self.places: OrderedDict[bytes, End] = OrderedDict()
        self.rates = ReturnRates()
        self._size = size

    def remember(self, digest: bytes, end: End, clock: int) -> None:
        """Adds a place. If there are too many, the oldest is dropped and counts as never returned
        to."""
        self.places[digest] = end
        self.places.move_to_end(digest)
        if len(self.places) > self._size:
            _, old = self.places.popitem(last=False)
            self.observe(old, clock, returned=False)

    def observe(self, end: End, clock: int, *, returned: bool) -> None:
        """Counts the part of a place's wait that has not been counted yet."""
        age = clock - end.time
        self.rates.observe(end.num_returns, end.counted_age, age, returned=returned)
        end.counted_age = age

    def chance(self, end: End, clock: int) -> float:
        """Returns the chance that the next request returns to a place."""
        return self.rates.chance(end.num_returns, clock - end.time)


class Score:
    """Scores checkpoints, and learns from every request. Its clock counts requests."""

    def __init__(self, num_slots: int, grid: int) -> None:
        self.clock = 0
        self._grid = grid
        self._ends = Known(MEMORY * num_slots)
        self._forks = Known(MEMORY * num_slots)
        self._cuts = Cuts()
        self._growth = PRIOR_GROWTH

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, chain: Chain, nodes: Sequence[Node], num_seen: int) -> End:
        """Records a new request and learns which path it returns to. The first `num_seen` of its
        pages were seen before, and `nodes` are those still cached. It may wait long before it
        begins. Returns the end of its path, to be passed to `begin`."""
        end = End(position=len(chain), time=self.clock)
        if num_seen == len(nodes) and nodes and nodes[-1].children:
            end.num_returns = self._leave(chain, nodes)
        elif num_seen:
            last = nodes[-1] if num_seen == len(nodes) else None
            self._continue(end, chain, last, chain.digests(num_seen)[num_seen - 1])
        return end

    def begin(self, end: End) -> None:
        """Records the admission of a request whose arrival was recorded before."""
        self.clock += 1
        end.time = self.clock

    def _continue(self, end: End, chain: Chain, last: Node | None, digest: bytes) -> None:
        """Records that a prompt, which ends at `end`, contains a known path up to its last full
        page. It may differ from the path after that page, and then needs an earlier state."""
        before = self._ends.places.pop(digest, None)
        if before is None:
            return
        before.has_returned = True
        end.num_returns, end.grown_from = before.num_returns + 1, before.position
        self._ends.observe(before, self.clock, returned=True)
        self._cuts.num_continued += 1
        if last is not None and _has_parted(chain, last, before.position):
            self._cuts.observe(before.position - last.depth * chain.page_size)

    def _leave(self, chain: Chain, nodes: Sequence[Node]) -> int:
        """Records that a prompt leaves a known path before its end. Returns how often that path was
        returned to, or 0 if little of it is shared."""
        position = len(nodes) * chain.page_size
        at = floor(position, self._grid) // chain.page_size
        if at and self._return_to_fork(nodes[at - 1].digest, position):
            return 0
        before = self._ends.places.get(_newest_leaf(nodes[-1]).digest)
        if before is None:
            return 0
        cut = max(before.position - position, 0)
        self._cuts.observe(cut)
        return before.num_returns + 1 if cut < position else 0

    def _return_to_fork(self, digest: bytes, position: int) -> bool:
        """Records a fork. Returns whether it was known."""
        fork, here = self._forks.places.get(digest), End(position=position, time=self.clock)
        if fork is not None:
            self._forks.observe(fork, self.clock, returned=True)
            here.num_returns = fork.num_returns + 1
        self._forks.remember(digest, here, self.clock)
        return fork is not None

    def ended(self, end: End, node: Node, position: int) -> None:
        """Records where the path of a finished request ends."""
        end.position = position
        grown = max(position - end.grown_from, 0) if end.grown_from is not None else 0
        self._growth += (grown - self._growth) / min(PRIOR_REQUESTS + self.clock, GROWTH_REQUESTS)
        self._ends.remember(node.digest, end, self.clock)

    def evicted(self, checkpoint: Checkpoint) -> None:
        """Records that a checkpoint is about to be evicted."""
        if checkpoint.deeper is None and not checkpoint.end.has_returned:
            self._ends.observe(checkpoint.end, self.clock, returned=False)

    # --- what it is worth -------------------------------------------------------------------------

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        """Returns a checkpoint's bucket and its place in it, chosen so that the first or the last
        of a bucket is always worth least. Call it again when the checkpoint is used, its neighbours
        on the path change, or reservations on it come or go."""
        fork, replay = self._fork_at(checkpoint), _half_magnitude(checkpoint.replay_tokens)
        if checkpoint.reservations:
            return ("awaited", fork is not None, replay), -checkpoint.reservations.first().due
        checkpoint.saved = self._saved(checkpoint)
        returns = min(checkpoint.end.num_returns, MAX_RETURNS)
        name: tuple[int, ...] = (returns, _half_magnitude(checkpoint.saved))
        if fork is not None:
            name = (*name, min(fork.num_returns, MAX_RETURNS), replay)
        return name, checkpoint.end.time

    def of(self, checkpoint: Checkpoint) -> float:
        """Returns the number of tokens that a checkpoint is expected to save."""
        if not checkpoint.reservations:
            return self._of_unawaited(checkpoint)
        due = checkpoint.reservations.first().due
        sure = checkpoint.replay_tokens / max(due - self.clock, 1)
        return max(sure, self._of_unawaited(checkpoint))

    def steady(self, checkpoint: Checkpoint) -> int:
        """Returns the number of requests for which the score stays about the same unless its bucket
        changes; 0 if it may change at any time."""
        age = self.clock - checkpoint.end.time
        return 0 if checkpoint.reservations else 1 + age // STEADY

    def is_expected(self, checkpoint: Checkpoint, within: int) -> bool:
        """Whether a path is likely to be returned to within this many requests."""
        end, age = checkpoint.end, self.clock - checkpoint.end.time
        num_returns = self._ends.rates.expected(end.num_returns, age, age + within)
        return bool(checkpoint.reservations) or num_returns > EVEN_ODDS

    @property
    def evidence(self) -> float:
        """Share of the counted returns to ends that were observed rather than assumed."""
        return self._ends.rates.evidence

    def growth(self, within: int) -> float:
        """Returns the number of tokens by which known paths are expected to grow within this many
        requests."""
        return self._growth * within

    def of_page(self, checkpoint: Checkpoint, num_pages: int) -> float:
        """Returns the score per page if evicting the checkpoint frees `num_pages` pages."""
        return self.of(checkpoint) / num_pages

    def of_sparse(self, end: End, position: int, above: int) -> float:
        """Returns the number of tokens that a state inside a prompt, which nobody has asked for
        yet, is expected to save. `above` is the position of the state before it."""
        back = max(end.position - position, 0)
        needed = self._cuts.rate(max(back - SPARSE, 0), back)
        return needed * self._ends.rates.chance(end.num_returns, 0) * (position - above)

    def _of_unawaited(self, checkpoint: Checkpoint) -> float:
        score = self._ends.chance(checkpoint.end, self.clock) * checkpoint.saved
        fork = self._fork_at(checkpoint)
        if fork is not None:
            score += self._forks.chance(fork, self.clock) * checkpoint.replay_tokens
        return score

    def is_fork(self, digest: bytes) -> bool:
        """Whether several prompts are known to have parted after the page with this digest."""
        return digest in self._forks.places

    def _fork_at(self, checkpoint: Checkpoint) -> End | None:
        return None if checkpoint.tail else self._forks.places.get(checkpoint.node.digest)

    def _saved(self, checkpoint: Checkpoint) -> float:
        """Returns the number of tokens expected to be saved each time the path is continued."""
        end, deeper = checkpoint.end.position, checkpoint.deeper
        back = max(end - checkpoint.position, 0)
        nearer = min(max(end - deeper.position, 0), back) if deeper is not None else 0
        needed = self._cuts.rate(nearer, back) + (deeper is None)
        return needed * checkpoint.replay_tokens


def _has_parted(chain: Chain, node: Node, position: int) -> bool:
    """Whether a path that ended at `position`, after its last full page, had other tokens there.
    False if that is no longer known."""
    start = node.depth * chain.page_size
    own = chain.content(start, position)
    if position == start or own in node.checkpoints or own == node.evicted_tail:
        return False
    known = [node.evicted_tail or b"", *(checkpoint.tail for checkpoint in node.newest())]
    return any(num_tokens(tail) == position - start for tail in known)


def _half_magnitude(num: float) -> int:
    """Returns an equal number for numbers within a factor of about 1.4."""
    return round(2 * log2(num)) if num > 0 else -99


def _newest_leaf(node: Node) -> Node:
    """Returns the end of the path that was last added below a node."""
    for _ in range(MAX_WALK):
        if node.last_child is None:
            break
        node = node.last_child
    return node
