"""The page in a real browser. Where what matters is what the server says, a stub says it."""

from __future__ import annotations

import json

import pytest

from milepost.cache import Cache
from milepost.cache.tree import Chain
from milepost.engine.facts import Facts
from milepost.page.watch import Watch
from milepost.scheduler.scheduler import Scheduler
from tests.webdriver import DOWN, END, ENTER, HOME, browsing, programs

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(programs() is None, reason="no Chromium with its driver"),
]

STUB = """
const real = window.fetch;
window.asked = [];
window.fetch = (path, options = {}) => {
  const key = options.headers?.authorization;
  window.asked.push([path, key ?? null, options.body ?? null]);
  const stub = %s;
  if (stub.key && key !== `Bearer ${stub.key}`) {
    return Promise.resolve(new Response('{"error": {"message": "send a key"}}', {status: 401}));
  }
  if (path in stub.answers) return Promise.resolve(new Response(stub.answers[path]));
  if (path === "v1/chat/completions") {
    return Promise.resolve(new Response(new ReadableStream({
      start(out) {
        const send = (text) => out.enqueue(new TextEncoder().encode(text));
        for (const delta of stub.deltas) {
          send(`data: ${JSON.stringify({choices: [{delta}]})}\\n\\n`);
        }
        options.signal.addEventListener("abort", () => out.error(options.signal.reason));
      },
    })));
  }
  return real(path, options);
};
"""


@pytest.fixture(scope="module")
def browser():
    with browsing() as opened:
        yield opened


@pytest.fixture
def page(browser, server):
    """The page of a real server."""
    browser.size(1440, 900)
    browser.open(f"{server.url}/")
    browser.run("sessionStorage.clear(); localStorage.clear()")
    browser.open(f"{server.url}/")
    browser.complaints()
    yield browser
    assert browser.complaints() == []


@pytest.fixture
def stubbed(browser, server):
    """Opens the page before a server that answers as told."""
    scripts = []

    def open_page(*, key="", answers=None, deltas=()):
        stub = {"key": key, "answers": answers or {}, "deltas": deltas}
        added = browser.command(
            "Page.addScriptToEvaluateOnNewDocument", source=STUB % json.dumps(stub)
        )
        scripts.append(added["identifier"])
        browser.open(f"{server.url}/")
        browser.run("sessionStorage.clear()")
        browser.open(f"{server.url}/")
        return browser

    yield open_page
    for script in scripts:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def settle(page, num_turns):
    page.wait(
        "return !document.querySelector('#send').hidden"
        f" && document.querySelectorAll('#turns .gave').length === {num_turns}"
    )


def test_a_chat_says_what_came_from_the_cache(page):
    page.run("document.querySelector('#max-tokens').value = '8'")
    page.type("#question", "What does str.partition do, and why would anybody use it?" + ENTER)
    settle(page, 1)
    page.type("#question", "And then?" + ENTER)
    settle(page, 2)
    first, second = page.run(
        "return [...document.querySelectorAll('#turns .gave')].map((e) => e.textContent)"
    )
    assert first.startswith("0 of ")
    assert not second.startswith("0 of ")
    for gave in (first, second):
        assert "prompt tokens cached · computed: " in gave
        assert " · first token " in gave


def test_what_was_said_is_text_alone(stubbed):
    bad = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>"
    page = stubbed(deltas=[{"content": bad}, {"reasoning_content": bad}])
    page.type("#question", bad + ENTER)
    page.wait("return document.querySelectorAll('#turns .said').length === 2")
    page.wait("return document.querySelectorAll('#turns .thought').length === 1")
    shown = "return [...document.querySelectorAll('#turns .said, #turns .thought')].%s"
    assert page.run(shown % "map((e) => e.textContent)") == [bad, bad, bad]
    assert page.run(shown % "map((e) => e.children.length)") == [0, 0, 0]
    assert page.run("return window.hit ?? null") is None


