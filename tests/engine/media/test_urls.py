"""Where images may be read from: hostile URLs, files and servers, all on the loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import Callable

import pytest

from milepost.engine.media.given import Given, images_in, images_of
from milepost.engine.media.urls import MediaRules, fetch, is_public, load, load_here
from milepost.errors import InvalidPromptError

PRIVATE = (
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", [*PRIVATE, "", "a", "1.2.3", "01.02.03.04", "[::1]"])
def test_private_addresses_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are(address):
    assert is_public(address)


def refused(url: str, rules: MediaRules, message: str, **options) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        asyncio.run(fetch(url, rules, **options))


def test_no_host_is_fetched_from_unless_it_is_listed():
    hosts = [*PRIVATE, "localhost", "a.example", "metadata.google.internal", "2130706433", "0x7f.1"]
    for host in hosts:
        shown = f"[{host}]" if ":" in host else host
        for url in (
            f"http://{shown}/",
            f"https://{shown}:8000/a.png",
            f"http://b.example@{shown}/",
        ):
            refused(url, MediaRules(), "host|user and password|it is malformed")
            refused(url, MediaRules(domains=("b.example",)), "host|user and password|malformed")


def test_a_listed_host_at_a_private_address_is_not_reached():
    """As an address, in other spellings of one, and as a name that stands for one."""
    for host in (*PRIVATE, "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0"):
        if "%" in host:
            continue
        shown = f"[{host}]" if ":" in host else host
        refused(f"http://{shown}:9/", MediaRules(domains=(host,)), "not public|not be fetched")


@pytest.mark.parametrize(
    "url", ["http://", "http:///a", "https://[", "http://[::1", "http://a.example:99999/", "http:a"]
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(InvalidPromptError):
        asyncio.run(load(Given(url), MediaRules(domains=("a.example", ""), timeout_s=1)))


# --- servers --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def answering(answer: Callable[[bytes, int], bytes | None], *, is_slow: bool = False):
    """A server that sends `answer(path, port)`; None keeps the connection and sends nothing."""
    asked: list[bytes] = []
    tasks: list[asyncio.Task] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head)
            reply = answer(head.split()[1], writer.get_extra_info("sockname")[1])
            if reply is None:
                await reader.read()
            elif is_slow:
                for place in range(len(reply)):
                    writer.write(reply[place : place + 1])
                    await writer.drain()
                    await asyncio.wait_for(asyncio.shield(stopped.wait()), None)
            else:
                writer.write(reply)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    stopped = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        stopped.set()
        server.close()
        await asyncio.gather(*tasks)


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def moved(target: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()


RULES = MediaRules(domains=("localhost",), max_bytes=1000, timeout_s=5.0)
LOOPBACK = {"may_reach": lambda address: address in ("127.0.0.1", "::1")}


async def fetched(answer, path="/a.png", rules=RULES, *, host="localhost", is_slow=False):
    async with answering(answer, is_slow=is_slow) as (port, asked):
        try:
            found = await fetch(f"http://{host}:{port}{path}", rules, **LOOPBACK)
        except InvalidPromptError as error:
            found = str(error)
        return found, asked


def run(*given, **options):
    return asyncio.run(fetched(*given, **options))


def test_a_listed_host_is_fetched_from_without_cookies_or_credentials():
    found, (head,) = run(lambda *_: ok(b"bytes", "Set-Cookie: a=b"))
    assert found == b"bytes"
    assert b"cookie" not in head.lower()
    assert b"authorization" not in head.lower()


def test_redirects_are_followed_among_listed_hosts():
    found, asked = run(lambda path, _: ok(b"b") if path == b"/b" else moved("/b"))
    assert (found, len(asked)) == (b"b", 2)
    found, asked = run(lambda _, port: moved(f"http://localhost:{port}/again"))
    assert "more than 5 redirects" in found
    assert len(asked) == 6


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/", "http://169.254.169.254/latest", "file:///etc/passwd",
        "http://a.example/", "//b.example/", "http://user@localhost:{port}/", "gopher://localhost/",
        "http://[::1]:{port}/", "https://LOCALHOST.a.example/", "data:image/png;base64,AAAA",
    ],
)  # fmt: skip
def test_each_redirect_is_checked(status, target):
    found, asked = run(lambda _, port: moved(target.format(port=port), status))
    assert isinstance(found, str)
    assert len(asked) == 1, "the first was asked, and nobody else"
    assert "passwd" not in found


def test_a_name_is_resolved_once_a_hop(monkeypatch):
    """What it stands for later is not asked: the connection goes to the address that was judged."""

    async def main():
        looked = []
        loop = asyncio.get_running_loop()
        resolve = loop.getaddrinfo

        async def counted(host, *rest, **options):
            looked.append(host)
            return await resolve(host, *rest, **options)

        monkeypatch.setattr(loop, "getaddrinfo", counted)
        found, _ = await fetched(lambda *_: ok(b"x"))
        return found, [host for host in looked if host == "localhost"]

    assert asyncio.run(main()) == (b"x", ["localhost"])


@pytest.mark.parametrize(
    "answer",
    [
        ok(bytes(2000)),
        ok(bytes(2000), "Content-Length: 2000"),
        ok(b"", "Content-Length: 99999999999"),
        ok(b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    ],
)
def test_more_bytes_than_allowed_are_refused(answer):
    assert "use 1000 bytes or fewer" in run(lambda *_: answer)[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTTP/1.1", b"garbage\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"\0" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ok(b"")[:-2] + b"a: b\r\n" * 9000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"HTTP/1.1 404 No\r\n\r\nsecret",
        b"HTTP/1.1 500 Oh\r\n\r\nsecret", b"HTTP/1.1 302 Moved\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", moved("http://["),
        moved("http://localhost:99999/"), moved("\x00"), moved("http://"),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz",
    ],
)  # fmt: skip
def test_servers_that_answer_nonsense_are_an_error_in_our_words(answer):
    found, _ = run(lambda *_: answer)
    assert isinstance(found, str)
    assert found.startswith("image URL 'http://localhost")
    assert "secret" not in found


@pytest.mark.parametrize("is_slow", [True, False])
def test_servers_that_send_nothing_or_a_byte_at_a_time_are_left(is_slow):
    rules = MediaRules(domains=("localhost",), timeout_s=0.2)
    answer = functools.partial(lambda *_: ok(b"x" * 100) if is_slow else None)
    assert "more than 0.2 seconds" in run(answer, rules=rules, is_slow=is_slow)[0]


# --- data and files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", "data:", "data:,", "data:image/png,abc", "data:image/png;base64", "a.png",
        "/etc/passwd",
        "data:text/html;base64,AAAA", "data:image/png;base64,A", "data:image/png;base64,****",
        "data:image/png;base64,%zz%", "ftp://a/b", "blob:x", "//a/b", "http", "\0", "é://x",
        "data:image/png;base64," + "A" * 4000, "FILE:///etc/passwd", "data:image/png;base64,é",
    ],
)  # fmt: skip
def test_what_is_no_image_url_is_refused(url):
    with pytest.raises(InvalidPromptError, match="image"):
        load_here(Given(url), MediaRules(max_bytes=1000))


def test_data_urls_are_read_as_they_are_written():
    body = base64.b64encode(b"\xff\xfe\xfd").decode()
    for url in (f"data:image/png;base64,{body}", f"DATA:;base64,{body}", "data:;base64,%2F%2F79"):
        assert load_here(Given(url), MediaRules()) == b"\xff\xfe\xfd"


def test_files_are_read_below_one_directory_alone(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "a b.png").write_bytes(b"image")
    (root / "large.png").write_bytes(bytes(2000))
    (root / "link.png").symlink_to(outside)
    (root / "dir").mkdir()
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "a.png").write_bytes(b"secret")
    rules = MediaRules(folder=str(root), max_bytes=1000)
    assert load_here(Given(f"file://{root}/a%20b.png"), rules) == b"image"
    assert load_here(Given(f"file://localhost{root}/dir/../a b.png"), rules) == b"image"
    names = ("link.png", "../secret.png", "..%2fsecret.png", "dir", "none.png", "../root2/a.png")
    for name in (*names, "", "large.png", "a%00.png", "x" * 5000, "/etc/passwd"):
        with pytest.raises(InvalidPromptError):
            load_here(Given(f"file://{root}/{name}"), rules)
    for url in (
        f"file://host{root}/a b.png",
        "file:///dev/zero",
        "file:",
        "file:///proc/self/environ",
    ):
        with pytest.raises(InvalidPromptError):
            load_here(Given(url), rules)
    with pytest.raises(InvalidPromptError, match="no files are read"):
        load_here(Given(f"file://{root}/a%20b.png"), MediaRules())


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "has no image"),
        ({"type": "image_url", "image_url": {}}, "has no image"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "detail='huge'"),
    ],
)
def test_parts_without_an_image_are_refused(part, message):
    with pytest.raises(InvalidPromptError, match=message):
        images_of([{"role": "user", "content": [part]}])


def test_images_are_taken_out_of_messages_and_nothing_else_changes():
    plain = [{"role": "user", "content": "a"}, "no message", {"role": "user", "content": [1]}]
    assert images_of(plain) == (plain, [])
    marked = {"type": "image", "image": "x", "cache_control": {"type": "ephemeral"}}
    low = {"type": "input_image", "image_url": "y", "detail": "low"}
    told, found = images_of([*plain, {"role": "tool", "content": [marked, {"type": "text"}, low]}])
    assert told[-1]["content"] == [
        {"type": "image", "cache_control": {"type": "ephemeral"}}, {"type": "text"},
        {"type": "image"},
    ]  # fmt: skip
    assert found == [Given("x"), Given("y", is_low=True)]
    assert images_in({"prompt": "a", "multi_modal_data": {"image": "x"}})[1] == [Given("x")]
