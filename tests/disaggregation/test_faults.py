"""What goes wrong between engines: every request ends right, and nothing stays held."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from milepost.cache.allocation import Loan
from milepost.disaggregation.leases import Leases
from milepost.disaggregation.links import Links
from milepost.disaggregation.messages import (
    VERSION,
    Find,
    Hello,
    Layout,
    MemoryRows,
    Release,
    misfit,
)
from milepost.disaggregation.peers import IDLE_S, Peer
from milepost.disaggregation.transport import TransferError
from milepost.errors import ConfigError
from milepost.kv_config import PeerNetworks
from tests.disaggregation.fleet import connector_of, let_time_pass, open_engine, running
from tests.disaggregation.storm import Storm, held_by_nixl, open_storm, resources
from tests.engines import greedy, tokens

SHORT = {"timeout_s": 0.4}


@pytest.fixture
def fleet(tiny, transport):
    engines = [open_engine(tiny.folder, transport, extra=SHORT) for _ in range(2)]
    with running(*engines) as fleet:
        yield fleet


def is_computed(tiny, fleet, prompt, params):
    """Whether the second engine answers right without anything of the first."""
    second = fleet.engines[1]
    job = fleet.decode(second, prompt, params)
    request = job.completions[0].request
    assert request.output_token_ids == tiny.expected(prompt, greedy(4))
    return not request.report.loaded


def jump(engine, seconds):
    """Move the clock that an engine's leases go by."""
    leases = connector_of(engine).leases
    clock = leases._clock
    leases._clock = lambda: clock() + seconds


def test_a_lease_that_has_expired(tiny, fleet):
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    jump(first, 31.0)
    fleet.until(lambda: first.poll() or not first.scheduler.cache.loans)
    assert is_computed(tiny, fleet, prompt, params)
    assert (connector_of(second).num_failed, connector_of(first).leases.num_expired) == (1, 1)
    fleet.check()


def test_a_lease_that_expires_while_it_is_read(tiny, fleet):
    """What was read may have been written over by then: it is not used."""
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    pulls = connector_of(second).links._pulls
    confirm = pulls._confirm

    def late(pull):
        jump(first, 31.0)
        confirm(pull)

    pulls._confirm = late
    assert is_computed(tiny, fleet, prompt, params)
    assert connector_of(second).num_failed == 1
    fleet.check()


def test_heartbeats_keep_a_lease(fleet):
    """A request that waits long for its turn still finds what was prefilled for it."""
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    lease = connector_of(first).leases.find(params["remote_request_id"])
    before = lease.expires_at
    connector_of(second).links._held_leases._beat_s = 0.01
    busy = [fleet.add(second, tokens(100, 5 + n), None, greedy(30)) for n in range(4)]
    job = fleet.add(second, prompt, params)
    fleet.until(lambda: lease.expires_at > before)
    assert job.completions[0].request.allocation is None, "it still waits"
    fleet.run(job, *busy)
    assert job.completions[0].request.report.loaded
    fleet.check()


LITTLE = {"num_pages": 6, "num_slots": 2, "max_model_len": 300, "extra": SHORT}
"""Memory for one of these prompts, but not for two."""


@pytest.mark.parametrize("is_fetched", [True, False])
def test_an_engine_that_has_lent_its_memory_waits(tiny, transport, is_fetched):
    """For whoever reads it, or the end of the lease."""
    first, second = (open_engine(tiny.folder, transport, **LITTLE) for _ in range(2))
    with running(first, second) as fleet:
        params = fleet.prefill(first, tokens(200))
        job = fleet.add(first, tokens(200, 1), None)
        fleet.until(lambda: first.awaits_others)
        if is_fetched:
            assert not is_computed(tiny, fleet, tokens(200), params)
        else:
            jump(first, 31.0)
        fleet.run(job)
        assert job.completions[0].request.output_token_ids == tiny.expected(
            tokens(200, 1), greedy(4)
        )
        assert connector_of(first).leases.num_expired == (not is_fetched)
        fleet.check()


