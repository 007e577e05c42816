"""Decides what to write to disk: items in host memory that would be worth loading from disk. Also
keeps track of other engines' files. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from milepost.tiers.file_format import FileName, name_of
from milepost.tiers.holdings import Holdings, ready
from milepost.tiers.tier import Item

MAX_UNWRITTEN = 4096
"""Largest number of states that wait to be written; beyond that the oldest is dropped, since a disk
may never respond.
"""


class Writes:
    """Names the items to write to files, and the files to delete."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._host, self._disk = holdings.host, holdings.disk
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """States (or pages, in a model without states) that may be written."""
        self._gone: list[Item] = []
        self._unneeded: list[FileName] = []

    def want(self, key: bytes, position: int) -> None:
        """Queues an item that is being stored in host memory for writing to disk."""
        if self._holdings.limits.num_disk_pages and not self._holdings.has(
            self._disk, key, position
        ):
            self._unwritten[key] = None
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.popitem(last=False)

    @property
    def are_any(self) -> bool:
        """Whether anything may be ready to write."""
        return bool(self._unwritten)

    def take(self, most: int) -> list[tuple[Item, Item]]:
        """Returns about `most` items of host memory, or fewer, to write to disk, each with its copy
        there. Both are pinned until `written`. Pages go before the state that needs them.
        """
        writes: list[tuple[Item, Item]] = []
        for key in list(self._unwritten):
            if len(writes) >= most:
                break
            head = self._host.get(self._holdings.head, key)
            if head is not None and not self._are_ready(head):
                continue  # still on its way to host memory
            del self._unwritten[key]
            if head is not None and self._is_worth_writing(head):
                writes += self._write(head)
        return writes

    def _are_ready(self, head: Item) -> bool:
        tail = self._host.get("tail", head.key)
        return head.is_ready and (tail is None or tail.is_ready)

    def _is_worth_writing(self, head: Item) -> bool:
        if not self._holdings.has_states:
            return True
        loading = self._holdings.rates.load_seconds(0, self._holdings.limits.state_bytes)
        return self._holdings.rates.compute_seconds(head.position) > loading

    def _write(self, head: Item) -> list[tuple[Item, Item]]:
        path: list[Item] = []
        above, depth = head.parent, head.position // self._holdings.page_size
        if head.what == "page":
            depth -= 1
        while depth and self._disk.get("page", above) is None:
            page = ready(self._host.get("page", above))
            if page is None:
                return []
            path.append(page)
            above, depth = page.parent, depth - 1
        path.reverse()
        tail = self._host.get("tail", head.key) if head.what == "state" else None
        path += [tail, head] if tail is not None else [head]
        path = [item for item in path if self._disk.get(item.what, item.key) is None]
        if not all(item.tokens or item.what == "state" for item in path):
            return []  # its file, known by name only, has gone
        num_states = sum(item.what == "state" for item in path)
        if not self._disk.make_room(len(path) - num_states, num_states, above, self._gone):
            return []
        writes = []
        for item in path:
            copy = self._disk.add(item.what, item.key, item.parent, item.tokens, item.position)
            self._host.pin((item,))
            self._disk.pin((copy,))
            writes.append((item, copy))
        return writes

    def written(self, item: Item, copy: Item, *, is_there: bool) -> None:
        """Reports that a file is there, or could not be written."""
        self._host.unpin((item,))
        self._disk.unpin((copy,))
        if copy.is_gone:
            self._gone.append(copy)
        elif is_there:
            self._disk.fill(copy)
            self._holdings.stats.written += 1
        else:
            self._disk.remove(copy)

    def put_off(self, item: Item, copy: Item) -> None:
        """Queues an item again, whose write had not begun."""
        self.written(item, copy, is_there=False)
        if item.what == self._holdings.head:
            self.want(item.key, item.position)

    def found(self, name: FileName) -> None:
        """Adds a file that was there at the start, or was written by another engine."""
        if self._disk.get(name.what, name.key) is not None:
            return
        num_states = int(name.what == "state")
        if self._disk.make_room(1 - num_states, num_states, name.parent, self._gone):
            self._file(name)

    def found_loose(self, name: FileName) -> None:
        """Adds a file that nothing needs if there is a free page; nothing is evicted for it."""
        if self._disk.get(name.what, name.key) is not None:
            return
        if self._disk.budgets["pages"].free:
            self._file(name)
        else:
            self._unneeded.append(name)

    def _file(self, name: FileName) -> None:
        self._disk.fill(self._disk.add(name.what, name.key, name.parent, b"", name.position))

    def lost(self, name: FileName) -> None:
        """Removes a file that another engine has deleted."""
        item = self._disk.get(name.what, name.key)
        if item is not None and not item.pins:
            self._disk.remove(item)

    def clear(self) -> None:
        """Drops all files, and forgets what should be written."""
        self._unwritten.clear()
        self._gone += self._disk
        self._disk.clear()

    def take_gone(self) -> list[FileName]:
        """Returns the files to delete since the last call, but for those that are to be written
        again."""
        gone = [name_of(item) for item in self._gone] + self._unneeded
        self._gone, self._unneeded = [], []
        return [name for name in gone if self._disk.get(name.what, name.key) is None]
