"""What a checkpoint is worth: the tokens that it is expected to save, learned from what returns.

Owns the memory of where known paths ended and where they forked, and the counts learned from it.
Knows nothing of pools, and evicts nothing. No knob: the constants are priors, which evidence
outvotes.

A request *returns* to a known path in one of two ways. It continues where the path ended (the next
turn of a chat, an agent's next step), or it leaves the path some tokens before that end (an edited
message, another question to the same document). So a checkpoint is needed again

- if nothing deeper is left on its path, whenever the path is continued, and
- whenever the path is left between this checkpoint and the next deeper one;
- at a fork, also whenever yet another prompt leaves the path there.

    path    0 ------- a ------------ b ------- end
    cuts                             |--- few ---|     b serves paths cut back by no more than this
                      |------ b's loss costs a to b -----

A return is at first supposed to be as likely as 1 / (age + AGE_OFFSET) (a Lomax law); age counts
requests, not time. How much more or less likely it is, is learned for ends and for forks: in all,
by number of earlier returns, and by magnitude of the age, also from those whose state is gone.
Where returns come late and all at once (a cycle), the chance looks ahead to the best time to wait
until, as a Gittins index does. Worth = that chance x share of the returns that need the state x
tokens to compute again without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log, log2
from typing import Protocol

from milepost.cache.chain import Chain
from milepost.cache.placement import SPARSE, Kind, floor
from milepost.cache.tree import Checkpoint, End, Node

AGE_OFFSET = 16.0
"""Requests over which a return stays about as likely as at once: traffic is interleaved."""
PRIOR_EVENTS = 4.0
"""Weight of the prior in each learned ratio, in events."""
PRIOR_EVENTS_AT_AGE = 16.0
"""The same for the ages of returns: they are many, and all learn from them."""
PRIOR_FORKS = 0.1
"""Forks for each continuation, before there is evidence."""
PRIOR_CUTS = 0.25
"""Forks supposed at each magnitude of cut, before there is evidence."""
MAX_RETURNS = 2
"""Earlier returns are told apart up to this many."""
MEMORY = 4
"""Ends and forks remembered for each slot."""
MAGNITUDES = 32
MAX_WALK = 4096
"""Pages looked at to find where a path ended that a request leaves."""


class Law:
    """How much more often than 1 / (age + AGE_OFFSET) something returns: learned, by number of
    earlier returns and by magnitude of the age.
    """

    __slots__ = ("_by_age", "_levels", "_own", "_total", "_waits")

    def __init__(self) -> None:
        self._total = _Ratio(PRIOR_EVENTS)
        self._own = [_Ratio(PRIOR_EVENTS) for _ in range(MAX_RETURNS + 1)]
        self._by_age = [_Ratio(PRIOR_EVENTS_AT_AGE) for _ in range(MAGNITUDES)]
        self._levels = [1.0] * (MAX_RETURNS + 1)
        self._waits: list[tuple[int, float]] | None = None

    def chance(self, num_returns: int, age: int) -> float:
        """Of a return, for each request that the wait for it takes at best: returns may be unlikely
        now and come all at a later age.
        """
        magnitude = age.bit_length()
        ratio = self._by_age[magnitude].value
        rate = ratio / (age + AGE_OFFSET)
        until, events = self._best_waits()[magnitude]
        if until > age:
            low = 1 << magnitude >> 1
            events -= ratio * log((age + AGE_OFFSET) / (low + AGE_OFFSET))
            rate = max(rate, events / (until - age))
        return self._levels[min(num_returns, MAX_RETURNS)] * rate

    def _best_waits(self) -> list[tuple[int, float]]:
        """For each magnitude of age: until when to wait for the most events a request, and how many
        come from the magnitude's beginning until then.
        """
        if self._waits is not None:
            return self._waits
        ages = [1 << m >> 1 for m in range(MAGNITUDES + 1)]
        events = [0.0] * MAGNITUDES
        waits = [(0, 0.0)] * MAGNITUDES
        for m in range(MAGNITUDES - 1, -1, -1):
            width = log((ages[m + 1] + AGE_OFFSET) / (ages[m] + AGE_OFFSET))
            events[m] = self._by_age[m].value * width
            until, found = ages[m + 1], events[m]
            if m + 1 < MAGNITUDES:
                later, more = waits[m + 1]
                if (found + more) * (until - ages[m]) > found * (later - ages[m]):
                    until, found = later, found + more
            waits[m] = (until, found)
        self._waits = waits
        return waits

    def observe(self, num_returns: int, since: int, age: int, *, returned: bool) -> None:
        """Something lived from age `since` to `age`, and then returned or was left waiting."""
        self._waits = None
        own = self._own[min(num_returns, MAX_RETURNS)]
        level = self._total.value * own.value
        in_all = 0.0
        for magnitude in range(since.bit_length(), age.bit_length() + 1):
            low = max(1 << magnitude >> 1, since)
            high = max(min(age, 1 << magnitude), low)
            expected = log((high + AGE_OFFSET) / (low + AGE_OFFSET))
            in_all += expected
            is_last = returned and magnitude == age.bit_length()
            self._by_age[magnitude].observe(expected * level, is_last)
        own.observe(in_all * self._total.value, returned)
        self._total.observe(in_all, returned)
        self._levels = [self._total.value * ratio.value for ratio in self._own]


class _Ratio:
    """Events seen to events expected, starting from one."""

    __slots__ = ("_expected", "_seen", "value")

    def __init__(self, prior_events: float) -> None:
        self._seen = self._expected = prior_events
        self.value = 1.0

    def observe(self, expected: float, seen: int) -> None:
        self._expected += expected
        self._seen += seen
        self.value = self._seen / self._expected


class Cuts:
    """How many tokens before a path's end others leave it, by magnitude."""

    __slots__ = ("_below", "_counts")

    def __init__(self) -> None:
        self._counts = [PRIOR_CUTS] * MAGNITUDES
        self._below = [0.0, *accumulate(self._counts)]

    def observe(self, num_tokens: int) -> None:
        self._counts[num_tokens.bit_length()] += 1
        self._below = [0.0, *accumulate(self._counts)]

    def share(self, over: int, up_to: int) -> float:
        """Share of the cuts above `over` tokens, up to and with `up_to`."""
        return (self._under(up_to + 1) - self._under(over + 1)) / self._below[-1]

    def _under(self, num_tokens: int) -> float:
        """Cuts of fewer tokens; inside a magnitude they are supposed to be even."""
        magnitude = num_tokens.bit_length()
        low = 1 << magnitude >> 1
        return self._below[magnitude] + self._counts[magnitude] * (num_tokens - low) / (low or 1)


