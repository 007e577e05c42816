"""An index of files that is short of room: what is left there can be used."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from milepost.tiers.file_format import FileName, Finds
from milepost.tiers.holdings import Holdings, MeasuredRates, TierLimits
from milepost.tiers.writes import Writes

ROOT, SIZE, NUM_PARTS = b"r" * 16, 16, 8


class Index:
    """Of one engine, which looks through a directory part by part."""

    def __init__(self, num_pages, num_states, *, has_states=True):
        limits = TierLimits(
            page_bytes=1, state_bytes=1, num_host_pages=0, num_host_states=0,
            num_disk_pages=num_pages, num_disk_states=num_states,
        )  # fmt: skip
        holdings = Holdings(limits, MeasuredRates(), page_size=SIZE, has_states=has_states)
        self.disk, self.writes = holdings.disk, Writes(holdings)
        self.finds = Finds(holdings.head, lambda name: self.disk.is_needed(name.what, name.key))

    def look(self, names):
        for part in range(NUM_PARTS):
            self.finds.add(
                name
                for name in names
                if name.key[0] % NUM_PARTS == part and self.disk.get(name.what, name.key) is None
            )
        news = self.finds.end_round()
        for name in news.found:
            self.writes.found(name)
        for name in news.loose:
            self.writes.found_loose(name)

    def usable(self):
        """Heads all of whose pages are there."""
        held = set(self.disk.pages) | {ROOT}
        return [item for item in self.disk if item.what != "tail" and self._reaches(item, held)]

    def _reaches(self, item, held):
        while item is not None and item.parent in held:
            if item.parent == ROOT:
                return True
            item = self.disk.get("page", item.parent)
        return False


def conversation(number, num_pages, *, has_tail=True, has_state=True):
    names, parent = [], ROOT
    for index in range(num_pages):
        key = blake2b(f"{number} {index}".encode(), digest_size=16).digest()
        names.append(FileName(what="page", key=key, parent=parent, position=(index + 1) * SIZE))
        parent = key
    key = blake2b(f"{number}".encode(), digest_size=16).digest() if has_tail else parent
    end = num_pages * SIZE + has_tail * 3
    heads = ("tail", "state") if has_tail else ("state",)
    own = [FileName(what=what, key=key, parent=parent, position=end) for what in heads]
    return names + own * has_state


def conversations(first, num):
    rng = random.Random(first)
    return [
        conversation(number, rng.randint(1, 30), has_tail=rng.random() < 0.5)
        for number in range(first, first + num)
    ]


def num_pages(given):
    return sum(name.what != "state" for names in given for name in names)


def shuffled(given):
    names = [name for each in given for name in each]
    random.Random(1).shuffle(names)
    return names


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_with_less_room_than_before_whole_conversations_are_left(share):
    given = conversations(0, 60)
    index = Index(int(num_pages(given) * share), 60)
    index.look(shuffled(given))
    heads = [item for item in index.usable() if item.what == "state"]
    assert len(heads) == sum(item.what == "state" for item in index.disk)
    used = sum(item.position // SIZE + (item.position % SIZE > 0) for item in heads)
    assert used > 0.9 * index.disk.budgets["pages"].capacity - 30
    gone = {(name.what, name.key) for name in index.writes.take_gone()}
    known = {(item.what, item.key) for item in index.disk}
    assert gone | known == {(name.what, name.key) for name in shuffled(given)}
    assert not gone & known


def test_what_others_write_takes_the_place_of_what_was_used_longest_ago():
    given = conversations(0, 40)
    index = Index(num_pages(given), 40)
    index.look(shuffled(given))
    for first in range(100, 140, 4):
        index.look(shuffled(conversations(first, 4)))
    heads = [item for item in index.usable() if item.what == "state"]
    assert len(heads) == sum(item.what == "state" for item in index.disk) > 25


def test_pages_that_are_found_before_their_state_wait_for_it():
    """A look goes through folders one after the other while somebody writes."""
    old, new = conversation(0, 10), conversation(1, 9)
    index = Index(11, 2)
    index.look(old)
    index.look(new[:6])
    assert old[-1].key in {item.key for item in index.usable()}, "nothing goes for them yet"
    index.look(new[6:])
    heads = [item.key for item in index.usable() if item.what == "state"]
    assert heads == [new[-1].key]


def test_pages_that_nothing_needs_are_filed_where_there_is_room_and_else_deleted():
    index = Index(11, 2)
    index.look(conversation(0, 8))
    orphans = conversation(1, 3, has_state=False)
    index.look(orphans)
    assert len(index.disk) == 8 + 2
    index.look([])
    assert len(index.disk) == 12
    assert [name.what for name in index.writes.take_gone()] == ["page"]


def test_pages_in_front_of_what_is_there_already_come_with_it():
    """Of a path whose first pages were found last."""
    names = conversation(0, 10)
    index = Index(11, 2)
    index.look(names[4:])
    index.look(names[:4])
    assert len(index.usable()) == 11


def test_without_states_whole_paths_are_left():
    given = [conversation(number, 10, has_state=False) for number in range(10)]
    index = Index(45, 0, has_states=False)
    index.look(shuffled(given))
    assert len(index.usable()) == 45


def test_a_file_that_another_engine_has_deleted_is_not_there():
    index = Index(11, 2)
    names = conversation(0, 5)
    index.look(names)
    index.writes.lost(names[2])
    assert index.disk.get("page", names[2].key) is None
    pinned = index.disk.get("page", names[3].key)
    index.disk.pin((pinned,))
    index.writes.lost(names[3])
    assert index.disk.get("page", names[3].key) is pinned, "somebody reads it, and finds out"
