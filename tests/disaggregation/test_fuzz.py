"""What comes from outside ends no engine: both ports, peers that lie, and parameters that name
them by the thousand."""

from __future__ import annotations

import contextlib
import gc
import resource
import socket
from random import Random

import msgspec
import pytest
import zmq

from milepost.disaggregation.messages import (
    ENCODER,
    MAX_QUESTION_BYTES,
    Declined,
    Gone,
    Granted,
    Released,
    Welcome,
)
from milepost.errors import InvalidRequestError
from milepost.kv_config import PeerNetworks
from tests.disaggregation import fuzz
from tests.disaggregation.fleet import (
    PREFILL,
    connector_of,
    let_time_pass,
    open_engine,
    running,
)
from tests.disaggregation.hostile import BROKEN_TEXT, DEEP, Liar
from tests.disaggregation.test_faults import is_computed
from tests.engines import greedy, tokens
from tests.waiting import until

REMOTE = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "0" * 32,
    "remote_num_tokens": 89,
}


@pytest.fixture
def fleet(tiny):
    engines = [open_engine(tiny.folder, "socket") for _ in range(2)]
    with running(*engines) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def others(tiny):
    """Two that several tests share."""
    with running(*(open_engine(tiny.folder, "socket") for _ in range(2))) as fleet:
        yield fleet


@contextlib.contextmanager
def connected(engine, source="127.0.0.1"):
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    host, port = connector_of(engine).place
    sock.connect(f"tcp://{source}:0;{host}:{port}")
    try:
        yield sock
    finally:
        sock.close(linger=0)
        context.term()


def welcome(engine, sock):
    """The answer to a hello."""
    sock.send_multipart([b"", b"hello", ENCODER.encode(connector_of(engine).links.hello)])
    assert sock.poll(10_000), "nobody answers"
    return msgspec.msgpack.decode(sock.recv_multipart()[2], type=Welcome)


