"""The page at `/` comes from the package alone, and its data is the operator's."""

import asyncio
import json
import re

import httpx
import pytest

from milepost.config import EngineConfig
from milepost.page import routes as page
from milepost.server import app
from milepost.server.config import ServerConfig
from milepost.server.service import Service
from tests.server.inprocess import INFO, LIMITS

PROMPT = list(range(10, 10 + 3 * 64))


def ask(http, prompt=PROMPT, headers=None, **more):
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    response = http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", page.FILES)
def test_files_are_open_and_bound_to_the_server_itself(http, path):
    response = http.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    for part in policy:
        name, *sources = part.split()
        pictures = {"data:"} if name == "img-src" else set()
        assert set(sources) <= {"'self'", "'none'", "'script'", "dompurify"} | pictures
    assert response.headers["x-content-type-options"] == "nosniff"


OURS = [file for file in page.FILES.values() if file.parent.name != "vendor"]


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_nothing_comes_from_outside(file):
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]*\.[a-z]+", text) in ([], NAMESPACES)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)


NAMESPACES = ["http://www.w3.org"]
"""No address, though it looks like one: it names what kind of thing an SVG element is."""


def test_the_page_names_only_files_that_are_served():
    text = page.FILES["/"].read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert {f"/{name}" for name in named} <= page.FILES.keys()
    for file in OURS:
        imported = re.findall(r'from "\./([^"]+)"', file.read_text(encoding="utf-8"))
        assert {f"/ui/{name}" for name in imported} <= page.FILES.keys()


def test_state_shows_what_is_resident_and_what_the_last_prompt_found(http):
    http.post("/reset_prefix_cache")
    ask(http)
    ask(http, [*PROMPT, 5, 6, 7])
    state = http.get("/ui/state").json()
    (seen, last) = state["prompts"][-2:]
    assert (seen["reused"], seen["num_tokens"]) == (0, len(PROMPT))
    assert last["reused"] + sum(last["lost"].values()) == last["num_tokens"] == len(PROMPT) + 3
    runs = state["tree"]["runs"]
    _, parent, first, num_pages, _, marks, num_marks, _ = runs[last["hit"]]
    assert runs[parent][1] is None
    assert (first, num_pages) == (0, 3)
    assert last["state_length"] in [position for position, _, _ in marks]
    assert num_marks == len(marks)
    assert state["pages"]["cached"] + state["pages"]["free"] == state["pages"]["total"]
    assert state["engine"]["page_bytes"] > 0
    assert state["running"] == []


def test_state_holds_no_token_and_no_salt(http):
    ask(http, cache_salt="a-salt-to-look-for")
    text = http.get("/ui/state").text
    assert "a-salt-to-look-for" not in text
    numbers = re.findall(r"\[[0-9, ]+\]", json.dumps(json.loads(text)["prompts"]))
    assert numbers == []


def test_a_page_that_is_open_does_not_fill_the_log(server, http):
    ask(http)
    http.get("/ui/state")
    http.get("/")
    http.get("/ui/nothing-of-that-name")
    paths = [json.loads(line).get("path") for line in server.log if line.startswith("{")]
    assert "/ui/state" not in paths
    assert "/" not in paths


class Engine:
    """As much of a client as the application asks."""

    death = None
    info = INFO
    limits = LIMITS
    config = EngineConfig()

    async def state(self):
        return b"{}"


def statuses(paths, key="", **options):
    """What an application with these options answers."""
    service = Service(ServerConfig(**options), Engine(), None, ["tiny"])

    async def ask_all():
        transport = httpx.ASGITransport(app.build(service))
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return [(await client.get(path, headers=headers)).status_code for path in paths]

    return asyncio.run(ask_all())


def test_without_a_page():
    assert statuses(["/", page.STATE_PATH, "/version"], ui=False) == [404, 404, 200]


def test_the_state_is_behind_the_key():
    keys = {"api_key": ["tenant"]}
    assert statuses(["/", page.STATE_PATH], **keys) == [200, 401]
    assert statuses([page.STATE_PATH], "tenant", **keys) == [200]


def test_the_state_is_behind_the_admin_key_if_there_is_one():
    keys = {"api_key": ["tenant"], "admin_key": ["operator"]}
    assert statuses(["/", page.STATE_PATH], "tenant", **keys) == [200, 401]
    assert statuses([page.STATE_PATH], "operator", **keys) == [200]
