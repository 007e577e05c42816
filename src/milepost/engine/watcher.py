"""An observer that shows a running engine to people: none, or the page's."""

from __future__ import annotations

from collections.abc import Callable

from milepost.annexes import annex, is_installed
from milepost.engine.facts import Facts
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler


class Watcher:
    """An observer of the steps. This one records nothing and surveys nothing; the page's does."""

    @property
    def is_looking(self) -> bool:
        """Whether a survey is in progress."""
        return False

    def note_time(self, now: float) -> None:
        """Records the time before a step, or after a request was aborted."""

    def note_step(self, now: float, num_ended: int) -> None:
        """Records the end of a step, in which `num_ended` requests ended."""

    def note_rest(self, now: float) -> None:
        """Records the time at which nothing was left to do."""

    def note_admission(self, request: Request, now: float) -> None:
        """Records an admitted request whose first step has run."""

    def look(self) -> None:
        """Begins a survey, unless one is in progress."""

    def go_on(self, clock: Callable[[], float]) -> bytes | None:  # noqa: ARG002
        """Continues the survey for a moment. Returns it as JSON once it is complete, otherwise
        None."""
        return b"{}"


def watcher_of(scheduler: Scheduler, facts: Facts) -> Watcher:
    """Returns the page's watcher, or one that watches nothing if the page is not installed."""
    if not is_installed("watch"):
        return Watcher()
    watcher: Watcher = annex("watch", wanted_by="the page").Watch(scheduler, facts)
    return watcher
