"""The documentation builds as a site, and its search works without a network."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.webdriver import browsing, programs

ROOT = Path(__file__).parents[2]
OTHERS = re.compile(
    r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//([^"'/ >]+)"""
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tool, tmp_path_factory):
    """The site's folder, built in a place of the tests' own."""
    tool.WORK = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(tool.prepare())]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return tool.WORK / "site"


def test_each_page_is_in_the_menu_and_loads_nothing_from_elsewhere(tool, site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for name in tool.pages().values():
        page = Path(name).with_suffix(".html").name
        assert re.search(rf'href="(\./)?{page}"', index), page
        text = (site / page).read_text(encoding="utf-8")
        assert not set(OTHERS.findall(text)), page


def test_links_to_files_outside_the_site_are_links_to_the_repository(tool):
    page = ROOT / "docs" / "tiny.md"
    text = "[a](../Makefile) [b](server.md#x) [c](../README.md) `[d](e)` [f](https://g) [h](#i)"
    assert tool.linked(text, page, tool.pages()) == (
        f"[a]({tool.repository()}/blob/main/Makefile) [b](server.md#x) [c](index.md) `[d](e)` "
        "[f](https://g) [h](#i)"
    )
    with pytest.raises(SystemExit, match=r"tiny\.md: no such file: nothing\.md"):
        tool.linked("[a](nothing.md)", page, tool.pages())


def test_a_page_that_the_navigation_does_not_know_is_under_more(tool):
    names = {*tool.pages().values(), "new.md"}
    assert tool.navigation(names)[-1]["More"][-1] == "new.md"
    with pytest.raises(SystemExit, match=r"server\.md"):
        tool.navigation(names - {"server.md"})


@pytest.mark.browser
@pytest.mark.skipif(programs() is None, reason="no Chromium and driver here")
def test_the_search_finds_a_word_without_a_network(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    address = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, browsing() as browser:
        browser.open(f"{address}index.html")
        browser.wait("return document.querySelector('.md-search__button')")
        browser.run("document.querySelector('.md-search__button').click()")
        browser.wait("return document.activeElement.shadowRoot?.activeElement")
        browser.command("Input.insertText", text="late_copy")
        browser.wait(
            "const links = document.activeElement.shadowRoot.querySelectorAll('a');"
            "return [...links].some(link => link.href.includes('tiers.html?h=late_copy'))"
        )
        names = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        assert [name for name in browser.run(names) if not name.startswith(address)] == []
        assert browser.complaints() == []
        server.shutdown()