def test_prompts_that_nobody_reads_leave_room_for_others(tiny, transport):
    """Only so many are lent; who would read the rest computes them, and all others run."""
    first, second = (
        open_engine(tiny.folder, transport, num_pages=16, max_model_len=300) for _ in "12"
    )
    with running(first, second) as fleet:
        prompts = [tokens(200, seed) for seed in range(5)]
        lent = [fleet.prefill(first, prompt) for prompt in prompts]
        assert [params is None for params in lent] == [False] * 3 + [True] * 2
        assert connector_of(first).counters["kv_leases_refused"] == 2
        job = fleet.add(first, tokens(200, 9), None)
        fleet.run(job)
        assert job.completions[0].request.output_token_ids == tiny.expected(
            tokens(200, 9), greedy(4)
        )
        assert not first.awaits_others
        assert is_computed(tiny, fleet, prompts[4], lent[4])
        assert not is_computed(tiny, fleet, prompts[0], lent[0])
        assert fleet.prefill(first, prompts[3]), "there is room again"
        jump(first, 31.0)
        fleet.until(lambda: first.poll() or not first.scheduler.cache.loans)
        fleet.check()


def test_engines_that_wait_for_each_other_do_not_for_ever(tiny, transport, monkeypatch):
    """Each has lent all its memory to a request that waits on the other, and keeps its lease."""
    engines = [open_engine(tiny.folder, transport, **LITTLE) for _ in range(2)]
    num_beats = []
    prolong = Leases.prolong
    monkeypatch.setattr(
        Leases, "prolong", lambda self, ids: num_beats.append(1) or prolong(self, ids)
    )
    with running(*engines) as fleet:
        prompts = [tokens(200), tokens(200, 1)]
        lent = [fleet.prefill(*pair) for pair in zip(engines, prompts, strict=True)]
        for engine in engines:
            connector_of(engine).links._held_leases._beat_s = 0.01
        pairs = zip(engines, reversed(prompts), reversed(lent), strict=True)
        jobs = [fleet.add(*each) for each in pairs]
        for _ in range(2):
            fleet.until(lambda: all(engine.awaits_others for engine in engines))
            before = len(num_beats)
            fleet.until(lambda: len(num_beats) > before + 5)  # noqa: B023
            for engine in engines:
                jump(engine, 20.0)
        fleet.run(*jobs)
        for job, prompt in zip(jobs, reversed(prompts), strict=True):
            assert job.completions[0].request.output_token_ids == tiny.expected(prompt, greedy(4))
        assert sum(connector_of(engine).leases.num_expired for engine in engines) >= 1
        fleet.check()


def test_an_engine_that_is_gone(tiny, transport, caplog):
    """Nobody waits for its answer as long as one may take."""
    engines = [open_engine(tiny.folder, transport, extra=SHORT) for _ in range(2)]
    with running(engines[1]) as fleet:
        fleet.engines.insert(0, engines[0])
        params = fleet.prefill(engines[0], tokens(200))
        engines[0].close()
        fleet.engines = engines[1:]
        job = fleet.decode(engines[1], tokens(200), params)
        assert job.completions[0].request.output_token_ids == tiny.expected(tokens(200), greedy(4))
        assert connector_of(engines[1]).num_failed == 1
        assert "its connection is lost, or nobody listens" in caplog.text
        fleet.check()


def test_an_engine_that_goes_away_while_it_is_read(tiny, transport):
    if transport == "nixl":
        pytest.skip("memory that is gone in the same process is another matter")
    engines = [open_engine(tiny.folder, transport, extra=SHORT) for _ in range(2)]
    with running(engines[1]) as fleet:
        first, second = engines
        fleet.engines.insert(0, first)
        params = fleet.prefill(first, tokens(200))
        begin = connector_of(second).transport.begin

        def begin_and_lose(*given):
            connector_of(first).transport.close()
            return begin(*given)

        connector_of(second).transport.begin = begin_and_lose
        job = fleet.decode(second, tokens(200), params)
        assert job.completions[0].request.output_token_ids == tiny.expected(tokens(200), greedy(4))
        assert connector_of(second).num_failed == 1
        fleet.engines = engines[1:]
        first.close()
        fleet.check()


