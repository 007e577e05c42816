"""What the parsers find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; CallArguments that follow belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the current call's arguments, as JSON text."""

    text: str


Event = Reasoning | Content | CallStart | CallArguments


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
