"""What routers are told is what a match over all memories finds, whatever comes and goes."""

from __future__ import annotations

import random
from array import array

import pytest

from milepost.kv_events import MessageWriter
from milepost.scheduler.request import FinishReason
from milepost.tiers import reach as reach_module
from milepost.tiers.holdings import ready
from tests.fakes import make_request
from tests.kv_events.router import Router
from tests.tiers.faking import Files
from tests.tiers.test_policy import FREE, PAGE_SIZE, Engine, prompt_of

MEDIA = {"host": "CPU", "disk": "STORAGE"}


class Told(Engine):
    """An engine, and a router that follows it."""

    def __init__(self, *, form="map", **options):
        super().__init__(**options)
        self.router, self._messages = Router(PAGE_SIZE), MessageWriter(PAGE_SIZE, form, "bytes")
        self.scheduler.outside.add_listener(self._hear)

    def _hear(self, events):
        for payload in self._messages.payloads(events, 0.0):
            self.router.feed(payload)

    def tell(self):
        self.scheduler.outside.tell()
        while self.tiers.is_behind or self.tiers.reach.are_unread:
            for name in self.tiers.reach.take_unread(7):
                tokens = self.transfers.files.tokens.get(name.key)
                if tokens is None:
                    self.tiers.writes.lost(name)
                else:
                    self.tiers.reach.learn(name.key, tokens)
            self.scheduler.outside.tell()

    # --- what is true, from scratch ---------------------------------------------------------------

    def paths(self):
        """Memory, pages and position of each thing outside that can be loaded."""
        holdings, root = self.tiers.holdings, self.cache.chain(()).root
        head = holdings.head
        for where in ("host",) if holdings.disk_rests else MEDIA:
            for item in getattr(holdings, where):
                has_tail = head == "state" and item.position % PAGE_SIZE > 0
                if item.what != head or not item.is_ready:
                    continue
                if has_tail and not self._readable("tail", item.key):
                    continue
                keys = [] if head == "state" else [item.key]
                at, depth = item.parent, item.position // PAGE_SIZE - len(keys)
                while depth and self._parent(at) is not None:
                    keys.append(at)
                    at, depth = self._parent(at), depth - 1
                if not depth and at == root:
                    yield where, keys, item

    def _readable(self, what, key):
        rests = self.tiers.holdings.disk_rests
        tiers = (self.tiers.host,) if rests else (self.tiers.host, self.tiers.disk)
        return next(filter(None, (ready(tier.get(what, key)) for tier in tiers)), None)

    def _parent(self, key):
        node = self.cache.tree.nodes.get(key)
        item = self._readable("page", key)
        return node.parent.digest if node is not None else item and item.parent

    def check(self):
        """The router knows exactly which pages are usable, and by states where."""
        self.tell()
        expected = {where: set() for where in MEDIA}
        for where, keys, _ in self.paths():
            expected[where].update(keys)
        for where, medium in MEDIA.items():
            assert self.router.held_by(medium) == expected[where]

    def check_hits(self):
        """With nothing on its way, each prompt that goes on where a state is hits what the router
        says, up to a page."""
        found = set()
        for where, keys, item in list(self.paths()):
            tokens = [t for key in reversed(keys) for t in self.router.blocks[key][1]]
            tail = self._readable("tail", item.key) if item.position > len(tokens) else None
            tokens += array("I", tail.tokens if tail else b"").tolist()
            if len(tokens) < item.position:
                continue  # only the name of its tail is known
            asked = make_request(self.cache, "asked", [*tokens, 9, 9])
            match = self.cache.match(asked.chain)
            offer = self.tiers.loads.offer(asked, match)
            hit = max(match.state_length, offer.position)
            predicted = self.router.hit([*tokens, 9, 9])
            assert predicted == hit - hit % PAGE_SIZE
            found.add((where, hit > match.state_length))
        return found


@pytest.fixture(params=["map", "array"])
def engine(request):
    return Told(form=request.param, host=(200, 20), disk=(200, 20))


def test_what_left_the_device_is_announced_for_host_memory_and_disk(engine):
    first = engine.ask([1] * 100)
    engine.crowd_out()
    engine.check()
    tokens = [*prompt_of(first), 2]
    assert engine.router.hit(tokens) == 96
    key = first.chain.full_digests()[5]
    assert engine.router.media[key] == {"CPU", "STORAGE"}
    assert engine.cache.reset()
    engine.tiers.clear(with_files=False)
    engine.check()
    assert engine.router.media[key] == {"STORAGE"}, "files stay"
    assert engine.router.hit(tokens) == 96
    assert engine.ask(tokens).report.loaded == {"disk": 103}


def test_a_directory_that_is_there_is_announced_once_its_files_have_been_read(engine):
    first = engine.ask([1] * 100)
    engine.check()
    after = Told(host=(200, 20), disk=(200, 20), files=engine.transfers.files)
    after.scheduler.outside.tell()
    assert after.router.hit([*prompt_of(first), 2]) == 0, "their names do not say what they are of"
    after.tell()
    assert after.router.hit([*prompt_of(first), 2]) == 96
    assert set().union(*after.router.media.values()) == {"STORAGE"}
    after.check()


