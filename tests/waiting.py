"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60
PAUSE_S = 0.01
"""Between two looks: whoever looks all the time delays what is waited for, where cores are few."""


def until(condition: Callable[[], object]) -> None:
    """Ask again until it holds; fail after DEADLINE_S."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(PAUSE_S)
