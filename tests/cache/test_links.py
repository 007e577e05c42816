"""Which checkpoint stands above which, and which of those below was used last."""

from __future__ import annotations

import pytest

from milepost.cache.tree import Checkpoint, End, Node
from milepost.cache.tree.links import follow, unlink
from milepost.cache.tree.nodes import NO_PAGE

NODE, END = Node(b"", NO_PAGE, None, b""), End(position=0, time=0)


def family():
    """One state above, three below it, the middle one of which has two below itself."""
    top, first, middle, last, older, newer = (
        Checkpoint(position=p, slot=p, node=NODE, kind="mark", tail=b"", tail_page=None, end=END)
        for p in range(1, 7)
    )
    for above, below in ((top, (first, middle, last)), (middle, (older, newer))):
        for checkpoint in below:
            checkpoint.above = above
            above.below[checkpoint] = None
    return top, first, middle, last, older, newer


def test_what_was_below_the_path_used_last_stays_the_path_used_last():
    top, first, middle, last, older, newer = family()
    list(follow(middle))
    assert top.deeper is middle
    assert unlink(middle) == [older, newer, top]
    assert list(top.below) == [first, last, older, newer]
    assert top.deeper is newer
    assert older.above is newer.above is top


def test_what_was_below_another_path_does_not_become_the_path_used_last():
    top, first, middle, last, older, newer = family()
    unlink(middle)
    assert list(top.below) == [older, newer, first, last]
    assert top.deeper is last


@pytest.mark.parametrize("which", [0, 3])
def test_an_end_goes_alone(which):
    checkpoints = family()
    gone = checkpoints[which]
    below = list(gone.below)
    assert unlink(gone) == [*below, *([gone.above] if gone.above else [])]
    assert all(checkpoint.above is gone.above for checkpoint in below)
