"""Decides where a prefill keeps states: pure functions from facts about a prompt to export
positions.

Positions are on the grid, except for marks and branch points that rounding would move too far. A
policy answers for one prefill chunk (start, end] at a time, because `align` depends on where chunks
end; the positions of `auto` and `all` do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from milepost.pictures import Picture, past_picture

SPARSE = 4096
"""Distance in tokens between states inside a long prompt that has no marks or branch points."""

MAX_ROUNDED_OFF = 0.1
"""Largest share of a prefix that rounding its end down to the grid may give up. A state off the
grid costs a short chunk of its own, which pays only for short prefixes."""

MIN_OFF_GRID = 16
"""Shortest prefix that gets a state off the grid. Nearly all chats share the few tokens that
templates begin with, and those are not worth a slot."""

Mode = Literal["auto", "none", "align", "all"]


class Kind(StrEnum):
    """Why a checkpoint was made."""

    BRANCH_POINT = "branch_point"
    MARK = "mark"
    SPARSE = "sparse"
    BOUNDARY = "boundary"
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    PREEMPTED = "preempted"
    LOADED = "loaded"


@dataclass(slots=True, kw_only=True)
class PromptFacts:
    """The facts about a prompt that placement uses. Positions count tokens from its start."""

    prompt_length: int
    grid: int
    """A prefill can export states at multiples of this."""
    marks: tuple[int, ...] = ()
    branch_points: tuple[int, ...] = ()
    block_size: int = 512
    new_from: int = 0
    """Tokens before this position are cached, so states worth keeping there exist already."""
    max_rounded_off: float = MAX_ROUNDED_OFF
    """See `MAX_ROUNDED_OFF`. At 1, states are kept on the grid only."""
    pictures: Sequence[Picture] = ()


Placement = Callable[[PromptFacts, int, int], dict[int, Kind]]
"""A function (facts, start, end) that maps positions to kinds, for start < position <= end."""


def floor(position: int, step: int) -> int:
    """Returns the largest multiple of `step` up to `position`."""
    return position - position % step


def gives_up_too_much(length: int, kept: int, most: float = MAX_ROUNDED_OFF) -> bool:
    """Whether a prefix of `length` tokens should have a state at its very end besides the one at
    `kept`, because it would otherwise lose more than the share `most`."""
    return length >= MIN_OFF_GRID and length - kept > length * most


def rounded(position: int, step: int, most: float = MAX_ROUNDED_OFF) -> int:
    """Returns the grid position to keep for `position`, or `position` itself if rounding gives up
    too much."""
    on_grid = floor(position, step)
    return position if gives_up_too_much(position, on_grid, most) else on_grid


def place_none(_facts: PromptFacts, _start: int, _end: int) -> dict[int, Kind]:
    """Keeps no state."""
    return {}


def place_align(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Keeps the state at the last block boundary inside each prefill chunk."""
    position = floor(min(end, facts.prompt_length - 1), facts.block_size)
    return {position: Kind.BOUNDARY} if position > start else {}


def place_all(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Keeps the state at every block boundary, including those in the answer."""
    first = floor(start, facts.block_size) + facts.block_size
    return dict.fromkeys(range(first, end + 1, facts.block_size), Kind.BOUNDARY)


def place_auto(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Keeps states at branch points, marks and the prompt's end, and sparse ones in a long prompt.
    The cache declines sparse states that are worth less than what they would displace, and the one
    at the prompt's end if a waiting request will resume from what it would displace. The answer's
    end needs no export. No state is inside a picture: a request that resumed there would encode the
    whole picture again, so the state is kept at the picture's end."""
    grid, last_token = facts.grid, facts.prompt_length - 1
    last = floor(last_token, grid)
    step = max(floor(SPARSE, grid), grid)
    first = floor(max(start, facts.new_from), step) + step
    wanted = dict.fromkeys(range(first, min(end, last) + 1, step), Kind.SPARSE)
    wanted |= {last: Kind.PROMPT_END}
    marks = [mark for mark in facts.marks if mark <= last_token]
    wanted |= {rounded(mark, grid, facts.max_rounded_off): Kind.MARK for mark in marks}
    wanted |= dict.fromkeys(facts.branch_points, Kind.BRANCH_POINT)
    if facts.pictures and facts.max_rounded_off < 1:
        wanted = {past_picture(facts.pictures, p): kind for p, kind in wanted.items()}
    return {p: wanted[p] for p in sorted(wanted) if start < p <= end}


POLICIES: dict[Mode, Placement] = {
    "none": place_none,
    "align": place_align,
    "all": place_all,
    "auto": place_auto,
}
