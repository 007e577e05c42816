"""Host memory and a disk in virtual time."""

import pytest

from milepost.cache import Cache
from milepost.simulator.cost import read_cost
from milepost.simulator.tiers import TierSizes
from tests.simulator.traces import Maker, one_engine

COST = read_cost("hybrid-35b-a3b-h200")
PAGE_BYTES = 64 * COST.page_token_bytes
NUM_PAGES = 100


def conversations(num: int, num_turns: int = 2):
    """Each alone fits the device, two don't; long after one another."""
    maker = Maker()
    prompts = [maker.pages(NUM_PAGES) for _ in range(num)]
    for turn in range(num_turns):
        for number, prompt in enumerate(prompts):
            maker.ask(prompt, arrival_s=100.0 * (turn * num + number))
            prompt += maker.pages(2)
    return maker.trace()


def run(trace, tiers=None, **options):
    cache = Cache(num_pages=NUM_PAGES + 20, num_slots=40, page_size=64)
    return one_engine(trace, cache, COST, closed=False, tiers=tiers, **options).run()


def sizes(*, host=4.0, disk=0.0, **rates):
    """In conversations: their pages, and two states for each."""
    each = NUM_PAGES * PAGE_BYTES + 2 * COST.state_bytes
    return TierSizes(host_bytes=int(host * 3 * each), disk_bytes=int(disk * 3 * each), **rates)


def test_what_leaves_the_device_comes_back_at_the_rate_of_the_link():
    trace = conversations(2)
    without, beside = run(trace), run(trace, sizes(host_bytes_per_s=8e9))
    assert without.only.cache.stats.hits == 0
    stats = beside.only.cache.stats
    assert stats.hits == stats.loaded["host"] > 2 * 0.9 * NUM_PAGES * 64
    assert stats.hits + sum(stats.lost.values()) == stats.queries
    copied_s = (NUM_PAGES * PAGE_BYTES + COST.state_bytes) / 8e9
    for waited_s, cold_s in zip(beside.ttft_s[2:], without.ttft_s[2:], strict=True):
        assert waited_s == pytest.approx(copied_s + COST.step_s, rel=0.1)
        assert waited_s < cold_s


def test_a_link_that_is_slower_than_computing_is_not_used():
    trace = conversations(2)
    assert not run(trace, sizes(host_bytes_per_s=1e9)).only.cache.stats.loaded


def test_what_host_memory_has_no_room_for_comes_from_the_disk():
    trace = conversations(6)
    rates = {"host_bytes_per_s": 20e9, "disk_bytes_per_s": 4e9}
    host = run(trace, sizes(host=1.0, **rates)).only.cache.stats
    disk = run(trace, sizes(host=1.0, disk=8.0, **rates)).only.cache.stats
    assert disk.loaded["disk"] > 0
    assert disk.hits > host.hits


def test_prompts_that_are_loaded_are_no_backlog():
    """Of more conversations than fit, all that fit run at once: nobody is held back, as behind
    prompts that were to be computed, lest what the device has of others is evicted."""
    maker = Maker()
    prompts = [maker.pages(30) for _ in range(40)]
    for turn in range(3):
        for prompt in prompts:
            maker.ask(prompt, arrival_s=1000.0 * turn, output_length=24)
            prompt += maker.pages(2)
    trace = maker.trace()
    seconds = []
    for tiers in (None, TierSizes(host_bytes=int(1e11))):
        cache = Cache(num_pages=12 * 36, num_slots=40, page_size=64)
        done = one_engine(trace, cache, COST, closed=False, tiers=tiers).run()
        seconds.append(done.end_s - 2000.0)
    assert seconds[1] < 0.5 * seconds[0]


def test_copies_are_over_one_behind_the_other():
    """Two that come at once share the link: the second waits for the first."""
    maker = Maker()
    prompts = [maker.pages(40), maker.pages(40)]
    for number, prompt in enumerate([*prompts, maker.pages(115)]):
        maker.ask(prompt, arrival_s=100.0 * number)
    for prompt in prompts:
        maker.ask([*prompt, *maker.pages(1)], arrival_s=1000.0)
    done = run(maker.trace(), sizes(host_bytes_per_s=5e9))
    copied_s = (40 * PAGE_BYTES + COST.state_bytes) / 5e9
    assert done.ttft_s[-2:] == [
        pytest.approx(num * copied_s + COST.step_s, rel=0.05) for num in (1, 2)
    ]