def test_a_slow_link_blocks_nobody_and_ends(tiny, fleet):
    """Others are served meanwhile; what takes too long is given up."""
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    moving, given_up = connector_of(second).transport, []
    moving.is_done = lambda _: False
    moving.cancel = lambda transfer: bool(given_up.append(transfer)) or len(given_up) > 1
    slow = fleet.add(second, prompt, params)
    other = fleet.decode(second, tokens(90, 4), None)
    assert other.is_finished
    assert not slow.is_finished
    fleet.run(slow)
    assert slow.completions[0].request.output_token_ids == tiny.expected(prompt, greedy(4))
    assert len(given_up) == 2, "not before nobody writes any more"
    assert not slow.completions[0].request.report.loaded
    fleet.check()


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "place", ["before it is fetched", "before its turn to be read", "while it is read"]
)
def test_an_interrupted_step_ends_what_is_fetched_and_lent(tiny, fleet, monkeypatch, place):
    """Nobody knows how far the step has come, so nobody may write behind it."""
    first, second = fleet.engines
    other, prompt = tokens(100, 5), tokens(200)
    fleet.prefill(second, tokens(150, 6))
    params = fleet.prefill(first, prompt)
    busy = fleet.add(second, other, None, greedy(30))
    moving, given_up = connector_of(second).transport, []
    with monkeypatch.context() as patch:
        patch.setattr(moving, "is_done", lambda _: False)
        cancel = moving.cancel
        patch.setattr(moving, "cancel", lambda t: given_up.append(t) or cancel(t))
        job = fleet.add(second, prompt, params)
        if place == "before it is fetched":
            patch.setattr(connector_of(second), "fetch", _interrupt)
        elif place == "before its turn to be read":
            begin = type(connector_of(second)).fetch
            never = lambda loads, _: begin(connector_of(second), loads, lambda: False)  # noqa: E731
            patch.setattr(connector_of(second), "fetch", never)
            fleet.until(lambda: connector_of(second).links._pulls.begun_at())
            patch.setattr(second.runner, "collect", _interrupt)
        else:
            fleet.until(lambda: connector_of(second).links._pulls.begun_at())
            patch.setattr(second.runner, "collect", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            fleet.until(lambda: busy.is_finished)
    assert len(given_up) == (place == "while it is read")
    assert not second.scheduler.num_loading
    assert not second.scheduler.cache.loans
    connector_of(second).links.end_pulls()  # its thread has done all that it was told
    assert connector_of(second).links._held_leases.next_beat is None, "nobody keeps its lease"
    fleet.run(busy, job)
    assert job.completions[0].request.output_token_ids == tiny.expected(prompt, greedy(4))
    assert busy.completions[0].request.output_token_ids == tiny.expected(other, greedy(30))
    fleet.check()


def test_the_end_of_the_thread_that_speaks_is_no_hang(fleet):
    """What it did not expect ends it, and the engine says so instead of waiting."""
    first, second = fleet.engines
    params = fleet.prefill(first, tokens(200))

    def fail(_):
        raise ZeroDivisionError("on purpose")

    connector_of(second).transport.is_done = fail
    with pytest.raises(RuntimeError, match="speaks with other engines"):
        fleet.decode(second, tokens(200), params)
    with pytest.raises(RuntimeError, match="speaks with other engines"):
        connector_of(second).links.end_pulls()


def test_nobody_looks_while_nothing_is_read(fleet, monkeypatch):
    """An idle engine takes no processor time; it looks at what others read only while they do."""
    first, second = fleet.engines
    links, looks = [connector_of(engine).links for engine in fleet.engines], []
    transport = connector_of(first).transport
    make_progress = transport.make_progress
    monkeypatch.setattr(transport, "make_progress", lambda: looks.append(1) or make_progress())
    params = fleet.prefill(first, tokens(200))
    assert not looks
    assert [link._look_s() for link in links] == [None, None]
    fleet.decode(second, tokens(200), params)
    fleet.until(lambda: not connector_of(first).links._lender.begun_at())
    assert looks
    assert [link._look_s() for link in links] == [None, None]
    fleet.check()


def test_what_a_lease_is_of_is_asked_while_a_request_waits(tiny, fleet):
    """So its turn begins with reading; and who lends does not look for a reader until then."""
    first, second = fleet.engines
    prompt = tokens(200)
    params = fleet.prefill(first, prompt)
    busy = [fleet.add(second, tokens(100, 5 + n), None, greedy(30)) for n in range(4)]
    job = fleet.add(second, prompt, params)
    claims = connector_of(second).links._pulls._claims
    fleet.until(lambda: claims and all(claim.answer for claim in claims.values()))
    assert job.completions[0].request.allocation is None, "it still waits"
    assert not connector_of(first).links._lender.begun_at()
    asked, ask = [], Peer.ask
    (peer,) = connector_of(second).links._peers._known.values()
    peer.ask = lambda what, then, **how: asked.append(what) or ask(peer, what, then, **how)
    fleet.run(job, *busy)
    assert set(job.completions[0].request.report.loaded) == {"remote"}
    assert [type(what) for what in asked] == [Release]
    assert not claims
    fleet.check()


def test_what_is_lent_of_another_prompt_is_not_taken(tiny, fleet):
    first, _ = fleet.engines
    params = fleet.prefill(first, tokens(200, 1))
    assert is_computed(tiny, fleet, tokens(200, 2), params)
    fleet.check()


def test_a_lease_that_nobody_wants_ends(fleet):
    """The engine that was to decode is gone: what it would have read is free again."""
    first, _ = fleet.engines
    fleet.prefill(first, tokens(200))
    assert not first.reset_prefix_cache(), "somebody may read"
    jump(first, 29.0)
    first.poll()
    assert len(connector_of(first).leases) == 1
    jump(first, 2.0)
    assert first.reset_prefix_cache()
    fleet.check()


def test_a_restarted_engine_is_said_hello_to_again(tiny, fleet):
    first, second = fleet.engines
    fleet.decode(second, tokens(200), fleet.prefill(first, tokens(200)))
    connector_of(first).links._lender._hellos.clear()  # as another that listens there now
    for seed in (3, 4):  # the first may be computed: that depends on when it hears of it
        prompt = tokens(200, seed)
        is_last_computed = is_computed(tiny, fleet, prompt, fleet.prefill(first, prompt))
    assert not is_last_computed
    jump(first, 31.0)
    fleet.until(lambda: first.poll() or not first.scheduler.cache.loans)
    fleet.check()


def test_an_engine_that_nobody_asks_is_let_go_of(tiny, fleet):
    """Engines come and go; one that is asked again is said hello to."""
    first, second = fleet.engines
    links = connector_of(second).links
    fleet.decode(second, tokens(200), fleet.prefill(first, tokens(200)))
    assert list(links._peers.sockets)
    let_time_pass(second, IDLE_S + 3600.0)
    assert not list(links._peers.sockets)
    prompt = tokens(200, 3)
    assert not is_computed(tiny, fleet, prompt, fleet.prefill(first, prompt))
    fleet.check()


def test_a_hundred_transfers_that_go_wrong_at_random(tiny, transport):
    """At once: aborted, slow, without a lease or interrupted, and nothing is left of any."""
    with running(*open_storm(tiny, transport, 100)) as fleet:
        storm = Storm(tiny, fleet, 100, seed=3, num_compared=10)
        storm.round()
        held = resources()
        storm.round()
        assert all(now <= then for now, then in zip(resources(), held, strict=True))
        assert storm.counts["aborted"] > 20
        assert storm.counts["fetched"] + storm.counts["computed"] > 20


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_registered_memory_is_back_to_the_start_after_faults(tiny, transport):
    """Behind a round that goes wrong NIXL reads no more; behind a peer that is let go of it knows
    nobody, and behind the engines' end nothing of theirs is registered."""
    first, second = engines = open_storm(tiny, transport, 100)
    with running(*engines) as fleet:
        start = [held_by_nixl(first, [second]), held_by_nixl(second, [first])]
        assert [(held.peers, held.transfers) for held in start] == [(0, 0), (0, 0)]
        storm = Storm(tiny, fleet, 100, seed=3, num_compared=1)
        storm.round()
        assert storm.counts["aborted"] > 20
        assert storm.counts["fetched"]
        assert held_by_nixl(first, [second]) == start[0]
        assert held_by_nixl(second, [first]) == replace(start[1], peers=1)
        let_time_pass(second, IDLE_S + 3600.0)
        assert held_by_nixl(second, [first]) == start[1]
    for engine in engines:
        assert held_by_nixl(engine, []).registered < start[0].registered


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_of_an_engine_whose_pieces_are_not_registered_nothing_is_kept(fleet):
    first, second = fleet.engines
    moving, start = connector_of(second).transport, held_by_nixl(second, [first])
    elsewhere = Layout([MemoryRows(64, 64, 64, 10)], [MemoryRows(64, 8, 8, 3)])
    for _ in range(2):
        with pytest.raises(TransferError):
            moving.add_peer(connector_of(first).transport.metadata(), elsewhere)
        assert held_by_nixl(second, [first]) == start


def test_a_question_of_what_are_no_tokens_ends_no_engine(tiny, fleet):
    first, second = fleet.engines
    asking = connector_of(second)
    asking._finds[7] = b"page"
    asking.links.find(7, connector_of(first).place, Find(tokens=bytes(5), salt="", least=0))
    fleet.until(lambda: not asking._finds)
    params = fleet.prefill(first, tokens(200))
    assert not is_computed(tiny, fleet, tokens(200), params), "it is said hello to again"
    fleet.check()


def hello(**own):
    layout = Layout([MemoryRows(0, 64, 64, 10)], [MemoryRows(0, 8, 8, 3)])
    given = {"identity": b"a", "engine_id": "e", "transport": "nixl", "host": "h", "port": 1}
    return Hello(**{"version": VERSION, "layout": layout, **given, **own})


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"transport": "socket"}, "transport"),
        ({"identity": b"b"}, "model"),
        ({"num_ranks": 2}, "tensor_parallel_size=2, and here it is 1"),
        ({"layout": Layout([MemoryRows(0, 32, 32, 10)], [MemoryRows(0, 8, 8, 3)])}, "page size"),
    ],
)
def test_engines_that_do_not_fit_are_refused_by_name(own, named):
    assert named in misfit(hello(**own), hello())
    assert not misfit(hello(port=5, host="x"), hello())
    more = Layout([MemoryRows(7, 640, 64, 99)], [MemoryRows(0, 8, 8, 30)])
    assert not misfit(hello(layout=more), hello()), "their sizes are their own"


