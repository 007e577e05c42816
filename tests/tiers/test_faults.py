"""Random traffic over tiny memories and real files, of which any operation may fail, any may be
the last of its process, and to which others do anything: nothing wrong is answered, nothing is
lost for ever, and the log stays readable.
"""

from __future__ import annotations

import random
from collections import Counter

from milepost.scheduler.request import FinishReason
from milepost.tiers import disk as disk_module
from milepost.tiers import files as files_module
from milepost.tiers.file_format import name_of
from tests.fakes import cold_answer
from tests.tiers.faulty import Faults, FaultyTransfers, Killed, patch, spoil
from tests.tiers.test_policy import Engine


class Runs:
    """Engines one after the other, or two at a time, on one directory."""

    def __init__(self, folder, seed, faults, monkeypatch):
        self.folder, self.rng, self.faults = folder, random.Random(seed), faults
        self.monkeypatch = monkeypatch
        self.is_well = False
        self.num_rests = 0
        self.known = [[]]
        self.num_killed = 0
        self.loaded = Counter()
        self.has_slots = bool(self.rng.randrange(4))
        self.num_engines = 0
        self.engines = [self.engine_of()]

    def engine_of(self):
        rng = self.rng
        self.num_engines += 1
        return Engine(
            num_pages=rng.choice([12, 16, 24]),
            num_slots=rng.choice([3, 4]),
            beside=not self.has_slots,
            host=(rng.choice([12, 30, 60]), rng.choice([1, 3, 8]) * self.has_slots),
            disk=rng.choice([(30, 4), (60, 8), (200, 30)]),
            under_way=rng.choice([(64, 4), (3, 1), (0, 0)]),
            files=self.folder,
            transfers_of=FaultyTransfers,
        )

    def operate(self):
        rng, verb = self.rng, self.rng.random()
        engine = rng.choice(self.engines)
        if verb < 0.12:
            base = rng.choice(self.known)
            cut = rng.choice([len(base), rng.randint(0, len(base))])
            prompt = [*base[: min(cut, 110)], *rng.choices(range(4), k=rng.randint(1, 60))]
            engine.add(prompt, rng.choice([1, 3, 20]), salt=rng.choice(["", "", "x"]))
        elif verb < 0.13 and engine.requests:
            engine.scheduler.finish(rng.choice(engine.requests[-4:])[0], FinishReason.ABORT)
        elif verb < 0.14:
            spoil(self.folder, rng)
        elif verb < 0.145 and len(self.engines) < 2:
            self.engines.append(self.engine_of())
        elif verb < 0.155:
            self.end(engine)
        elif verb < 0.17:
            self.faults.every = rng.choice([0, 0, 3, 20, 200])
        else:
            self.step(engine)
        self.check(engine)

    def step(self, engine):
        self.be_patient(is_patient=self.is_well or self.rng.random() < 0.98)
        engine.step()
        try:
            with self.faults.about():
                engine.transfers.settle(self.rng, self.rng.choice([0.0, 0.2, 1.0]))
        except Killed:
            self.num_killed += 1
            self.replace(engine)

    def end(self, engine):
        """As an engine that is told to: it computes what it has begun, and writes for a while."""
        while engine.scheduler.has_work:
            self.step(engine)
            if engine not in self.engines:
                return
        self.check(engine)
        self.replace(engine)

    def replace(self, engine):
        self.num_rests += engine.tiers.stats.disk_rests
        self.loaded.update(engine.cache.stats.loaded)
        self.engines.remove(engine)
        if not self.engines:
            self.engines.append(self.engine_of())

    def check(self, engine):
        for request, prompt in engine.requests[:]:
            if request.finish_reason is None:
                continue
            answer, whole = request.output_token_ids, cold_answer(prompt, request.max_tokens, 4)
            assert answer == whole[: len(answer)]
            if request.finish_reason is not FinishReason.ABORT:
                assert len(answer) == request.max_tokens
                self.known.append(request.chain.tokens.tolist()[:150])
                del self.known[:-12]
            engine.requests.remove((request, prompt))

    def be_patient(self, *, is_patient):
        """Or find every read that is not over, and every write, to hang."""
        self.monkeypatch.setattr(disk_module, "STALL_S", 1e9 if is_patient else -1.0)
        self.monkeypatch.setattr(disk_module, "LATE", 1e9 if is_patient else 0.0)
        self.monkeypatch.setattr(disk_module, "IDLE_STALL_S", 1e9 if is_patient else 0.0)

    def settle(self):
        """All is well again, and everything comes to its end."""
        self.faults.every = self.faults.kills = 0
        self.is_well = True
        for engine in self.engines[:]:
            while engine.scheduler.has_work or engine.transfers.is_busy:
                self.step(engine)
                self.check(engine)
            assert not engine.tiers.holdings.disk_rests
            assert engine.cache.pages.num_used == engine.cache.slots.num_used == 0
            for tier in (engine.tiers.host, engine.tiers.disk):
                assert not any(item.pins for item in tier)
            self.loaded.update(engine.cache.stats.loaded)


def held(folder):
    """Files by name, but for what others have put there."""
    return {
        path.name: path
        for path in folder.rglob("*")
        if path.is_file() and (path.name.startswith(".") or "-" in path.name)
    }


def random_run(folder, seed, num_operations, monkeypatch):
    rng = random.Random(f"faults {seed}")
    faults = Faults(folder, rng)
    patch(monkeypatch, faults)
    folder.mkdir()
    runs = Runs(folder, seed, faults, monkeypatch)
    for _ in range(num_operations):
        faults.kills = rng.choice([0, 100, 1000])
        runs.operate()
    monkeypatch.setattr(files_module, "STALE_S", -1.0)
    runs.settle()
    engine = runs.engine_of()
    for _ in range(100):
        engine.transfers.settle(rng)
    disk = engine.tiers.disk
    names = {engine.transfers.files.path(item).name for item in map(name_of, disk)}
    there = held(folder)
    assert names == there.keys(), "the next engine knows what is there, and nothing else is"
    return runs, faults


def test_random_operations_with_a_directory_that_fails_or_hangs(tmp_path, monkeypatch, caplog):
    """How far a run gets depends on the clock, too: what is to be seen is counted over several."""
    loaded, num_refused, num_killed, num_rests, num_engines = Counter(), 0, 0, 0, 0
    for seed in range(2):
        runs, faults = random_run(tmp_path / f"kept{seed}", seed, 1000, monkeypatch)
        loaded.update(runs.loaded)
        num_refused += sum(faults.refused.values())
        num_killed += runs.num_killed
        num_rests += runs.num_rests
        num_engines += runs.num_engines
    assert loaded["disk"] > 5
    assert min(loaded.total(), num_refused) > 40
    assert min(num_killed, num_rests) > 4
    assert len(caplog.records) < 10 * num_engines
