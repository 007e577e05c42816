"""The known ways to corrupt what goes by another stream, each with copies that come late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from milepost.tiers.device_copies import DirectLink
from milepost.tiers.holdings import MeasuredRates
from tests.engines import THREE_LAYERS, ask, save_tiny, tiering_of, tokens


class LateEvent:
    def __init__(self, link: LateLink, number: int) -> None:
        self._link, self._number = link, number

    def query(self) -> bool:
        return self._number <= self._link.num_done

    def synchronize(self) -> None:
        while not self.query():
            self._link.go_on()

    def seconds(self) -> None:
        return None


class LateLink(DirectLink):
    """Copies beside the steps are made when somebody says so, and not before what they wait for;
    until then their targets hold garbage. What is copied in the order of the steps is made at once.
    """

    needs_staging = True

    def __init__(self) -> None:
        self.num_done = 0
        self.pending: list[tuple[LateEvent, list]] = []
        self.num_named = 0
        self.awaited: list[LateEvent] = []

    def now(self) -> LateEvent:
        return LateEvent(self, self.num_named)

    def order(self, event: LateEvent) -> None:
        self.awaited.append(event)

    def begin_step(self) -> None:
        """What a stream does with what waits for others."""
        while self.awaited:
            self.awaited.pop().synchronize()

    def copy_behind(self, event: LateEvent, copies: Sequence[tuple], *, up: bool) -> LateEvent:  # noqa: ARG002
        for target, _, (what, first, _, num, windows) in copies:
            for part in target.of(what).tensors:
                part[first : first + num].fill_(float("nan"))
            for page in windows:
                target.windows[page].fill_(float("nan"))
        self.num_named += 1
        self.pending.append((event, list(copies)))
        return LateEvent(self, self.num_named)

    def go_on(self) -> bool:
        """Make the next copy; whether there was one."""
        if not self.pending:
            return False
        event, copies = self.pending.pop(0)
        assert event.query(), "a copy waits for what was launched before it"
        self.copy(copies)
        self.num_done += 1
        return True


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    return save_tiny(folder, "qwen3_5", torch.float64, **THREE_LAYERS)


@pytest.fixture
def late(tiny, monkeypatch):
    """An engine whose copies are made one with each step at most."""
    link = LateLink()
    monkeypatch.setattr("milepost.tiers.device_copies.DirectLink", lambda: link)
    llm = tiny.open(
        num_pages=14, num_slots=4, max_num_seqs=3, max_num_batched_tokens=128, cache_host_gib=0.05
    )
    tiering = tiering_of(llm.llm_engine)
    tiering.tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    poll = tiering.transfers.poll

    def go_on_sometimes(_=0.0):
        link.go_on()
        return poll()

    tiering.transfers.wait = go_on_sometimes
    return llm, link


def turns(llm, tiny, num=3):
    """Conversations that push each other out, a turn of each after the other."""
    histories = [tokens(150 + 40 * index, seed=index) for index in range(4)]
    num_loaded = 0
    for turn in range(num):
        for index, history in enumerate(histories):
            (output,) = ask(llm, history)
            tiny.check([output])
            num_loaded += sum(output.cache_report.loaded.values())
            histories[index] = [*history, *output.outputs[0].token_ids, *tokens(9, seed=turn)]
    return num_loaded


def test_copies_that_come_late_change_nothing(late, tiny):
    llm, link = late
    assert turns(llm, tiny) > 300
    assert link.num_done > 10


def test_what_is_read_before_its_copy_is_there_is_found_out(late, tiny, monkeypatch):
    """Without the wait: what is filed as there is garbage, and the answers show it."""
    llm, _ = late
    monkeypatch.setattr(LateEvent, "query", lambda _: True)
    with pytest.raises(AssertionError):
        turns(llm, tiny)


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_staging_place_is_used_again_only_once_it_is_read(late, tiny, monkeypatch, is_reused):
    """States of two prompts go by it, the second while the first is still to be copied on."""
    llm, _ = late
    copies = tiering_of(llm.llm_engine).transfers.copies
    store = copies.store

    def reuse(stores):
        done = store(stores)
        staged, _ = copies._leaving.pop()
        for what, place in staged:
            copies._free[what == "state"].append(place)
        return done

    if is_reused:
        monkeypatch.setattr(copies, "store", reuse)
    ask(llm, tokens(200), tokens(330, seed=3))
    assert llm.llm_engine.scheduler.cache.reset()
    (output,) = ask(llm, [*tokens(200)[:192], *tokens(20, seed=7)])
    assert output.cache_report.loaded == {"host": 192}
    if is_reused:
        with pytest.raises(AssertionError):
            tiny.check([output])
    else:
        tiny.check([output])


def test_what_leaves_is_copied_before_the_plan_writes_over_it(late, tiny, monkeypatch):
    """A source that is read behind the step holds what that has written."""
    llm, link = late
    copy, waiting = link.copy, []
    staging = tiering_of(llm.llm_engine).transfers.copies.staging

    def too_late(copies):
        is_staged = any(target is staging for target, *_ in copies)
        waiting.append(copies) if is_staged else copy(copies)

    def launch(plan, before=None, launch=llm.llm_engine.runner.launch):
        flight = launch(plan, before)
        while waiting:
            copy(waiting.pop(0))
        return flight

    monkeypatch.setattr(link, "copy", too_late)
    monkeypatch.setattr(llm.llm_engine.runner, "launch", launch)
    with pytest.raises(AssertionError):
        turns(llm, tiny)


def test_stores_of_a_step_that_was_cut_short_are_not_kept(late, tiny, monkeypatch):
    """Nobody knows what was copied: pages may have been moved, or half of it written over."""
    llm, _ = late
    transfers = tiering_of(llm.llm_engine).transfers
    with monkeypatch.context() as during:
        during.setattr(transfers, "poll", lambda: False)
        during.setattr(llm.llm_engine, "flush", lambda: None)
        ask(llm, tokens(200))
    assert transfers._storing, "copies are on their way"
    transfers.end_loads()
    assert not transfers.is_busy
    assert not len(transfers._tiers.host)
    assert llm.llm_engine.scheduler.cache.reset()
    (output,) = ask(llm, tokens(200))
    assert output.cache_report.loaded == {}
    tiny.check([output])


@pytest.fixture
def alone(late, monkeypatch):
    """The same, with nothing to do but wait: steps are launched behind what comes up."""
    llm, link = late
    engine, transfers = llm.llm_engine, tiering_of(llm.llm_engine).transfers
    del transfers.wait
    transfers._tiers.holdings.rates = MeasuredRates(
        tokens_per_s=1.0, host_bytes_per_s=1e12, load_s=0.0
    )
    launch = engine.runner.launch

    def begun(plan, before=None):
        link.begin_step()
        return launch(plan, before)

    monkeypatch.setattr(engine.runner, "launch", begun)
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: link.go_on())
    monkeypatch.setattr("milepost.tiers.transfers.time", clock)
    return llm, link


@pytest.mark.parametrize("is_long", [False, True])
def test_a_step_is_launched_behind_what_comes_soon_when_nothing_else_runs(
    alone, tiny, monkeypatch, is_long
):
    if is_long:
        monkeypatch.setattr("milepost.tiers.transfers.HASTE_S", -1.0)
    llm, link = alone
    ordered = []
    order, link.order = link.order, lambda event: (ordered.append(event), order(event))
    assert turns(llm, tiny, num=2) > 100
    assert bool(ordered) is not is_long


@pytest.mark.parametrize("defect", ["order", "pin"])
def test_a_step_that_does_not_wait_for_what_comes_is_found_out(alone, tiny, monkeypatch, defect):
    """And so is a place in host memory that is filled anew before it was read."""
    llm, link = alone
    if defect == "order":
        monkeypatch.setattr(link, "order", lambda _: None)
    else:
        transfers = tiering_of(llm.llm_engine).transfers
        arrive = transfers._arrive

        def scribble(loading):
            is_news, host = arrive(loading), transfers._tiers.host
            host.unpin(fetch.item for fetch in loading.fetches)
            for fetch in loading.fetches:
                if not fetch.item.pins:
                    for part in transfers.copies.host.of(fetch.item.what).tensors:
                        part[fetch.item.place].fill_(float("nan"))
            host.pin(fetch.item for fetch in loading.fetches)
            return is_news

        monkeypatch.setattr(transfers, "_arrive", scribble)
    with pytest.raises(AssertionError):
        turns(llm, tiny)


def test_a_state_is_taken_in_once(late, tiny, monkeypatch):
    """A slot that is said to hold another position than it does is refused."""
    llm, _ = late
    runner = llm.llm_engine.runner
    filled = runner.filled
    monkeypatch.setattr(runner, "filled", lambda slot, position: filled(slot, position - 1))
    with pytest.raises(Exception, match="S4"):
        turns(llm, tiny)


def test_pages_without_the_state_are_no_hit(late, tiny, monkeypatch):
    """KV alone leaves the recurrent layers behind: the load would end with a wrong answer."""
    llm, _ = late
    transfers = tiering_of(llm.llm_engine).transfers
    bring = transfers._bring

    def without_state(loading):
        loading.fetches = [f for f in loading.fetches if f.item.what != "state"]
        bring(loading)

    monkeypatch.setattr(transfers, "_bring", without_state)
    with pytest.raises(AssertionError):
        turns(llm, tiny)