def test_another_page_size_is_computed_and_said(tiny, transport, caplog):
    first = open_engine(tiny.folder, transport, extra=SHORT)
    second = open_engine(tiny.folder, transport, extra=SHORT, page_size=32)
    with running(first, second) as fleet:
        params = fleet.prefill(first, tokens(200))
        assert is_computed(tiny, fleet, tokens(200), params)
        assert "page size" in caplog.text
        jump(first, 31.0)
        fleet.until(lambda: first.poll() or not first.scheduler.cache.loans)
        fleet.check()


def test_leases_go_by_their_clock():
    now = [0.0]
    leases = Leases(30.0, lambda: now[0])
    loans = [Loan(position=n, pages=(n,), slot=n) for n in range(3)]
    for number, loan in enumerate(loans):
        leases.grant(str(number), loan, b"", b"", lambda: True)
    now[0] = 29.0
    leases.prolong(["1", "none"])
    assert leases.take_over() == {}
    now[0] = 30.0
    assert leases.find("0") is None, "over, though nobody has noticed yet"
    assert not leases.release("0")
    assert leases.take_over() == {"0": loans[0], "2": loans[2]}
    assert leases.release("1")
    assert not leases.release("1")
    assert leases.take_over() == {"1": loans[1]}
    assert (len(leases), leases.num_expired, leases.num_granted) == (0, 2, 3)


