"""How far a start is: a bar on a terminal, lines elsewhere."""

import io
import itertools
import logging
import sys
import threading

import pytest

from milepost import progress
from milepost.progress import ProgressLines, track


class Screen(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def screen(monkeypatch):
    def make(*, is_terminal):
        made = Screen(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", made)
        monkeypatch.setattr(progress.logger, "handlers", [])  # another test may have set some
        return made

    monkeypatch.setenv("TERM", "xterm")
    return make


def test_lines_have_the_share_and_the_seconds_left():
    now = [0.0]
    lines = ProgressLines("loading weights", 80 * 2**30, "bytes", lambda: now[0])
    now[0] = 5.0
    assert lines.line() == "loading weights: 0 % of 80.0 GiB, 5 s so far"
    lines.advance(20 * 2**30)
    assert lines.line() == "loading weights: 25 % of 80.0 GiB, 15 s left"
    now[0] = 20.0
    lines.advance(60 * 2**30)
    assert lines.line() == "loading weights: 100 % of 80.0 GiB, 0 s left"
    assert lines.last_line() == "loading weights: 80.0 GiB in 20.0 s"


def test_a_log_gets_lines_while_a_single_step_lasts(screen):
    """Two intervals pass before anything advances."""
    shown, is_written, waits = screen(is_terminal=False), threading.Event(), iter([False, False])

    class Passing(threading.Event):
        def wait(self, timeout):
            assert timeout == progress.EVERY_S
            is_over = next(waits, True)
            if is_over:
                is_written.set()
            return is_over

    lines = ProgressLines("compiling kernels", 3, "steps", itertools.count().__next__)
    with progress.writing_lines(lines, Passing()) as advance:
        assert is_written.wait(10)
        advance(3)
    first, second, last = shown.getvalue().splitlines()
    assert first.endswith(" INFO milepost.start: compiling kernels: 0 % of 3, 1 s so far")
    assert second.endswith("0 % of 3, 2 s so far")
    assert last.endswith("compiling kernels: 3 in 3.0 s")


def test_a_log_that_is_written_gets_them_itself(screen, monkeypatch):
    shown = screen(is_terminal=True)
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(progress.logger, "handlers", [handler])
    before = progress.logger.level
    progress.logger.setLevel(logging.INFO)
    try:
        assert list(track([1, 2], "capturing CUDA graphs")) == [1, 2]
    finally:
        progress.logger.setLevel(before)
    assert [record.getMessage()[:25] for record in records] == ["capturing CUDA graphs: 2 "]
    assert shown.getvalue() == ""


def test_a_terminal_gets_a_bar(screen):
    shown = screen(is_terminal=True)
    with progress.progress("loading weights", 2**30, "bytes") as advance:
        advance(2**30)
    assert "loading weights" in shown.getvalue()
    assert "100%" in shown.getvalue()
    assert "1.0/1.0 GiB" in shown.getvalue()
    assert "milepost.start" not in shown.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_not_to_be_shown_is_not(screen, is_terminal):
    shown = screen(is_terminal=is_terminal)
    assert list(track(["a"], "x", is_shown=False)) == ["a"]
    assert list(track([], "x")) == []
    assert shown.getvalue() == ""


def test_work_that_fails_leaves_no_last_line(screen):
    shown = screen(is_terminal=False)
    with pytest.raises(OSError, match="gone"), progress.progress("loading weights", 3):
        raise OSError("gone")
    assert shown.getvalue() == ""