def test_stop_ends_an_answer_and_keeps_what_came(stubbed):
    page = stubbed(deltas=[{"content": "half"}])
    page.type("#question", "go on" + ENTER)
    page.wait("return document.querySelectorAll('#turns .said')[1]?.textContent === 'half'")
    page.run("document.querySelector('#stop').click()")
    settle(page, 1)
    assert page.run("return document.querySelector('#turns .gave').textContent")[:7] == "stopped"
    page.type("#question", "more" + ENTER)
    page.wait("return window.asked.filter(([path]) => path.endsWith('completions')).length === 2")
    bodies = page.run("return window.asked.filter(([path, , body]) => body).map((a) => a[2])")
    roles = [message["role"] for message in json.loads(bodies[-1])["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_the_map_is_read_with_the_keyboard(page):
    page.run("document.querySelector('#max-tokens').value = '2'")
    page.type("#question", "word " * 200 + ENTER)
    settle(page, 1)
    page.wait("return !document.querySelector('#tree-note').textContent.startsWith('Nothing')")
    page.type("#map", HOME + DOWN + END)
    detail = page.run("return document.querySelector('#map-detail').textContent")
    assert detail.startswith(("Tokens ", "Prompts shorter"))
    pressed = "document.querySelector('#prompts button')"
    page.run(f"{pressed}.click()")
    page.wait(f"return {pressed}.getAttribute('aria-pressed') === 'true'")


def test_light_dark_and_narrow(page):
    theme = "return document.documentElement.dataset.theme"
    for scheme in ("dark", "light"):
        page.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        page.wait(f"{theme} === '{scheme}'")
    page.run("document.querySelector('#theme').click()")
    assert page.run(theme) == "dark"
    page.open(page.run("return location.href"))
    assert page.run(theme) == "dark"
    page.size(360, 700)
    seen = (
        "return ['#chat', '#cache'].map((id) => document.querySelector(id).offsetParent !== null)"
    )
    assert page.run(seen) == [True, False]
    page.run("document.querySelector('#show-cache').click()")
    assert page.run(seen) == [False, True]
    assert page.run("return document.documentElement.scrollWidth") <= 360


def test_everything_that_can_be_used_has_a_name(page):
    unnamed = """
    return [...document.querySelectorAll("button, input, textarea, [tabindex], svg, canvas")]
      .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length
        || e.getAttribute("aria-labelledby") || e.closest("[aria-hidden], [aria-labelledby]")))
      .map((e) => e.outerHTML)"""
    assert page.run(unnamed) == []


def test_the_key_is_asked_for_and_kept_in_the_tab(stubbed):
    page = stubbed(key="secret")
    page.wait("return document.querySelector('#key-dialog').open")
    page.type("#key", "secret" + ENTER)
    page.wait("return window.asked.some(([path, key]) => path === 'ui/state' && key)")
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


def test_100_000_pages_are_drawn_as_two_thousand_runs(stubbed):
    """As much as is drawn is bounded, whatever there is. It takes some 10 ms."""
    page = stubbed(answers={"ui/state": large_state().decode()})
    page.wait("return document.documentElement.dataset.drawn")
    drawn = page.run("return document.documentElement.dataset.drawn")
    assert drawn.startswith("2000 runs in ")
    print(drawn)
    note = page.run("return document.querySelector('#tree-note').textContent")
    assert "the largest 2,000 of 20,001 runs are drawn" in note


def test_lines_are_means_over_time_and_flat_where_nothing_happened(stubbed):
    """After a pause of 200 seconds one request waits for 10 s and runs for 20 s."""
    samples = [(400, 0, 0), (270, 0, 0), (70, 0, 0), (60, 0, 10), (40, 20, 10), (0, 20, 10)]
    state = json.loads(large_state())
    state["samples"] = [[ago, 0, 0, 0, 0, ran, waited] for ago, ran, waited in samples]
    page = stubbed(answers={"ui/state": json.dumps(state)})
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