@dataclass(slots=True)
class Fork:
    """A place where prompts part."""

    time: int
    num_returns: int = 0


class Worth(Protocol):
    """What the cache asks. One contract test runs for each."""

    clock: int
    """Requests so far."""

    def arrive(self, chain: Chain, nodes: Sequence[Node], num_seen: int) -> End:
        """Note a new request, of whose pages the first `num_seen` were seen before, and `nodes` are
        resident.
        """
        ...

    def ended(self, end: End, node: Node, position: int) -> None:
        """Note where the request's path ends, now that it is over."""
        ...

    def evicted(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint is about to go."""
        ...

    def shelf(self, checkpoint: Checkpoint) -> Hashable:
        """Checkpoints with equal shelves keep their order of worth as they age. Asked again when
        a checkpoint is used, or those next to it on its path change.
        """
        ...

    def of(self, checkpoint: Checkpoint) -> float:
        """Tokens that the checkpoint is expected to save, on the scale of its kind."""
        ...

    def of_sparse(self, end: End, position: int, above: int) -> float:
        """The same for a state inside a prompt that nobody has asked for yet."""
        ...


class Expected:
    """`auto`'s own: learns from every request."""

    __slots__ = ("_continued", "_cuts", "_ends", "_forked", "_forks", "_law", "_memory", "clock")

    def __init__(self, num_slots: int) -> None:
        self.clock = 0
        self._memory = MEMORY * num_slots
        self._ends: OrderedDict[bytes, End] = OrderedDict()
        self._forks: OrderedDict[bytes, Fork] = OrderedDict()
        self._law = {"end": Law(), "fork": Law()}
        self._cuts = Cuts()
        self._continued = 0
        self._forked = 0

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, chain: Chain, nodes: Sequence[Node], num_seen: int) -> End:
        self.clock += 1
        end = End(position=len(chain), time=self.clock)
        if num_seen:
            last = nodes[-1] if num_seen == len(nodes) else None
            if last is None or not last.num_children:
                end.num_returns = self._continue(chain.full_digests()[num_seen - 1])
            else:
                end.num_returns = self._leave(chain, nodes)
        return end

    def _continue(self, digest: bytes) -> int:
        """A prompt holds a known path to its end; gives how often the path was returned to."""
        before = self._ends.pop(digest, None)
        if before is None:
            return 0
        self._continued += 1
        self._observe_end(before, returned=True)
        return before.num_returns + 1

    def _leave(self, chain: Chain, nodes: Sequence[Node]) -> int:
        """A prompt leaves a known path before its end."""
        position = len(nodes) * chain.page_size
        at = floor(position) // chain.page_size
        if at and self._return_to_fork(nodes[at - 1].digest):
            return 0
        before = self._ends.get(_newest_leaf(nodes[-1]).digest)
        if before is None:
            return 0
        cut = max(before.position - position, 0)
        self._forked += 1
        self._cuts.observe(cut)
        return before.num_returns + 1 if cut < position else 0

    def _return_to_fork(self, digest: bytes) -> bool:
        """Note a fork; whether it was known as one."""
        fork = self._forks.get(digest)
        if fork is None:
            self._forks[digest] = Fork(self.clock)
            if len(self._forks) > self._memory:
                _, old = self._forks.popitem(last=False)
                age = self.clock - old.time
                self._law["fork"].observe(old.num_returns, 0, age, returned=False)
            return False
        age = self.clock - fork.time
        self._law["fork"].observe(fork.num_returns, 0, age, returned=True)
        fork.num_returns += 1
        fork.time = self.clock
        self._forks.move_to_end(digest)
        return True

    def ended(self, end: End, node: Node, position: int) -> None:
        end.position = position
        self._ends[node.digest] = end
        self._ends.move_to_end(node.digest)
        if len(self._ends) > self._memory:
            _, old = self._ends.popitem(last=False)
            self._observe_end(old, returned=False)

    def evicted(self, checkpoint: Checkpoint) -> None:
        if checkpoint.deeper is None:
            self._observe_end(checkpoint.end, returned=False)

    def _observe_end(self, end: End, *, returned: bool) -> None:
        """Count how long an end has waited, as far as that isn't counted."""
        age = self.clock - end.time
        self._law["end"].observe(end.num_returns, end.counted_age, age, returned=returned)
        end.counted_age = age

    # --- what it is worth -------------------------------------------------------------------------

    def shelf(self, checkpoint: Checkpoint) -> Hashable:
        if _is_awaited(checkpoint):
            return Kind.PREEMPTED
        returns = min(checkpoint.end.num_returns, MAX_RETURNS)
        checkpoint.saved = self._saved(checkpoint)
        saved = _half_magnitude(checkpoint.saved)
        fork = self._forks.get(checkpoint.node.digest)
        if fork is None or checkpoint.tail:
            return (returns, saved)
        fork_returns = min(fork.num_returns, MAX_RETURNS)
        return (returns, saved, fork_returns, _half_magnitude(checkpoint.replay_tokens))

    def of(self, checkpoint: Checkpoint) -> float:
        if _is_awaited(checkpoint):
            return checkpoint.position
        end = checkpoint.end
        chance = self._law["end"].chance(end.num_returns, self.clock - end.time)
        worth = chance * checkpoint.saved
        fork = self._forks.get(checkpoint.node.digest)
        if fork is not None and not checkpoint.tail:
            chance = self._law["fork"].chance(fork.num_returns, self.clock - fork.time)
            worth += chance * checkpoint.replay_tokens
        return worth

    def _saved(self, checkpoint: Checkpoint) -> float:
        """Tokens expected to be saved for each time that the path is continued."""
        deeper = checkpoint.deeper
        needed = self._cut_share(
            checkpoint.end, checkpoint.position, deeper.position if deeper else None
        )
        return needed * checkpoint.replay_tokens

    def of_sparse(self, end: End, position: int, above: int) -> float:
        deeper = min(position + SPARSE, end.position)
        needed = self._cut_share(end, position, deeper)
        return needed * self._law["end"].chance(end.num_returns, 0) * (position - above)

    def _cut_share(self, end: End, position: int, deeper: int | None) -> float:
        """Returns that need the state at `position`, for each one that continues the path."""
        forks = (self._forked + PRIOR_EVENTS * PRIOR_FORKS) / (self._continued + PRIOR_EVENTS)
        back = max(end.position - position, 0)
        if deeper is None:
            return 1.0 + forks * self._cuts.share(0, back)
        return forks * self._cuts.share(min(max(end.position - deeper, 0), back), back)


def _is_awaited(checkpoint: Checkpoint) -> bool:
    """Whether a preempted request is sure to come back for it."""
    return checkpoint.kind == Kind.PREEMPTED and not checkpoint.num_uses


def _half_magnitude(num: float) -> int:
    """Equal for numbers within about a factor of 1.4."""
    return round(2 * log2(num)) if num > 0 else -99


def _newest_leaf(node: Node) -> Node:
    """Where the path that was last added below a node ends."""
    for _ in range(MAX_WALK):
        if node.last_child is None:
            break
        node = node.last_child
    return node
