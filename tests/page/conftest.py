"""The page in a real browser before a server that answers as told: no engine runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from milepost.page import routes
from tests.page.answers import STATE
from tests.webdriver import Browser, browsing, programs

MODELS = {"data": [{"id": "tiny", "max_model_len": 4096}, {"id": "other", "max_model_len": 64}]}

STUB = """
const real = window.fetch;
window.asked = [];
const stub = %s;
const streams = [...stub.streams];
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
window.fetch = async (path, options = {}) => {
  const headers = options.headers ?? {};
  const body = options.body ? JSON.parse(options.body) : null;
  window.asked.push({path, key: headers.authorization ?? null, body});
  if (stub.key && headers.authorization !== `Bearer ${stub.key}`) {
    return new Response('{"error": {"message": "send a key"}}', {status: 401});
  }
  if (path in stub.answers) return new Response(JSON.stringify(stub.answers[path]));
  if (path !== "v1/chat/completions") return real(path, options);
  const stream = streams.length > 1 ? streams.shift() : streams[0];
  if (stream.status) return new Response(JSON.stringify(stream.body), {status: stream.status});
  return new Response(new ReadableStream({
    async start(out) {
      options.signal.addEventListener("abort", () => out.error(options.signal.reason));
      for (const event of stream.events) {
        out.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
        if (stream.pauses) await sleep(2);
      }
      if (!stream.ends) return;
      out.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
      out.close();
    },
  }));
};
"""


class _Files(BaseHTTPRequestHandler):
    """Serves the page's files with the headers of the real server."""

    def do_GET(self) -> None:
        file = routes.FILES.get(self.path)
        content = file.read_bytes() if file else b""
        self.send_response(200 if file else 404)
        for name, value in (routes.headers_of(file) if file else {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture(scope="session")
def files() -> Iterator[str]:
    """Address of a server that has the page's files alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if programs() is None:
        pytest.skip("no Chromium with its driver")
    with browsing() as opened:
        yield opened


@pytest.fixture
def chat(browser: Browser, files: str) -> Iterator[Callable[..., Browser]]:
    """Opens a new page whose server sends these streams, one for each question."""
    scripts = []

    def open_page(
        *streams: dict[str, Any],
        keeps: bool = False,
        key: str = "",
        script: str = "",
        **answers: Any,
    ) -> Browser:
        given = {"ui/state": STATE, "v1/models": MODELS, **answers}
        source = script + STUB % json.dumps({"streams": streams, "answers": given, "key": key})
        while scripts:
            browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=scripts.pop())
        added = browser.command("Page.addScriptToEvaluateOnNewDocument", source=source)
        scripts.append(added["identifier"])
        if not keeps:
            browser.run("try { sessionStorage.clear() } catch { }")
            browser.open("about:blank")
            kept = "local_storage,indexeddb"  # "all" takes ten times as long
            browser.command("Storage.clearDataForOrigin", origin=files, storageTypes=kept)
        browser.open(files)
        if not key:
            browser.wait("return document.querySelector('#model').value")
        return browser

    browser.size(1400, 900)
    yield open_page
    for script in scripts:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert browser.complaints() == []
