"""Who may call which route, however its path is spelled, and who owns what was stored."""

import ast
import asyncio
import re
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import Mount

import milepost
from milepost.annexes import is_installed
from milepost.server import app
from milepost.server.bodies import JsonRoute
from milepost.server.callers import Audience, Keys
from milepost.server.config import ServerConfig
from milepost.server.gate import Gate
from milepost.server.vllm_metrics import HttpMetrics
from tests.server.inprocess import service

SOURCE = Path(milepost.__file__).parent
SECURITY = SOURCE.parents[1] / "docs" / "security.md"
NO_KEY, CLIENT, ADMIN, WRONG = "", "k", "a", "no"
MOST = {
    NO_KEY: Audience.ANYONE,
    WRONG: Audience.ANYONE,
    CLIENT: Audience.CLIENT,
    ADMIN: Audience.OPERATOR,
}
EVERYTHING = {"enable_sleep_mode": True, "access_log": False}


async def within(config, use):
    """What `use` returns of a service and of a client of its application."""
    own = service(config)
    transport = httpx.ASGITransport(app.build(own), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await use(own, http)
    finally:
        await own.close()


def asked(config, requests):
    """The statuses of (method, raw path, key)."""

    async def use(_, http):
        found = []
        for method, path, key in requests:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            url = httpx.URL("http://test", raw_path=path.encode())
            found.append((await http.request(method, url, headers=headers)).status_code)
        return found

    return asyncio.run(within(config, use))


@pytest.fixture(scope="module")
def routes():
    """(method, path): audience, of a server with everything on."""

    async def use(own, _):
        return app.routed(own).routes

    found = asyncio.run(within(ServerConfig(**EVERYTHING), use))
    return {(method, route.path): route.audience for route in found for method in route.methods}


def rows(heading):
    """The cells of the table below a line of the page."""
    lines = SECURITY.read_text().split(heading, 1)[1].splitlines()
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_has_every_route_with_its_key(routes):
    keys = {"none": Audience.ANYONE, "API key": Audience.CLIENT, "admin key": Audience.OPERATOR}
    told = {
        tuple(route.split()): keys[key]
        for key, cell in rows("| key | routes on the HTTP port |")
        for route in re.findall(r"`([A-Z]+ /[^`]*)`", cell)
        if is_installed("page") or not re.match("GET /(ui/|$)", route)
    }
    assert told == routes
    assert len(told) > 30


OPENERS = {"bind", "bind_to_random_port", "create_server", "start_server", "start_unix_server"}
OPENERS |= {"create_unix_server", "TCPStore", "init_process_group"}


def opens_port(node):
    """Whether this is a call that lets others connect. What is bound in the process is no port."""
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", None) not in OPENERS:
        return False
    first = node.args[0] if node.args else None
    return not (isinstance(first, ast.Constant) and str(first.value).startswith("inproc:"))


def test_the_page_has_every_port():
    opened = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(map(opens_port, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    told = [
        name
        for _, cell, _ in rows("| port | opened by | who may use it |")
        for name in re.findall(r"`([\w/]+\.py)`", cell)
        if (SOURCE / name).exists()  # an annex may be gone
    ]
    assert sorted(told) == sorted(opened)


def spellings(path):
    """Ways to write a path that a router, a pattern or a proxy might take for it."""
    yield path
    yield f"{path}/"
    yield f"/{path}"
    yield path + "%0a"
    yield path + "%00"
    yield path + "%c2%85"
    yield path + "%e2%80%a8"
    yield path + "%2f"
    yield path + "?x=%0a"
    yield f"/.{path}"
    yield "/" + quote(path[1:], safe="").replace("_", "%5f")
    yield "/" + "".join(f"%{ord(char):02x}" for char in path[1:])
    yield path.upper()
    yield path + ";x"


METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "TRACE")
IS_REFUSED = {400, 401, 404}


@pytest.mark.parametrize("root", ["", "/api"])
@pytest.mark.parametrize(
    "keys", [{"admin_key": [ADMIN]}, {"admin_key": [ADMIN], "api_key": [CLIENT]}]
)
def test_no_spelling_of_an_operators_path_opens_it(routes, root, keys):
    config = ServerConfig(root_path=root, **keys, **EVERYTHING)
    paths = [path for (_, path), audience in routes.items() if audience == Audience.OPERATOR]
    requests = [
        (method, front + spelled, key)
        for path in paths
        for spelled in spellings(path)
        for front in {"", root, root + root}
        for method in METHODS
        for key in (NO_KEY, WRONG, CLIENT)
    ]
    found = dict(zip(requests, asked(config, requests), strict=True))
    assert {request: status for request, status in found.items() if status not in IS_REFUSED} == {}
    plain = {status for request, status in found.items() if request[1] == root + paths[0]}
    assert plain == {401}


def test_each_route_is_for_its_audience_alone(routes):
    """Judged before the body is looked at, so a request that is let in is one with a mistake."""
    config = ServerConfig(api_key=[CLIENT], admin_key=[ADMIN], **EVERYTHING)
    requests = [
        (method, re.sub(r"{\w+(:path)?}", "x", path), key)
        for _, path in routes
        for method in METHODS
        for key in MOST
    ]
    statuses = dict(zip(requests, asked(config, requests), strict=True))
    least = {re.sub(r"{\w+(:path)?}", "x", path): least for (_, path), least in routes.items()}
    wrong = {
        request: status
        for request, status in statuses.items()
        if (status == 401) != (MOST[request[2]] < least[request[1]])
    }
    assert wrong == {}


def test_paths_that_are_none_say_so_to_clients_alone():
    config = ServerConfig(api_key=[CLIENT], **EVERYTHING)
    requests = [("GET", "/nothing", key) for key in (NO_KEY, WRONG, CLIENT)]
    assert asked(config, requests) == [401, 401, 404]


def test_more_slashes_change_nothing():
    """`http://host/v1/` and `/models` make two in a row."""
    paths = ["/health/", "/v1/models/", "/api/v1/models/", *["/api/"] * is_installed("page")]
    paths += ["/v1//models", "//v1/models", "//api//v1/models//"]
    assert set(asked(ServerConfig(root_path="/api"), [("GET", path, "") for path in paths])) == {
        200
    }


def test_control_characters_are_named():
    async def use(_, http):
        return await http.get(httpx.URL("http://test", raw_path=b"/v1/models%0a"))

    response = asyncio.run(within(ServerConfig(), use))
    assert response.status_code == 400
    assert r"control character '\n'" in response.json()["error"]["message"]


def test_a_route_that_states_nobody_cannot_be_made():
    application = FastAPI()
    application.router.route_class = JsonRoute
    with pytest.raises(AssertionError, match="/more states who may call it"):
        application.get("/more")(lambda: None)


def test_what_is_not_a_route_of_ours_cannot_be_served(monkeypatch):
    """A mount, a WebSocket's route and one of Starlette's own state nobody."""

    async def use(own, _):
        return app.routed(own)

    def add_mount(application, _):
        application.router.routes.append(Mount("/more", app=FastAPI()))

    for add in (add_mount, lambda a, _: a.add_api_websocket_route("/more", lambda: None)):
        monkeypatch.setattr(app.operation, "add", add)
        with pytest.raises(AssertionError, match="each states its audience"):
            asyncio.run(within(ServerConfig(), use))


def test_websockets_are_turned_away():
    sent = []

    async def send(message):
        sent.append(message)

    gate = Gate(None, ServerConfig(), Keys([], []), HttpMetrics(CollectorRegistry()))
    asyncio.run(gate({"type": "websocket", "path": "/metrics", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


SITES = [
    ("http://127.0.0.1:8000", {}, 200),
    ("http://127.0.0.1:8000", {"host": "localhost:8000"}, 200),
    ("http://127.0.0.1:8000", {"host": "milepost:8000"}, 200),
    ("http://127.0.0.1:8000", {"host": "box.local."}, 200),
    ("http://127.0.0.1:8000", {"host": "192.168.1.5"}, 200),
    ("http://127.0.0.1:8000", {"host": "milepost.default.svc"}, 200),
    ("http://[::1]:8000", {"host": "[::1]:8000"}, 200),
    ("http://[::1]:8000", {"host": "evil.example"}, 403),
    ("http://127.0.0.1:8000", {"host": "evil.example:8000"}, 403),
    ("http://127.0.0.1:8000", {"host": "127.0.0.1.evil.example"}, 403),
    ("http://10.0.0.9:8000", {"host": "llm.example"}, 200),  # where a program listens for others
    ("http://10.0.0.9", {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
    ("http://10.0.0.9", {"sec-fetch-site": "cross-site"}, 403),
    ("http://10.0.0.9", {"sec-fetch-site": "same-origin", "origin": "http://10.0.0.9"}, 200),
    ("http://10.0.0.9", {"sec-fetch-site": "same-site", "origin": "http://10.0.0.9:3000"}, 200),
]


def told(url, headers, **options):
    config = ServerConfig(access_log=False, **options)

    async def use(_, http):
        return (
            await http.post(f"{url}/tokenize", json={"prompt": "a"}, headers=headers)
        ).status_code

    return asyncio.run(within(config, use))


@pytest.mark.parametrize(("url", "headers", "status"), SITES)
def test_pages_of_other_sites_use_no_server_without_keys(url, headers, status):
    assert told(url, headers) == status
    key = {"authorization": "Bearer k"}
    assert told(url, {**headers, **key}, api_key=["k"]) == 200
    assert told(url, headers, admin_key=["a"]) == status
    assert told(url, headers, allowed_origins=["*"], allowed_hosts=["*"]) == 200


def test_pages_and_names_may_be_allowed_one_by_one():
    page = {"sec-fetch-site": "cross-site", "origin": "https://a.example"}
    assert told("http://127.0.0.1", page, allowed_origins=["https://a.example"]) == 200
    assert told("http://127.0.0.1", page, allowed_origins=["https://b.example"]) == 403
    proxy = {"host": "LLM.example:443"}
    for host, status in (("127.0.0.1", 403), ("localhost", 403), ("::1", 403), ("0.0.0.0", 200)):
        assert told("http://127.0.0.1", proxy, host=host) == status
    assert told("http://127.0.0.1", proxy, uds="socket") == 200
    assert told("http://127.0.0.1", proxy, allowed_hosts=["llm.example"]) == 200
    assert told("http://127.0.0.1", proxy, allowed_hosts=["other.example"]) == 403


def test_head_is_answered_where_get_is():
    for path, key, status in (
        ("/health", "", 200),
        ("/v1/models", "k", 200),
        ("/v1/models", "", 401),
        ("/metrics", "k", 401),
        ("/v1/completions", "k", 405),
        ("/nowhere", "k", 404),
    ):
        config = ServerConfig(api_key=["k"], admin_key=["a"], access_log=False)
        assert asked(config, [("HEAD", path, key)]) == [status], path


def caller(keys, **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return keys.caller(raw)


@pytest.mark.parametrize("keys", [Keys(["k1", "k2"], ["root"]), Keys([], []), Keys(["k1\n"], [])])
def test_a_key_is_one_owner_however_it_is_sent(keys):
    spelled = ("Bearer k1", "bearer k1", "BEARER  k1", "Bearer\tk1 ", "Bearer k1")
    owners = {caller(keys, authorization=text).owner for text in spelled}
    owners |= {caller(keys, x_api_key=text).owner for text in ("k1", " k1 ")}
    assert len(owners) == 1
    others = [caller(keys, authorization=text).owner for text in ("Bearer k2", "Basic k1", "")]
    assert len({*owners, *others}) == 4


def test_the_key_that_is_valid_says_who_it_is():
    keys = Keys(["k1"], ["root"])
    both = caller(keys, authorization="Bearer no", x_api_key="k1")
    assert both == caller(keys, authorization="Bearer k1")
    assert caller(keys, authorization="Bearer k1", x_api_key="root").audience == Audience.OPERATOR
    assert caller(keys, authorization="Basic k1").audience == Audience.ANYONE


@pytest.mark.parametrize(
    ("clients", "operators", "audiences"),
    [
        ([], [], (2, 2, 2)),
        (["k"], [], (0, 2, 0)),
        ([], ["a"], (1, 1, 2)),
        (["k"], ["a"], (0, 1, 2)),
    ],
)
def test_what_keys_open(clients, operators, audiences):
    keys = Keys(clients, operators)
    given = [caller(keys), caller(keys, x_api_key="k"), caller(keys, x_api_key="a")]
    assert tuple(each.audience for each in given) == audiences