def test_heartbeats_keep_no_lease_for_good():
    now = [0.0]
    leases = Leases(30.0, lambda: now[0])
    leases.grant("a", Loan(position=1, pages=(1,), slot=1), b"", b"", lambda: True)
    while leases.find("a") is not None and now[0] < 3000.0:
        now[0] += 15.0
        leases.prolong(["a"])
    assert now[0] == 600.0
    assert not leases.release("a")
    assert list(leases.take_over()) == ["a"]


def test_an_address_that_cannot_be_had_is_one_error():
    leases = Leases(1.0, lambda: 0.0)
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        Links(
            msgspec.structs.replace(hello(), host="nowhere.invalid"),
            None,
            leases,
            peers=PeerNetworks(),
            timeout_s=1.0,
            lease_s=1.0,
            clock=lambda: 0.0,
            ring=lambda: None,
        )


def test_a_backend_that_there_is_none_of_is_one_error(tiny, transport):
    if transport != "nixl":
        pytest.skip("the socket has none")
    with pytest.raises(ConfigError, match=r"backends=\['NOPE'\]"):
        open_engine(tiny.folder, transport, extra={"backends": ["NOPE"]})


def test_memory_is_read_where_engines_are_reached(tiny):
    """Over TCP at the engine's own address, as what engines say to each other."""
    engine = open_engine(tiny.folder, "socket", ip="127.0.0.2")
    with running(engine, open_engine(tiny.folder, "socket")) as fleet:
        host, _ = msgspec.msgpack.decode(connector_of(engine).transport.metadata())
        assert host == "127.0.0.2"
        fleet.decode(fleet.engines[1], tokens(200), fleet.prefill(engine, tokens(200)))
        assert connector_of(fleet.engines[1]).num_fetched == 1
        fleet.check()


def test_nothing_is_written_to_standard_output(tiny, transport, capfd):
    """What reads it waits for a server's address."""
    with running(open_engine(tiny.folder, transport)):
        pass
    assert capfd.readouterr().out == ""
