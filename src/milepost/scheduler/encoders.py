"""Plans the work of the vision tower: which pictures a step encodes, and which outputs are dropped.

Outputs are kept by the identities of pictures, up to a number of tokens; the least recently used go
first. A step encodes the pictures that its chunks reach, as far as its share of encoder work
allows. Beyond that, the chunk ends before the picture, and other requests' steps continue. A
picture that is more work than a share is encoded over several steps, one such picture at a time.
Knows no pixels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from milepost.cache.placement import floor
from milepost.errors import InvalidPromptError
from milepost.pictures import Picture, overlapping
from milepost.scheduler.plans import EncodePart, StepPlan
from milepost.scheduler.stats import SchedulerStats

SHARE_BESIDE_DECODES = 4
"""Divisor of a step's token budget that limits the cost of its pictures if it has decodes, so that
pictures delay others' tokens no more than a chunk of text does."""


@dataclass(frozen=True, slots=True)
class TowerCost:
    """Cost of the vision tower, measured in text tokens that take as many operations."""

    linear: float = 1.0
    """Cost per token of a picture."""
    quadratic: float = 0.0
    """Cost per pair of tokens of a frame, since these attend to each other."""
    depth: int = 64
    """Number of the tower's layers. It is also the largest number of steps that one picture is
    encoded over."""

    def of(self, picture: Picture) -> float:
        """Returns the work of a picture."""
        num_each = picture.num_tokens / picture.grid[0]
        return picture.num_tokens * (self.linear + self.quadratic * num_each)

    def between(self, pictures: Sequence[Picture], start: int, end: int) -> float:
        """Returns the work of the pictures that computing the tokens [start, end) of a prompt
        needs: one that is cut is encoded whole."""
        return sum(map(self.of, overlapping(pictures, start, end)))

    def of_step(self, plan: StepPlan) -> float:
        """Returns the work of a step on pictures."""
        part = plan.encode_part
        begun = 0.0 if part is None else self.of(part.picture) * (part.end - part.first)
        return sum(map(self.of, plan.encodes)) + (begun / part.num_parts if part else 0.0)


PLAIN_COST = TowerCost()
"""Counts a picture's token like a token of text."""


class EncoderStep(NamedTuple):
    """A step's work on pictures."""

    drops: tuple[bytes, ...]
    """Identities of pictures whose outputs are dropped."""
    encodes: tuple[Picture, ...]
    part: EncodePart | None


