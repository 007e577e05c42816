"""The page of a real server in a real browser; tests/page has what needs no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import serving
from tests.webdriver import DOWN, END, ENTER, HOME, browsing, programs

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(programs() is None, reason="no Chromium with its driver"),
]


@pytest.fixture(scope="module")
def browser():
    with browsing() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(folder):
    """A server of its own: what other tests left in the shared one keeps no page waiting."""
    with serving(folder) as own:
        yield own


@pytest.fixture
def page(browser, server):
    """The page of a real server."""
    browser.size(1440, 900)
    browser.open(f"{server.url}/")
    browser.run("sessionStorage.clear()")
    browser.open("about:blank")
    # Chats are kept in the browser: those of the test before would be shown.
    browser.command("Storage.clearDataForOrigin", origin=server.url, storageTypes="all")
    browser.open(f"{server.url}/")
    browser.complaints()
    yield browser
    assert browser.complaints() == []
    browser.open("about:blank")  # an open page goes on asking


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


def test_a_cut_answer_goes_on_and_a_question_that_is_too_long_stays(page):
    page.run("document.querySelector('#max-tokens').value = '4'")
    page.type("#question", "Say a few words." + ENTER)
    settle(page, 1)
    said = "return document.querySelector('.model .said').textContent"
    cut = page.run(said)
    assert page.run("return document.querySelector('.cut') !== null")
    page.run("document.querySelector('[aria-label=\"Continue this answer\"]').click()")
    settle(page, 1)
    whole = page.run(said)
    assert whole.strip().startswith(cut.strip())
    assert len(whole) > len(cut)
    page.run("document.querySelector('#question').value = 'word '.repeat(20000)")
    page.run("document.querySelector('#ask').requestSubmit()")
    page.wait("return !document.querySelector('#fault').hidden")
    assert page.run("return document.querySelector('#question').value.length") == 5 * 20_000 - 1
    assert "tokens" in page.run("return document.querySelector('#fault').textContent")
    assert page.run("return document.querySelectorAll('#turns > li').length") == 2
    page.complaints()  # the browser notes every refusal


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


def test_the_picture_of_the_readme(browser, request):
    """Takes it where `--pictures` asks for it: a chat with the embedded model."""
    folder = request.config.getoption("--pictures")
    if not folder:
        pytest.skip("taken with --pictures only")
    with serving(None, "--cpu-cache-gib", "0.1") as embedded:
        browser.size(1400, 900)
        browser.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "light"}],
        )
        browser.open(f"{embedded.url}/")
        questions = ["What does str.partition do?", "How is a list copied?", "What is a generator?"]
        for place, question in enumerate(questions, start=1):
            browser.type("#question", question + ENTER)
            settle(browser, place)
        browser.run("document.activeElement.blur()")
        browser.wait("return document.querySelectorAll('#prompts li').length === 3")
        browser.picture(Path(folder) / "page.png")
        browser.open("about:blank")
