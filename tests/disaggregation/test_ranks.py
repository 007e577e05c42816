"""Engines of several ranks exchange KV and states: rank r reads from rank r, and what is decided
for the first holds for all."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from concurrent.futures import Future
from unittest.mock import Mock

import msgspec
import pytest

from milepost.disaggregation.all_ranks import AllRanks, fencing
from milepost.disaggregation.commands import AddPeer, RankEndpoint, ReadPart, Synchronize, decode
from milepost.disaggregation.exchange import Access
from milepost.disaggregation.messages import Layout, MemoryRows
from milepost.disaggregation.part_reader import PartReader
from milepost.disaggregation.transport import TransferError
from milepost.engine.assembly import setup
from milepost.errors import EngineDeadError
from tests.disaggregation import test_beside, test_faults, test_transfers
from tests.disaggregation.conftest import DIVIDES, save_small
from tests.disaggregation.fleet import connector_of, open_engine, running
from tests.disaggregation.storm import Storm, open_storm
from tests.disaggregation.test_faults import is_computed, jump
from tests.disaggregation.test_transfers import output_of, report_of
from tests.engines import greedy, tokens
from tests.mtp import add_head
from tests.parallel.team import ThreadTeam
from tests.waiting import until

NUM_LOOKS = 8


@pytest.fixture
def tiny(tiny_of_two):
    return tiny_of_two


@pytest.fixture(autouse=True)
def team(monkeypatch):
    """Of real processes, for who wants them."""
    team = setup.Team
    monkeypatch.setattr(setup, "Team", ThreadTeam)
    return team


@pytest.fixture(autouse=True)
def readers(monkeypatch):
    """Those of all other ranks."""
    readers, make = [], Access.worker

    def note(*given):
        readers.append(make(*given))
        return readers[-1]

    monkeypatch.setattr(Access, "worker", note)
    return readers


def open_ranks(tiny, transport, num_ranks=2, timeout_s=0.5):
    extra = {"timeout_s": timeout_s}
    return open_engine(tiny.folder, transport, tensor_parallel_size=num_ranks, extra=extra)


@pytest.fixture
def fleet(tiny, transport):
    with running(*(open_ranks(tiny, transport) for _ in range(2))) as fleet:
        yield fleet


AS_ALONE = [
    test_transfers.test_pages_without_a_state_save_their_transfer,
    test_transfers.test_a_full_local_hit_moves_nothing,
    test_transfers.test_many_at_once_and_others_between,
    test_faults.test_a_lease_that_has_expired,
    test_faults.test_a_lease_that_expires_while_it_is_read,
    test_faults.test_a_slow_link_blocks_nobody_and_ends,
]


@pytest.mark.parametrize("test", AS_ALONE, ids=[test.__name__ for test in AS_ALONE])
def test_as_of_one_rank(tiny, fleet, test):
    given = {"tiny": tiny, "fleet": fleet}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


def converse(tiny, fleet):
    """Two turns: the answer's end comes back, and its bytes are those of one engine's."""
    first, second = fleet.engines
    prompt = tokens(150)
    params = fleet.prefill(first, prompt)
    assert params["tp_size"] == 2
    job = fleet.decode(second, prompt, params, greedy(66))
    assert report_of(job).loaded == {"remote": 149}
    prompt += [*output_of(job), *tokens(70, 3)]
    params = fleet.prefill(first, prompt)
    assert report_of(fleet.last_prefill).reused == 150 + 65, "as far as the answer's end"
    assert connector_of(first).num_fetched == 1
    job = fleet.decode(second, prompt, params)
    assert report_of(job).reused == len(prompt) - 1
    assert output_of(job) == tiny.expected(prompt, greedy(4))
    fleet.check()


def test_the_next_turn_fetches_the_answers_end(tiny, fleet):
    converse(tiny, fleet)


def test_what_one_rank_cannot_read_is_computed(tiny, fleet, readers, monkeypatch, caplog):
    """And what the other one has read of it is not used. The next one is read again."""
    second, prompt = fleet.engines[1], tokens(200)
    params = fleet.prefill(fleet.engines[0], prompt)

    def fail(*_):
        raise TransferError("on purpose")

    with monkeypatch.context() as patch:
        for reader in readers:
            patch.setattr(reader._transport, "begin", fail)
        assert is_computed(tiny, fleet, prompt, params)
    assert connector_of(second).num_failed == 1
    jump(fleet.engines[0], 31.0)
    assert "rank 1 cannot read its part: on purpose" in caplog.text
    assert "another rank could not read its part; the prompt is computed here" in caplog.text
    fleet.check()
    params = fleet.prefill(fleet.engines[0], tokens(200, 3))
    assert not is_computed(tiny, fleet, tokens(200, 3), params)
    fleet.check()


def test_nothing_is_used_or_freed_while_a_rank_still_writes(tiny, fleet, readers):
    """The first rank has its part long before; the time that all may take is over."""
    second, prompt = fleet.engines[1], tokens(200)
    params = fleet.prefill(fleet.engines[0], prompt)
    is_open, held, given_up = threading.Event(), [], []
    for reader in readers:
        transport = reader._transport
        transport.is_done, end = (lambda _: False), transport.cancel
        may_end = lambda t, end=end: is_open.is_set() and end(t)  # noqa: E731
        transport.cancel = lambda t, end=may_end: given_up.append(t) or end(t)
    job = fleet.add(second, prompt, params)
    fleet.until(lambda: given_up)
    for number in range(NUM_LOOKS):
        fleet.decode(second, tokens(9, number), None)
        held.append(second.scheduler.num_loading)
    assert held == [1] * NUM_LOOKS
    is_open.set()
    fleet.run(job)
    assert output_of(job) == tiny.expected(prompt, greedy(4))
    assert not report_of(job).loaded
    fleet.check()


@pytest.fixture
def held(monkeypatch):
    """What other ranks have not come to the end of."""
    held, do = [], PartReader.do

    def hold(reader, ticket, order):
        if isinstance(decode(order), Synchronize):
            held.append(lambda: do(reader, ticket, order))
        else:
            do(reader, ticket, order)

    monkeypatch.setattr(PartReader, "do", hold)
    return held


def test_nobody_reads_what_a_rank_has_not_computed(tiny, held):
    """The first one has, and has lent it."""
    engines = [open_ranks(tiny, "socket", timeout_s=20.0) for _ in range(2)]
    with running(*engines) as fleet:
        first, second = engines
        params = fleet.prefill(first, tokens(200))
        begin, begun = connector_of(second).transport.begin, []
        connector_of(second).transport.begin = lambda *given: begun.append(given) or begin(*given)
        job = fleet.add(second, tokens(200), params)
        fleet.until(lambda: connector_of(first).links._lender._claims)
        for number in range(NUM_LOOKS):
            fleet.decode(second, tokens(9, number), None)
        assert not begun
        for each in held:
            each()
        fleet.run(job)
        assert report_of(job).loaded == {"remote": 199}
        fleet.check()


def test_who_waits_for_a_rank_too_long_computes(tiny, fleet, held):
    first, _ = fleet.engines
    params = fleet.prefill(first, tokens(200))
    assert is_computed(tiny, fleet, tokens(200), params)
    lender = connector_of(first).links._lender
    fleet.until(lambda: not lender._readers and not lender._claims)
    for each in held:
        each()
    jump(first, 31.0)
    fleet.check()


def test_engines_of_one_and_of_two_ranks_are_refused_by_name(tiny, transport, caplog):
    engines = [open_ranks(tiny, transport, num_ranks) for num_ranks in (1, 2)]
    with running(*engines) as fleet:
        for said in ("2, and here it is 1", "1, and here it is 2"):
            params = fleet.prefill(fleet.engines[0], tokens(200))
            assert is_computed(tiny, fleet, tokens(200), params)
            until(lambda said=said: f"tensor_parallel_size={said}" in caplog.text)
            jump(fleet.engines[0], 31.0)
            fleet.check()
            fleet.engines[1].reset_prefix_cache()
            fleet.engines.reverse()


def test_beside_all_that_engines_of_ranks_can_have(tmp_path):
    """Whole experts on each rank, drafts of a head with experts, float8 KV, host memory."""
    headed = save_small(tmp_path, **DIVIDES)
    add_head(headed.folder)
    options = test_beside.DRAFTS | test_beside.FLOAT8 | test_beside.HOST
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    test_beside.test_answers_are_those_of_one_plain_engine(headed, options)


@pytest.mark.nightly
def test_transfers_between_ranks_that_go_wrong_at_random(tiny, transport):
    with running(*open_storm(tiny, transport, 40, tensor_parallel_size=2)) as fleet:
        storm = Storm(tiny, fleet, 40, seed=2, num_compared=10)
        for _ in range(8):
            storm.round()
        assert len(storm.counts) == 3


def test_ranks_in_processes_until_one_is_killed(tiny, team, monkeypatch):
    """Then their engine says so, and who lent to it has all of its memory again."""
    first = open_ranks(tiny, "socket")
    monkeypatch.setattr(setup, "Team", team)
    second = open_ranks(tiny, "socket", timeout_s=30.0)
    with running(first, second) as fleet:
        converse(tiny, fleet)
        transport, is_done = connector_of(second).transport, []
        transport._own.is_done = lambda _: bool(is_done.append(1))
        fleet.add(second, tokens(200, 8), fleet.prefill(first, tokens(200, 8)))
        fleet.until(lambda: is_done)
        os.kill(second._team.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 has ended: killed by signal 9"):
            fleet.decode(second, tokens(90), None, greedy(900))
        fleet.engines = [first]
        jump(first, 31.0)
        fleet.check()
        params = fleet.prefill(first, tokens(90, 2))
        assert params["remote_num_tokens"] == 89


# --- parts --------------------------------------------------------------------------------------


class Orders:
    """What a rank's reader is told, and what it answers."""

    def __init__(self, transport):
        self.is_ready = threading.Event()
        runner = Mock(fence=lambda: self.is_ready.is_set)
        self.answers, self.failures = [], []
        given = runner, 1, transport, lambda *answer: self.answers.append(answer)
        self.reader = PartReader(*given, self.failures.append)

    def give(self, ticket, order):
        self.reader.do(ticket, msgspec.msgpack.encode(order))