def test_a_few_rounds(tiny):
    counts = fuzz.run(tiny, 3, seed=5)
    assert counts["answers"] > 12
    assert counts["parameters refused"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_rounds(tiny, seed):
    assert fuzz.run(tiny, 200, seed)["answers"] >= 1000


@pytest.mark.parametrize(
    "body",
    [DEEP, BROKEN_TEXT[1], b"", b"\xdd\xff\xff\xff\xff"],
    ids=["deep", "text", "none", "long"],
)
def test_a_message_that_is_none_ends_nothing(fleet, caplog, body):
    first, _ = fleet.engines
    with connected(first) as sock:
        welcome(first, sock)
        sock.send_multipart([b"", b"1", body])
        sock.send_multipart([b"only", b"two"])
        until(lambda: "a question that is none of ours: 127.0.0.1: " in caplog.text)
    with connected(first) as sock:
        welcome(first, sock)
    assert not any(record.exc_info for record in caplog.records)
    params = fleet.prefill(first, tokens(200))
    fleet.decode(fleet.engines[1], tokens(200), params)
    assert connector_of(fleet.engines[1]).num_fetched == 1
    fleet.check()


def test_a_message_that_is_too_long_is_not_held(fleet):
    first, _ = fleet.engines
    with connected(first) as sock:
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.send_multipart([b"", b"1", bytes(MAX_QUESTION_BYTES + 1)])
        is_closed = monitor.poll(10_000)
        sock.disable_monitor()
        monitor.close()
        assert is_closed
    with connected(first) as sock:
        welcome(first, sock)


def bent(kind, **changes):
    """A lie: in messages of that kind these fields are what is made of them."""

    def lie(answer):
        if type(answer) is not kind:
            return answer
        fields = msgspec.to_builtins(answer, builtin_types=(bytes,))
        return msgspec.msgpack.encode(
            {
                name: changes[name](value) if name in changes else value
                for name, value in fields.items()
            }
        )

    return lie


def far(answer):
    """Piles of pages, and what is lent lies far up there."""
    for lie in (
        bent(Welcome, layout=lambda rows: [[[*row[:3], 2**40] for row in kind] for kind in rows]),
        bent(Granted, pages=lambda pages: [2**33 + page for page in pages]),
    ):
        if isinstance(answer, msgspec.Struct):
            answer = lie(answer)
    return answer


def instead(kind, other):
    return lambda answer: other if type(answer) is kind else answer


LIES = {
    "pages from 2^33": far,
    "more pieces than can be numbered": bent(
        Welcome, layout=lambda rows: [[[*row[:3], 2**31 - 1] for row in kind] for kind in rows]
    ),
    "smaller pieces": bent(
        Welcome,
        layout=lambda rows: [[[*row[:2], row[2] // 2, row[3]] for row in kind] for kind in rows],
    ),
    "an address that is none": bent(Welcome, metadata=lambda _: b"\xff"),
    "an address of others": bent(Welcome, metadata=lambda _: b"\x92\xa810.0.0.1\x50"),
    "no welcome": instead(Welcome, Gone()),
    "a nested welcome": instead(Welcome, DEEP),
    "a welcome in no text": instead(Welcome, BROKEN_TEXT[0]),
    "a page that there is not": bent(Granted, pages=lambda pages: [10**6, *pages[1:]]),
    "a negative page": bent(Granted, pages=lambda pages: [-1, *pages[1:]]),
    "fewer pages": bent(Granted, pages=lambda pages: pages[1:]),
    "a slot that there is not": bent(Granted, slot=lambda _: 10**6),
    "no slot": bent(Granted, slot=lambda _: None),
    "another prompt": bent(Granted, key=lambda _: bytes(16)),
    "a refusal that fakes lines": instead(Granted, Declined("no\n2026 ERROR\x1b[31m all is lost")),
    "a refusal that fills the log": instead(
        Granted, msgspec.msgpack.encode({"type": "Refused", "why": "x" * 10**6})
    ),
    "a nested lease": instead(Granted, DEEP),
    "a lease that has ended": instead(Released, Released(False)),
    "an end in no text": instead(Released, BROKEN_TEXT[0]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_what_a_peer_lies_about_is_computed_and_ends_nothing(tiny, others, caplog, lie):
    fleet, (first, second) = others, others.engines
    assert first.reset_prefix_cache()
    assert second.reset_prefix_cache()
    fetched, failed = connector_of(second).num_fetched, connector_of(second).num_failed
    params = fleet.prefill(first, tokens(200))
    liar = Liar(first, Random(0), lie=lie)
    try:
        assert is_computed(tiny, fleet, tokens(200), params | {"remote_port": liar.port})
        assert connector_of(second).num_fetched == fetched
        assert connector_of(second).num_failed == failed + 1
    finally:
        liar.close()
    said = [record.getMessage() for record in caplog.records]
    assert any(f"at 127.0.0.1:{liar.port}: " in line for line in said)
    assert all(line.isprintable() and len(line) < 1000 for line in said)
    assert not any(record.exc_info for record in caplog.records)
    params = fleet.prefill(first, tokens(200, 2))
    assert not is_computed(tiny, fleet, tokens(200, 2), params)
    connector_of(first).leases.end()
    fleet.check()


def test_a_peer_that_is_honest_is_read_from(tiny, fleet):
    """Else the tests of lies would show nothing."""
    first, _ = fleet.engines
    params = fleet.prefill(first, tokens(200))
    liar = Liar(first, Random(0))
    try:
        assert not is_computed(tiny, fleet, tokens(200), params | {"remote_port": liar.port})
    finally:
        liar.close()
    connector_of(first).leases.end()
    fleet.check()


def test_who_is_no_peer_is_not_heard(tiny, caplog):
    """Nor read from: an engine takes the address of a connection, not what it says of itself."""
    extra = {"peers": ["127.0.0.2"]}
    first, second = (open_engine(tiny.folder, "socket", extra=extra) for _ in range(2))
    with running(first, second) as fleet:
        params = fleet.prefill(first, tokens(200))
        with connected(first) as sock:
            sock.send_multipart([b"", b"hello", ENCODER.encode(connector_of(first).links.hello)])
            with connected(first, "127.0.0.2") as peer:
                welcome(first, peer)
            until(lambda: "a connection of no peer's is refused" in caplog.text)
            assert not sock.poll(0)
        with pytest.raises(InvalidRequestError, match=r"remote_host='127\.0\.0\.1'"):
            fleet.add(second, tokens(200), params)
        assert not list(connector_of(second).links._peers.sockets)
        connector_of(first).leases.end()
        fleet.check()


def test_a_reader_that_is_no_peer_is_asked_nothing(tiny):
    """The next turn is looked for where a hello says, so that has to be a peer's address too."""
    first = open_engine(tiny.folder, "socket")
    with running(first) as fleet:
        hello = msgspec.structs.replace(connector_of(first).links.hello, host="10.0.0.1", port=80)
        lease = fleet.prefill(first, tokens(200))["remote_request_id"]
        with connected(first) as sock:
            sock.send_multipart([b"", b"1", ENCODER.encode(hello)])
            sock.send_multipart(
                [b"", b"2", msgspec.msgpack.encode({"type": "Release", "lease": lease})]
            )
            assert sock.poll(10_000)
            sock.recv_multipart()
            assert sock.poll(10_000)
            sock.recv_multipart()
        fleet.check()
        assert not connector_of(first)._readers


def test_a_thousand_requests_that_name_others_end_nothing(tiny):
    """Each is answered; no more engines are asked than may be unknown at a time. At half of the
    addresses somebody listens who says nothing, at the others nobody."""
    first, second = (open_engine(tiny.folder, "socket", extra={"timeout_s": 30}) for _ in range(2))
    with running(first, second) as fleet, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(100)
        ]
        params, links, most = fleet.prefill(first, tokens(90)), connector_of(second).links, 0
        for number in range(1100):
            port, host = 20_000 + number, f"127.0.{number // 250}.9"
            if number % 2 == 0:
                port, host = silent[number // 2 % 100], "127.0.0.1"
            given = params | {"remote_port": port, "remote_host": host}
            job = fleet.add(second, tokens(2), given, greedy(1))
            if number % 100:
                second.abort(job)
            else:
                fleet.run(job)
            most = max(most, len(links._peers._known))
        assert 1 < most <= 64
        let_time_pass(second, 31.0)  # those that are silent are given up
        params = fleet.prefill(first, tokens(200, 2))
        assert not is_computed(tiny, fleet, tokens(200, 2), params)
        connector_of(first).leases.end()
        fleet.check()


def test_without_files_transfers_fail_and_engines_go_on(tiny, fleet, caplog):
    """A connection cannot be accepted, nor a socket made."""
    first, _ = fleet.engines
    tiny.expected(tokens(200), greedy(4))  # its engine reads files
    gc.collect()  # a file of an earlier test, closed meanwhile, would leave room for a socket
    params = fleet.prefill(first, tokens(200))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno() + 2, limits[1]))
    probe.close()
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(socket.socket())
        assert is_computed(tiny, fleet, tokens(200), params)
    finally:
        for sock in taken:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "no socket for 127.0.0.1" in caplog.text
    params = fleet.prefill(first, tokens(200, 2))
    assert not is_computed(tiny, fleet, tokens(200, 2), params)
    connector_of(first).leases.end()
    fleet.check()


def test_without_peers_nothing_is_exchanged(tiny, caplog):
    """No port is opened, and whoever asks for an exchange is told what to set."""
    engine = open_engine(tiny.folder, "socket", extra={"peers": []})
    with running(engine) as fleet:
        assert connector_of(engine) is None
        assert "kv_transfer_config lists no peers" in caplog.text
        for params in (PREFILL, REMOTE):
            with pytest.raises(InvalidRequestError, match=r"list their addresses or networks"):
                fleet.add(engine, tokens(90), params)
        fleet.decode(engine, tokens(90), {"do_remote_prefill": False, "tp_size": 2})


def test_any_peer_is_taken_with_a_warning(tiny, caplog):
    first, second = (open_engine(tiny.folder, "socket", extra={"peers": "any"}) for _ in range(2))
    with running(first, second) as fleet:
        assert "takes any peer: whoever sends requests with kv_transfer_params" in caplog.text
        fleet.decode(second, tokens(200), fleet.prefill(first, tokens(200)))
        assert connector_of(second).num_fetched == 1
        fleet.check()


@pytest.mark.parametrize(
    ("peers", "host", "is_one"),
    [
        (["10.0.0.8"], "10.0.0.8", True),
        (["10.0.0.8"], "10.0.0.9", False),
        (["10.0.0.0/24", "fd00::/8"], "10.0.0.255", True),
        (["10.0.0.0/24", "fd00::/8"], "fd00::1", True),
        (["10.0.0.0/24"], "::ffff:10.0.0.7", True),
        (["10.0.0.0/24"], "::ffff:10.0.1.7", False),
        (["127.0.0.1"], "127.1", False),
        (["127.0.0.1"], "0x7f000001", False),
        (["127.0.0.1"], "127.0.0.1 ", False),
        (["fe80::/10"], "fe80::1%eth0;tcp", False),
        ("any", "192.168.1.1", True),
        ("any", "::1", True),
        ("any", "host.example", False),
        ([], "127.0.0.1", False),
    ],
)
def test_addresses_of_peers(peers, host, is_one):
    assert (host in PeerNetworks.read(peers)) is is_one


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"remote_host": "10.1.2.3"}, "remote_host='10.1.2.3'"),
        ({"remote_host": "localhost"}, "remote_host='localhost'"),
        ({"remote_host": "127.0.0.1;10.0.0.1"}, "remote_host"),
        ({"remote_host": "::ffff:10.0.0.1"}, "remote_host"),
        ({"remote_host": "fe80::1%eth0"}, "remote_host"),
        ({"remote_host": "127.0.0.1" * 100}, "remote_host"),
        ({"remote_host": "\ud800"}, "remote_host"),
        ({"remote_port": 0}, "remote_port=0"),
        ({"remote_port": 2**70}, "remote_port=int"),
        ({"remote_request_id": "a" * 33}, "remote_request_id"),
        ({"remote_request_id": "\ud800"}, "remote_request_id"),
        ({"remote_num_tokens": -1}, "remote_num_tokens=-1"),
        ({"do_remote_prefill": "no"}, "do_remote_prefill='no'"),
        ({"do_remote_decode": 1}, "do_remote_decode=1"),
    ],
)
def test_parameters_that_name_no_peer_are_refused(others, changes, named):
    first, second = others.engines
    params, known = (
        others.prefill(first, tokens(90)),
        set(connector_of(second).links._peers._known),
    )
    with pytest.raises(InvalidRequestError, match=named):
        others.add(second, tokens(90), params | changes)
    assert set(connector_of(second).links._peers._known) == known, "nobody new is asked"
    others.decode(second, tokens(90), params)
    others.check()
