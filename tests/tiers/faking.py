"""Copies without tensors or files, that take as long as they are told to and fail when they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from milepost.cache.plans import Arrival, What
from milepost.scheduler.plans import StepPlan, Store
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.file_format import FileName, Finds
from milepost.tiers.loads import Fetch
from milepost.tiers.policy import Tiers
from milepost.tiers.tier import Item
from tests.fakes import EMPTY, FakeRunner

GARBAGE = [b"half copied"]
Contents = tuple[list[bytes], bytes]
"""Of a page with what lies beside it, or of a state's windows and the state."""


@dataclass
class Files:
    """A directory that engines share."""

    held: dict[tuple[What, bytes], tuple[bytes, int, Contents]]
    """Parent, position and contents by name."""
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    """What the heads of pages' files say."""

    def lose(self, rng: random.Random) -> None:
        """Another engine has made room."""
        for what, key in [name for name in self.held if rng.random() < 0.1]:
            del self.held[what, key]
            self.tokens.pop(key, None)


class FakeTransfers:
    """Carries out what `tiers` decides for `runner`: copies leave the device where the plan says,
    and reach the other side when somebody says so.
    """

    def __init__(
        self, scheduler: Scheduler, runner: FakeRunner, tiers: Tiers, files: Files | None = None
    ) -> None:
        self.scheduler, self.runner, self.tiers = scheduler, runner, tiers
        self.files = files if files is not None else Files({})
        self.arena: dict[tuple[str, int], Contents] = {}
        self.storing: list[tuple[Store, Contents]] = []
        self.loading: dict[int, list[Fetch]] = {}
        self.writing: list[tuple[Item, Item]] = []
        runner.store = self.store
        scheduler.outside.add_keeper(tiers)
        scheduler.outside.add_source(tiers.loads)
        finds = Finds(tiers.holdings.head, lambda _: False)
        finds.add(
            FileName(what=what, key=key, parent=parent, position=position)
            for (what, key), (parent, position, _) in self.files.held.items()
        )
        for _ in range(2):
            news = finds.end_round()
            for name in news.found:
                tiers.writes.found(name)
            for name in news.loose:
                tiers.writes.found_loose(name)

    # --- what a plan says -------------------------------------------------------------------------

    def store(self, store: Store) -> None:
        """What stands there now is on its way; in its place there is nothing to be read yet."""
        self.storing.append((store, self._on_device(store)))
        self.arena[_place(store.what, store.place)] = (GARBAGE, EMPTY)

    def launch(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self.loading[load.number] = self.tiers.loads.fetches(load.number) or []
            for arrival in load.arrivals:
                self._put(arrival, (GARBAGE, EMPTY), -1)

    # --- what becomes of it -----------------------------------------------------------------------

    def end_store(self, index: int, *, is_lost: bool = False) -> None:
        store, held = self.storing.pop(index)
        if is_lost:
            self.tiers.stores.not_stored(store.what, store.key)
            return
        self.arena[_place(store.what, store.place)] = held
        self.tiers.stores.stored(store.what, store.key)

    def end_load(self, number: int, *, is_lost: bool = False) -> None:
        fetches = self.loading.pop(number)
        missing: list[tuple[What, bytes]] = []
        for fetch in fetches:
            item = fetch.item
            if not fetch.is_on_disk:
                continue
            file = self.files.held.get((item.what, item.key))
            if file is None:
                missing.append((item.what, item.key))
                continue
            self.arena[_place(item.what, item.place)] = file[2]
            self.tiers.host.fill(item)
        if missing or is_lost or not fetches:
            self.tiers.loads.failed(missing)
            self.scheduler.failed(number)
            return
        for fetch in fetches:
            held = self.arena[_place(fetch.item.what, fetch.item.place)]
            self._put(fetch.arrival, held, fetch.item.position)
        self.scheduler.arrived(number)

    def write(self, *, is_full: bool = False) -> None:
        """To disk, all that the policy wants; the oldest of it if the disk is full."""
        for item, copy in self.tiers.writes.take(8):
            if not is_full:
                held = self.arena[_place(item.what, item.place)]
                self.files.held[item.what, item.key] = (item.parent, item.position, held)
                if item.what == "page":
                    self.files.tokens[item.key] = item.tokens
            self.tiers.writes.written(item, copy, is_there=not is_full)
        for item in self.tiers.writes.take_gone():
            self.files.held.pop((item.what, item.key), None)
            if item.what == "page":
                self.files.tokens.pop(item.key, None)

    def settle(self, rng: random.Random | None = None, share: float = 1.0) -> None:
        """Some copies end, in any order, one in ten of them badly; without `rng` all, and well."""
        is_bad = (lambda: rng.random() < 0.1) if rng is not None else (lambda: False)
        ends = (lambda: rng.random() < share) if rng is not None else (lambda: True)
        for index in range(len(self.storing) - 1, -1, -1):
            if ends():
                self.end_store(index, is_lost=is_bad())
        for number in list(self.loading):
            if ends():
                self.end_load(number, is_lost=is_bad())
        self.write(is_full=is_bad())

    # --- contents ---------------------------------------------------------------------------------

    def _on_device(self, store: Store) -> Contents:
        id_ = store.id
        if store.what == "state":
            windows = [each for page in store.windows for each in self.runner.windows[page]]
            return windows, self.runner.slots[id_]
        return list(self.runner.kv[id_]), self.runner.beside.get(id_, EMPTY)

    def _put(self, arrival: Arrival, held: Contents, position: int) -> None:
        id_, size = arrival.id, self.runner.page_size
        if arrival.what == "state":
            self.runner.put_state(id_, held[1], position)
            found = held[0] if held[0] != GARBAGE else GARBAGE * size * len(arrival.windows)
            assert len(found) == size * len(arrival.windows), "as many pages as were stored"
            for index, page in enumerate(arrival.windows):
                self.runner.put_window(page, found[index * size : (index + 1) * size])
        else:
            self.runner.put_page(id_, (held[0] * size)[:size])
            self.runner.beside[id_] = held[1]


def _place(what: What, place: int) -> tuple[str, int]:
    return ("states" if what == "state" else "pages", place)