def test_a_rank_reads_once_its_own_device_has_come_so_far():
    transport = Mock(is_done=Mock(return_value=True))
    orders = Orders(transport)
    endpoint = RankEndpoint(b"there", Layout([], []))
    orders.reader.load(None)
    orders.give(1, AddPeer(7, [RankEndpoint(b"", Layout([], [])), endpoint]))
    orders.give(2, ReadPart(transfer=1, peer=7, lease="l", local=[3], remote=[4]))
    orders.give(3, Synchronize())
    orders.give(4, ReadPart(transfer=2, peer=8, lease="l", local=[3], remote=[4]))
    until(lambda: orders.answers)
    time.sleep(0.01)
    assert orders.answers == [(1, True)]
    assert not transport.begin.called
    orders.is_ready.set()
    until(lambda: len(orders.answers) == 4)
    assert sorted(orders.answers) == [(1, True), (2, True), (3, True), (4, False)]
    transport.add_peer.assert_called_once_with(b"there", endpoint.layout)
    transport.begin.assert_called_once_with(transport.add_peer.return_value, "l", [3], [4])
    orders.reader.close()


def test_what_a_reader_did_not_expect_ends_the_rank():
    """Else nobody would answer, and the first one wait for ever."""
    orders = Orders(Mock(add_peer=Mock(side_effect=ZeroDivisionError("on purpose"))))
    orders.give(1, AddPeer(7, [RankEndpoint(b"", Layout([], []))] * 2))
    until(lambda: orders.failures)
    assert not orders.answers
    orders.reader.close()