class Encoders:
    """The encoder outputs on the device, and the encoder work of the step being planned.

    `capacity` is in tokens of pictures; `max_step_tokens` is the token budget of a step, for the
    work of the tower too. Chunks end at multiples of `grid`.
    """

    def __init__(
        self,
        capacity: int,
        max_step_tokens: int,
        grid: int,
        stats: SchedulerStats,
        cost: TowerCost = PLAIN_COST,
    ) -> None:
        self._capacity = capacity
        self._max_step_tokens = max_step_tokens
        self._grid = grid
        self._stats = stats
        self._cost = cost
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """Picture identity -> number of tokens, the least recently used first."""
        self._unsure: set[bytes] = set()
        """Pictures of `_kept` that may not have been encoded, since their step was cut short."""
        self._under_way: EncodePart | None = None
        """The last planned part of a picture of `_kept` that is not complete yet."""
        self._unread: set[bytes] = set()
        """Pictures of `_kept` that no chunk has read since they were encoded."""
        self._needed: dict[bytes, int] = {}
        """Pictures of `_kept` that the step being planned reads or continues to encode."""
        self._encodes: list[Picture] = []
        self._part: EncodePart | None = None
        self._drops: dict[bytes, None] = {}
        self._left = 0.0
        self._share = 0.0
        self._room = math.inf
        self._uncharged = 0.0
        """Work of the step beside decodes that has not been charged to its tokens."""

    def check(self, pictures: Sequence[Picture]) -> None:
        """Raises InvalidPromptError if a grid step of a prompt needs more outputs than are kept."""
        for picture in pictures:
            start = floor(picture.offset, self._grid)
            together = overlapping(pictures, start, start + self._grid)
            num_tokens = sum(each.num_tokens for each in together)
            if num_tokens > self._capacity:
                raise InvalidPromptError(
                    f"images of {num_tokens} tokens side by side, and encoder_cache_size="
                    f"{self._capacity}: send smaller images, or raise encoder_cache_size"
                )

    def begin(self, *, has_decodes: bool, num_left: int | None = None) -> None:
        """Begins a step, which continues with a picture under way. If it has decodes, its share
        limits all encoder work, and so do the `num_left` tokens that they leave; otherwise only the
        work on further pictures is limited."""
        self._needed.clear()
        self._uncharged = 0.0
        self._left = self._max_step_tokens / (SHARE_BESIDE_DECODES if has_decodes else 1)
        if has_decodes and num_left is not None:
            self._left = max(min(self._left, num_left), 1.0)
        self._share = self._left if has_decodes else math.inf
        before = self._under_way
        if before is not None:
            picture, num_parts = before.picture, before.num_parts
            self._needed[picture.identity] = picture.num_tokens
            self._kept.move_to_end(picture.identity)
            self._run(picture, before.end, before.end + 1 if has_decodes else num_parts, num_parts)

    def reach(
        self, pictures: Sequence[Picture], start: int, end: int, num_left: float = math.inf
    ) -> int:
        """Returns how far a chunk from `start` to `end` may go: to its end, or to a picture that
        this step cannot encode, such as one beside decodes that is more work than the `num_left`
        tokens of the step. In a step without decodes, the first chunk to reach a picture gets at
        least a grid step, so that every step makes progress."""
        self._room = num_left if self._share < math.inf else math.inf
        is_first = not self._encodes and self._part is None and self._share == math.inf
        sure = floor(start, self._grid) + self._grid if is_first else start
        for picture in overlapping(pictures, start, end):
            if not self._provide(picture, is_urgent=picture.offset < sure):
                return max(picture.offset, start)
            is_hit = picture.offset >= start and picture.identity not in self._unread
            self._stats.num_encoder_hits += is_hit
            self._unread.discard(picture.identity)
        return end

    def charge(self) -> int:
        """Returns the work on pictures since the last call as a number of tokens of text, for the
        step to leave out: beside decodes it takes no longer than one of text. Without decodes it is
        none."""
        num_tokens, self._uncharged = int(self._uncharged), 0.0
        return num_tokens

    def take(self) -> EncoderStep:
        """Returns the identities to drop, and the pictures to encode, in the planned step."""
        step = EncoderStep(tuple(self._drops), tuple(self._encodes), self._part)
        self._drops.clear()
        self._encodes.clear()
        self._part = None
        whole = list(step.encodes)
        if step.part is not None and step.part.is_last:
            whole.append(step.part.picture)
        self._stats.num_encoded += len(whole)
        self._stats.encoded_tokens += sum(each.num_tokens for each in whole)
        return step

    def roll_back(self, plan: StepPlan) -> None:
        """Records that a step was cut short, so it is unknown which pictures it encoded."""
        parts = (each.picture for each in (plan.encode_part, self._under_way) if each is not None)
        cut = {each.identity for each in (*plan.encodes, *parts)}
        self._unsure.update(cut.intersection(self._kept))
        self._under_way = None

    def _provide(self, picture: Picture, *, is_urgent: bool) -> bool:
        """Makes the step provide a picture, from the kept outputs or by encoding it. Returns False
        if it cannot."""
        identity, num_tokens = picture.identity, picture.num_tokens
        if identity in self._kept and identity not in self._unsure:
            self._kept.move_to_end(identity)
            self._needed[identity] = num_tokens
            return self._under_way is None or self._under_way.picture.identity != identity
        cost = self._cost.of(picture)
        num_parts = (
            1 if cost <= self._share else min(math.ceil(cost / self._share), self._cost.depth)
        )
        least = min(cost / num_parts, self._share)
        is_full = (least > self._left and not is_urgent) or least > self._room
        if identity in self._drops or is_full or (num_parts > 1 and self._part is not None):
            return False
        if sum(self._needed.values()) + num_tokens > self._capacity:
            return False
        self._unsure.discard(identity)
        self._kept[identity] = self._needed[identity] = num_tokens
        self._kept.move_to_end(identity)
        self._make_room()
        self._run(picture, 0, 1, num_parts)
        return num_parts == 1

    def _run(self, picture: Picture, first: int, end: int, num_parts: int) -> None:
        """Has the step run some of the parts of a picture."""
        work = self._cost.of(picture) * (end - first) / num_parts
        self._left -= work
        if self._share < math.inf:
            self._uncharged += work
        self._unread.add(picture.identity)
        if num_parts == 1:
            self._encodes.append(picture)
            return
        self._part = EncodePart(picture=picture, first=first, end=end, num_parts=num_parts)
        self._under_way = self._part if end < num_parts else None

    def _make_room(self) -> None:
        """Drops the least recently used outputs that are not needed, until the rest fits."""
        over = sum(self._kept.values()) - self._capacity
        for identity in [each for each in self._kept if each not in self._needed]:
            if over <= 0:
                break
            over -= self._kept.pop(identity)
            self._unsure.discard(identity)
            self._unread.discard(identity)
            self._drops[identity] = None
