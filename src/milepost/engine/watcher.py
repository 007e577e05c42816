"""The protocol of what watches a running engine for people to look at; the page brings one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from milepost.annexes import annex, is_installed
from milepost.engine.facts import Facts
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler


class Watcher(Protocol):
    """An observer of the steps. Its defaults record nothing and survey nothing."""

    @property
    def is_looking(self) -> bool:
        """Whether a survey is in progress."""
        return False

    def note_time(self, now: float) -> None:
        """Notes the time before a step, or after a request was aborted."""

    def note_step(self, now: float, num_ended: int) -> None:
        """Notes the end of a step, which ended this many requests."""

    def note_rest(self, now: float) -> None:
        """Notes the moment at which nothing is left to do."""

    def note_admission(self, request: Request, now: float) -> None:
        """Notes an admitted request, whose first step has run."""

    def look(self) -> None:
        """Begins a look, unless one is under way."""

    def go_on(self, clock: Callable[[], float]) -> bytes | None:  # noqa: ARG002
        """Continues the look for a moment. Returns what it shows, as JSON, once it is whole."""
        return b"{}"


class NoWatcher(Watcher):
    """Watches nothing."""


def watcher_of(scheduler: Scheduler, facts: Facts) -> Watcher:
    """Returns the page's watcher, or one that watches nothing if the page is not installed."""
    if not is_installed("watch"):
        return NoWatcher()
    watcher: Watcher = annex("watch", wanted_by="the page").Watch(scheduler, facts)
    return watcher