def endpoints(*counts, length=8):
    return [RankEndpoint(b"", Layout([MemoryRows(0, 8, length, count)], [])) for count in counts]


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (endpoints(5, 5, 5), "3 ranks, and here there are 2"),
        ([*endpoints(5), *endpoints(5, length=4)], "rank 1 has parts of another size"),
        (endpoints(5, 6), "rank 1 has not the pages and slots of the first"),
        (None, "no addresses of ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_not_read_from(there, why):
    asked = []
    transport = AllRanks(Mock(), endpoints(9, 9), asked.append)
    with pytest.raises(TransferError, match=why):
        transport.add_peer(msgspec.msgpack.encode(there), endpoints(5)[0].layout)
    transport.add_peer(msgspec.msgpack.encode(endpoints(5, 5)), endpoints(5)[0].layout)
    assert asked == [AddPeer(0, endpoints(5, 5))]


def test_a_rank_that_is_lost_is_no_transfer_that_fails():
    """Who knows whether it still writes? The engine ends."""
    asked = []
    transport = AllRanks(Mock(), endpoints(9, 9), lambda _: asked.append(Future()) or asked[-1])
    peer = transport.add_peer(msgspec.msgpack.encode(endpoints(5, 5)), endpoints(5)[0].layout)
    reading = transport.begin(peer, "l", [1], [1])
    assert not transport.is_done(reading)
    fence = fencing(lambda: lambda: True, lambda _: asked.append(Future()) or asked[-1])()
    assert not fence()
    for each in asked[1:]:
        each.set_exception(EngineDeadError("lost"))
    for call in (lambda: transport.is_done(reading), fence):
        with pytest.raises(EngineDeadError, match="lost"):
            call()
