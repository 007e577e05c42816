"""Facts that a started engine reports about itself, and the observer of its steps, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from milepost.annexes import annex, is_installed
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a running engine: its device, its data types, and its memory."""

    device: str
    """The manufacturer's name of the device."""
    dtype: str
    """Dtype of weights and activations."""
    state_dtype: str
    """Dtype of recurrent states."""
    weights_bytes: int
    page_bytes: int
    """Bytes of a page, over all layers."""
    slot_bytes: int
    """Bytes of a state slot, over all layers."""
    cache_bytes: int
    """Bytes of all pages and slots."""
    is_shared: bool
    """Whether pages and slots share one memory."""
    num_graphs: int
    """Number of captured steps."""
    kv_dtype: str = ""
    """Dtype of keys and values, if it is not `dtype`."""
    fingerprint: str = ""
    """Names the bitwise mode and what its bits depend on; empty in the default mode."""
    model_type: str = ""
    """Model type of the configuration."""
    num_positions: int = 0
    """Length in tokens of the longest sequence that the model supports."""
    step_tokens: int = 0
    """Largest number of tokens of a step."""


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
