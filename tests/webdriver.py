"""As much of the WebDriver protocol as the page's tests need, over plain HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The protocol's name for a reference to an element."""
PATIENCE_S = 20
ENTER, DOWN, END, HOME = "\ue007", "\ue015", "\ue010", "\ue011"


def programs() -> tuple[str, str] | None:
    """A Chromium and its driver, if both are here."""
    driver = shutil.which("chromedriver")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    return (browser, driver) if browser and driver else None


class Browser:
    """One window."""

    def __init__(self, url: str, size: tuple[int, int]) -> None:
        found = programs()
        assert found is not None, "there is no browser here"
        self._http = httpx.Client(base_url=url, timeout=330)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += [f"--window-size={size[0]},{size[1]}", "--disable-dev-shm-usage"]
        # Each page would start a process of its own, and another one in reserve.
        arguments += ["--disable-site-isolation-trials", "--renderer-process-limit=1"]
        arguments.append("--disable-features=SpareRendererForSitePerProcess")
        options = {"binary": found[0], "args": arguments}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": 300_000},
        }
        made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{path}: {answer['message']}")
        return answer

    def open(self, url: str) -> None:
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        body = {"script": script, "args": list(arguments)}
        return self._post(f"{self._session}/execute/sync", body)

    def wait(self, test: str) -> None:
        """Until the function body `test` returns something true, asked again and again."""
        script = (
            f"const done = arguments[0]; const test = () => {{ {test} }};"
            f"const end = performance.now() + {1000 * PATIENCE_S};"
            "const look = () => (test() ? done(true) : performance.now() > end ? done(false)"
            " : setTimeout(look, 20)); look();"
        )
        is_true = self._post(f"{self._session}/execute/async", {"script": script, "args": []})
        if not is_true:
            seen = self.run("return document.body.innerText")
            pytest.fail(f"not true within {PATIENCE_S} s: {test}\nThe page says: {seen[:2000]}")

    def type(self, selector: str, keys: str) -> None:
        """Keys to an element."""
        found = self._post(f"{self._session}/element", {"using": "css selector", "value": selector})
        self._post(f"{self._session}/element/{found[ELEMENT]}/value", {"text": keys})

    def command(self, name: str, **parameters: Any) -> Any:
        """One of the browser's own commands, such as for its preferred colours."""
        body = {"cmd": name, "params": parameters}
        return self._post(f"{self._session}/goog/cdp/execute", body)

    def size(self, width: int, height: int) -> None:
        """Of what is shown, whatever the window allows."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def complaints(self) -> list[str]:
        """What the browser has logged as an error since the last call."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        """What can be seen, as PNG."""
        answer = self._http.get(f"{self._session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(answer))

    def close(self) -> None:
        self._http.delete(self._session)
        self._http.close()


@contextlib.contextmanager
def browsing(size: tuple[int, int] = (1440, 900)) -> Iterator[Browser]:
    """A browser with a driver of its own."""
    found = programs()
    assert found is not None, "there is no browser here"
    process = subprocess.Popen([found[1], "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        port = _port(process.stdout.readline)
        browser = Browser(f"http://127.0.0.1:{port}", size)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _port(read_line: Callable[[], str]) -> str:
    """The port that the driver says it took."""
    while line := read_line():
        if "successfully on port" in line:
            return line.rstrip(".\n").rsplit(" ", 1)[-1]
    raise AssertionError("the driver did not start")