def test_a_page_that_another_engine_deletes_takes_all_behind_it(engine):
    first = engine.ask([1] * 100)
    after = Told(host=(200, 20), disk=(200, 20), files=engine.transfers.files)
    after.tell()
    gone = after.tiers.disk.get("page", first.chain.full_digests()[1])
    after.tiers.disk.remove(gone)
    after.check()
    assert after.router.hit([*prompt_of(first), 2]) == 0, "no state is before it"


def test_a_directory_that_does_not_answer_is_not_announced_until_it_does(engine):
    engine.ask([1] * 100)
    engine.check()
    assert engine.router.held_by("STORAGE")
    engine.tiers.holdings.rest_disk()
    engine.check()
    assert not engine.router.held_by("STORAGE")
    engine.tiers.holdings.wake_disk()
    engine.check()
    assert engine.router.held_by("STORAGE")


def test_pages_under_a_salt_are_not_announced(engine):
    engine.ask([1] * 100, salt="mine")
    engine.crowd_out()
    first = engine.ask([1] * 100, salt="mine")
    engine.check()
    assert not engine.router.media.keys() & set(first.chain.full_digests())


def test_a_directory_of_many_files_is_taken_in_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(reach_module, "MAX_AT_ONCE", 3)
    files = Files({})
    Engine(disk=(200, 20), files=files).ask([1] * 100)
    engine = Told(host=(200, 20), disk=(200, 20), files=files)
    engine.scheduler.outside.tell()
    assert engine.tiers.is_behind
    engine.check()
    assert len(engine.router.held_by("STORAGE")) == 6


def test_what_came_from_a_file_that_is_gone_is_not_written_without_its_tokens():
    """Whoever read it would find it of other tokens than its name says."""
    files = Files({})
    first = Engine(disk=(200, 20), files=files).ask([1] * 100)
    engine = Engine(host=(200, 20), disk=(200, 20), files=files)
    asked = engine.ask([*prompt_of(first), 2, 2])
    assert asked.report.loaded == {"disk": 103}
    for item in list(engine.tiers.disk):
        if item.what == "page":
            engine.tiers.disk.remove(item)
    engine.ask([*prompt_of(asked), 3, 3])
    assert all(files.tokens.get(item.key) for item in engine.tiers.disk if item.what == "page")


def random_run(seed, num_operations):
    """As the policy's, with a router that follows."""
    rng, files, found = random.Random(seed), Files({}), set()
    beside = seed % 4 == 3  # a short convolution's states are beside its pages

    def engine_of():
        return Told(
            num_pages=rng.choice([12, 16, 24]), num_slots=rng.choice([3, 4]),
            pages_each=0 if beside else rng.choice([0, 3]), beside=beside,
            host=(rng.choice([12, 30, 60]), rng.choice([1, 3, 8])),
            disk=rng.choice([(0, 0), (30, 4), (200, 30)]), files=files,
            form=rng.choice(["map", "array"]), under_way=rng.choice([(64, 4), (3, 1)]), rates=FREE,
        )  # fmt: skip

    engine, known = engine_of(), [[]]
    for _ in range(num_operations):
        verb = rng.random()
        if verb < 0.12:
            base = rng.choice(known)
            cut = rng.choice([len(base), rng.randint(0, len(base))])
            prompt = [*base[: min(cut, 110)], *rng.choices(range(4), k=rng.randint(1, 60))]
            engine.add(prompt, rng.choice([1, 3, 20]), salt=rng.choice(["", "", "x"]))
        elif verb < 0.13 and engine.requests:
            engine.scheduler.finish(rng.choice(engine.requests[-4:])[0], FinishReason.ABORT)
        elif verb < 0.135:
            found |= at_rest(engine, rng)
            if rng.random() < 0.5:
                engine.cache.reset()
                engine.tiers.clear(with_files=seed % 2 == 1)
                engine.check()
            else:
                files.lose(rng)
                engine = engine_of()
        elif verb < 0.14:
            files.lose(rng)
        elif verb < 0.145:
            rests = engine.tiers.holdings.disk_rests
            (engine.tiers.holdings.wake_disk if rests else engine.tiers.holdings.rest_disk)()
        else:
            engine.step()
            engine.transfers.settle(rng, rng.choice([0.0, 0.2, 1.0]))
        engine.check()
        for request, prompt in engine.requests[:]:
            if request.finish_reason is not None:
                known.append(request.chain.tokens.tolist()[:150])
                del known[:-12]
                engine.requests.remove((request, prompt))
    return found | at_rest(engine, rng)


def at_rest(engine, rng):
    engine.tiers.holdings.disk_rests = False
    while engine.scheduler.has_work:
        engine.step()
        engine.transfers.settle(rng, 0.6)
    while engine.transfers.storing or engine.transfers.loading:
        engine.transfers.settle()
    engine.idle()
    engine.check()
    return engine.check_hits()


@pytest.mark.parametrize("seed", range(4))
def test_replayed_events_are_what_a_match_over_all_memories_finds(seed):
    found = random_run(seed, 1200)
    assert {("host", True), ("disk", True)} <= found, "some is hit from each"
