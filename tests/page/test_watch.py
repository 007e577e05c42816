"""A look between steps: bounded, shared, and nothing is done for it between looks."""

import itertools
import json

import pytest

from milepost.cache import Cache
from milepost.engine.facts import Facts
from milepost.page import watch as watch_module
from milepost.page.watch import MAX_PROMPTS, MAX_SAMPLES, SAMPLE_S, Watch
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler

FACTS = Facts(
    device="CPU",
    dtype="float32",
    state_dtype="float32",
    weights_bytes=1,
    page_bytes=1,
    slot_bytes=1,
    cache_bytes=1,
    is_shared=False,
    num_graphs=0,
)


@pytest.fixture
def scheduler():
    cache = Cache(num_pages=64, num_slots=8)
    return Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=2048)


def seen(scheduler, name, tokens):
    """A request that has been admitted."""
    request = Request(id=name, chain=scheduler.cache.chain(tokens), max_tokens=4)
    scheduler.add(request)
    scheduler.schedule()
    return request


def look(watch, now=0.0):
    """A whole look, and how many steps it lasted."""
    watch.look()
    num_steps = 0
    while (state := watch.go_on(lambda: now)) is None:
        num_steps += 1
    assert not watch.is_looking
    return json.loads(state), num_steps


def test_samples_are_taken_every_two_seconds_and_end(scheduler):
    watch = Watch(scheduler, FACTS)
    for tenths in range(10 * 600):
        watch.note_time(tenths / 10)
    samples = look(watch, 600.0)[0]["samples"]
    assert len(samples) == MAX_SAMPLES
    ages = [sample[0] for sample in samples]
    assert ages[-2:] == [SAMPLE_S, 0.0]
    assert ages[0] == (MAX_SAMPLES - 1) * SAMPLE_S


def test_running_requests_stand_where_they_are(scheduler):
    watch = Watch(scheduler, FACTS)
    request = seen(scheduler, "a-0", range(100))
    watch.note_admission(request, 3.0)
    state, _ = look(watch, 5.0)
    assert state["running"] == [["a-0", None, 0, 100, 100]]
    (prompt,) = state["prompts"]
    assert (prompt["id"], prompt["at"], prompt["lost"]) == ("a-0", 2.0, {"unseen": 100})


def test_only_the_last_prompts_are_kept(scheduler):
    watch = Watch(scheduler, FACTS)
    request = seen(scheduler, "a-0", range(100))
    for now in range(3 * MAX_PROMPTS):
        watch.note_admission(request, float(now))
    prompts = look(watch, 3.0 * MAX_PROMPTS)[0]["prompts"]
    assert [prompt["at"] for prompt in prompts] == [float(n) for n in range(MAX_PROMPTS, 0, -1)]


def test_two_that_look_share_one_survey(scheduler, monkeypatch):
    begun = []

    def counting(*arguments):
        begun.append(arguments)
        return survey(*arguments)

    survey = watch_module.survey
    monkeypatch.setattr(watch_module, "survey", counting)
    watch = Watch(scheduler, FACTS)
    watch.note_time(0.0)
    assert begun == []
    watch.look()
    watch.look()
    look(watch)
    assert len(begun) == 1


def test_a_look_gives_way_to_steps(scheduler):
    """Each reading of the clock is a millisecond later: two slices between two steps."""
    tree = scheduler.cache.tree
    for path in range(8):
        chain = scheduler.cache.chain([path] * 64 * 2000)
        tree.insert(chain, tree.root(chain), range(2000 * path, 2000 * path + 2000))
    watch = Watch(scheduler, FACTS)
    watch.look()
    now, num_steps = itertools.count(), 0
    while watch.go_on(lambda: next(now) / 1000) is None:
        num_steps += 1
    assert 3 <= num_steps <= 6
    assert look(watch)[1] == 0


def sums(watch, now):
    """The samples as (seconds ago, seconds run, seconds waited)."""
    return [(at, ran, waited) for at, *_, ran, waited in look(watch, now)[0]["samples"]]


def test_running_and_waiting_are_counted_over_time_and_nothing_over_a_pause(scheduler):
    """Two requests arrive after a minute in which nothing happened. One waits for the other's step
    of 3 seconds, and then runs in one of 5."""
    watch = Watch(scheduler, FACTS)
    watch.note_rest(0.0)
    first = Request(id="a", chain=scheduler.cache.chain(range(100)), max_tokens=1)
    second = Request(id="b", chain=scheduler.cache.chain(range(100)), max_tokens=1)
    scheduler.waiting = [first, second]
    watch.note_time(60.0)
    scheduler.running, scheduler.waiting = [], [second]
    watch.note_step(63.0, num_ended=1)
    watch.note_time(63.0)
    scheduler.running, scheduler.waiting = [second], []
    watch.note_step(68.0, num_ended=0)
    scheduler.running = []
    watch.note_rest(68.0)
    assert sums(watch, 100.0) == [
        (100.0, 0, 0),
        (40.0, 0, 0),
        (37.0, 3, 3),
        (32.0, 8, 3),
        (0, 8, 3),
    ]


def test_the_end_of_work_is_a_sample_and_many_short_pauses_are_not(scheduler):
    watch = Watch(scheduler, FACTS)
    for quarter in range(4 * 60):
        watch.note_time(quarter / 4)
        scheduler.stats.decode_tokens += 1
        watch.note_step(quarter / 4 + 0.1, num_ended=0)
        watch.note_rest(quarter / 4 + 0.1)
    samples = look(watch, 200.0)[0]["samples"]
    ended = [decoded for at, _, _, _, decoded, _, _ in samples if at == pytest.approx(140.1, 0.01)]
    assert ended[-1] == 240
    assert len(samples) <= 60 / SAMPLE_S + 3


def test_a_request_that_was_aborted_waits_no_longer(scheduler):
    watch = Watch(scheduler, FACTS)
    request = Request(id="a", chain=scheduler.cache.chain(range(100)), max_tokens=1)
    scheduler.waiting = [request]
    watch.note_time(10.0)
    scheduler.waiting = []
    watch.note_time(11.0)
    assert sums(watch, 50.0)[-1] == (0, 0, 1)
