"""The view of the cache in a browser, and the key that opens it."""

import json

import pytest

from milepost.cache import Cache
from milepost.cache.tree import Chain
from milepost.engine.facts import Facts
from milepost.page.watch import Watch
from milepost.scheduler.scheduler import Scheduler
from tests.page.answers import STATE
from tests.webdriver import ENTER

pytestmark = pytest.mark.browser


def test_the_key_is_asked_for_and_kept_in_the_tab(chat):
    page = chat(key="secret")
    page.wait("return document.querySelector('#key-dialog').open")
    page.type("#key", "secret" + ENTER)
    page.wait("return window.asked.some(({path, key}) => path === 'ui/state' && key)")
    assert page.run("return sessionStorage.getItem('milepost-key')") == "secret"
    assert page.run("return localStorage.length + document.cookie.length") == 0
    assert page.run("return document.querySelector('#key-dialog').open") is False


def large_state():
    """Of 100,000 pages in 20,000 paths, and 200 requests that run."""
    cache = Cache(num_pages=100_000, num_slots=4, page_size=2)
    for path in range(20_000):
        chain = Chain([path] * 10, 2)
        cache.tree.insert(chain, cache.tree.root(chain), range(5 * path, 5 * path + 5))
    facts = Facts(
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
    watch = Watch(Scheduler(cache, max_num_seqs=1, max_num_batched_tokens=64), facts)
    watch.look()
    state = watch.go_on(lambda: 0.0)
    assert state is not None
    return state


def test_100_000_pages_are_drawn_as_two_thousand_runs(chat):
    """As much as is drawn is bounded, whatever there is. It takes some 10 ms."""
    page = chat(**{"ui/state": json.loads(large_state())})
    page.wait("return document.documentElement.dataset.drawn")
    drawn = page.run("return document.documentElement.dataset.drawn")
    assert drawn.startswith("2000 runs in ")
    print(drawn)
    note = page.run("return document.querySelector('#tree-note').textContent")
    assert "the largest 2,000 of 20,001 runs are drawn" in note


def test_lines_are_means_over_time_and_flat_where_nothing_happened(chat):
    """After a pause of 200 seconds one request waits for 10 s and runs for 20 s."""
    samples = [(400, 0, 0), (270, 0, 0), (70, 0, 0), (60, 0, 10), (40, 20, 10), (0, 20, 10)]
    state = {
        **STATE,
        "samples": [[ago, 0, 0, 0, 0, ran, waited] for ago, ran, waited in samples],
        "num_running": 0,
    }
    page = chat(**{"ui/state": state})
    page.wait("return document.documentElement.dataset.drawn")
    lines = page.run(
        "return [...document.querySelectorAll('#figures path')].map((e) => e.getAttribute('d'))"
    )
    low, high = "29.0", "1.0"
    assert lines[4] == "".join(
        f"{'L' if at else 'M'}{start}.0 {y}L{end}.0 {y}"
        for at, (start, end, y) in enumerate(
            [(0, 30, low), (30, 230, low), (230, 240, high), (240, 260, low), (260, 300, low)]
        )
    )
    assert lines[3].count(high) == 2
    values = page.run(
        "return [...document.querySelectorAll('#figures .value')].map((e) => e.textContent)"
    )
    assert values[3:] == ["0", "0"]
