"""Of several ranks each keeps its part outside its device: what comes back answers as on one, and
nothing is used before all ranks have it."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

from milepost.engine.assembly import setup
from milepost.engine.assembly.rank_messages import Tickets
from milepost.errors import EngineDeadError
from milepost.tiers import disk as disk_module
from milepost.tiers.holdings import MeasuredRates
from milepost.tiers.rank_worker import RankTierWorker
from tests.engines import NUM_TOKENS, THREE_LAYERS, answer, ask, save_tiny, tiering_of, tokens
from tests.parallel.team import ThreadTeam

END = 300 + NUM_TOKENS - 1
WAIT_S = 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    sizes = THREE_LAYERS | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_5", torch.float64, **sizes)


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(setup, "Team", ThreadTeam)


def opened(tiny, **options):
    defaults = {"num_pages": 14, "num_slots": 4, "max_num_seqs": 3, "cache_host_gib": 0.05}
    llm = tiny.open(tensor_parallel_size=2, **(defaults | options))
    # Nothing is worth computing.
    tiering_of(llm.llm_engine).tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    return llm


def ask_again(llm, tiny, first, found):
    """What the device has forgotten comes from where it is kept."""
    assert llm.llm_engine.scheduler.cache.reset()
    follow_up = [*first.prompt_token_ids, *answer(first), *tokens(30, seed=99)]
    (again,) = ask(llm, follow_up)
    assert again.cache_report.loaded == found
    tiny.check([again])


def test_what_all_ranks_keep_comes_back_and_outlives_them(tiny, tmp_path):
    """In host memory, of which each rank takes its share; and in files of each rank's own."""
    llm = opened(tiny, cache_dir=str(tmp_path))
    (first,) = ask(llm, tokens(300))
    ask_again(llm, tiny, first, {"host": END})
    kept = tiering_of(llm.llm_engine).transfers.copies.host
    alone = tiny.open(num_pages=14, num_slots=4, cache_host_gib=0.05)
    whole = tiering_of(alone.llm_engine).transfers.copies.host
    assert kept.pages.item_bytes == whole.pages.item_bytes // 2
    assert len(kept.pages.tensors[0]) == pytest.approx(len(whole.pages.tensors[0]), rel=0.01)
    llm.llm_engine.close()
    assert len(list(tmp_path.iterdir())) == 2
    ask_again(opened(tiny, cache_dir=str(tmp_path)), tiny, first, {"disk": 320})


def test_what_one_rank_has_lost_is_computed(tiny, tmp_path):
    """Then it is written again."""
    llm = opened(tiny, cache_dir=str(tmp_path))
    (first,) = ask(llm, tokens(300))
    own = llm.llm_engine.scheduler.cache.identity.hex()
    llm.llm_engine.close()
    (others,) = (path for path in tmp_path.iterdir() if path.name != own)
    shutil.rmtree(others)
    for found in ({}, {"disk": 320}):
        llm = opened(tiny, cache_dir=str(tmp_path))
        ask_again(llm, tiny, first, found)
        llm.llm_engine.close()


@pytest.fixture
def gate(monkeypatch):
    """Other ranks' copies and files: while this is clear they are not over."""
    gate = threading.Event()
    gate.set()
    run = RankTierWorker._run
    monkeypatch.setattr(RankTierWorker, "_run", lambda *given: gate.wait(WAIT_S) and run(*given))
    yield gate
    gate.set()


def test_nothing_is_there_before_all_ranks_have_it(tiny, gate):
    """Neither what comes nor what leaves, however often rank 0 looks, whose own copy is made."""
    llm = opened(tiny)
    engine = llm.llm_engine
    tiering = tiering_of(engine)
    (first,) = ask(llm, tokens(300))
    assert engine.scheduler.cache.reset()
    num_looks, num_stored = [], tiering.tiers.stats.stored
    poll = tiering.transfers.poll

    def look():
        is_any = poll()
        if not gate.is_set() and (engine.scheduler.num_loading or tiering.transfers._storing):
            num_looks.append(engine.scheduler.num_loading)
            if len(num_looks) == 20:
                gate.set()
            elif num_looks.count(0) == 3:
                assert tiering.tiers.stats.stored == num_stored
                gate.set()
        return is_any

    tiering.transfers.poll = look
    gate.clear()
    follow_up = [*first.prompt_token_ids, *answer(first), *tokens(30, seed=99)]
    (again,) = ask(llm, follow_up)
    assert num_looks == [1] * 20
    assert again.cache_report.loaded == {"host": END}
    tiny.check([again])
    num_stored = tiering.tiers.stats.stored
    gate.clear()
    num_looks.clear()
    ask(llm, tokens(300, seed=5))
    assert num_looks == [0] * 3
    assert tiering.tiers.stats.stored > num_stored


def test_a_rank_whose_files_do_not_come_is_not_waited_for(tiny, tmp_path, monkeypatch):
    """What it reads later goes where nobody else has put anything."""
    monkeypatch.setattr(disk_module, "STALL_S", 0.05)
    llm = opened(tiny, cache_dir=str(tmp_path))
    (first,) = ask(llm, tokens(300))
    llm.llm_engine.close()
    llm = opened(tiny, cache_dir=str(tmp_path))
    gate, on_disk = threading.Event(), RankTierWorker._on_disk
    monkeypatch.setattr(
        RankTierWorker, "_on_disk", lambda *given: gate.wait(WAIT_S) and on_disk(*given)
    )
    tiers = tiering_of(llm.llm_engine).tiers
    ask_again(llm, tiny, first, {})
    assert tiers.stats.disk_rests == 1
    assert any(item.pins for item in tiers.host)
    gate.set()
    while llm.llm_engine.do_idle_work() or tiers.holdings.disk_rests:
        pass
    assert not any(item.pins for item in tiers.host)


def test_a_rank_that_cannot_copy_ends_the_engine(tiny, monkeypatch):
    monkeypatch.setattr(RankTierWorker, "_run", lambda self, ticket, _: self._answer(ticket, False))
    llm = opened(tiny)
    with pytest.raises(EngineDeadError, match="could not copy its part"):
        ask(llm, tokens(300))


def test_memory_that_one_rank_is_refused_none_has(tiny, monkeypatch, caplog):
    from milepost.tiers import arena

    allocate, counted = arena.allocate_host, threading.Lock()

    def allocate_once(*arguments, **options):
        if not counted.acquire(blocking=False):
            raise MemoryError("no more")
        return allocate(*arguments, **options)

    monkeypatch.setattr(arena, "allocate_host", allocate_once)
    llm = tiny.open(tensor_parallel_size=2, cache_host_gib=0.05)
    assert tiering_of(llm.llm_engine) is None
    assert "tiers: off, no more" in caplog.text
    tiny.check(ask(llm, tokens(90)))


def test_tickets():
    """All ranks are to answer, in any order; who asks of lost ones is told."""
    tickets = Tickets(2)
    (one, first), (other, second) = tickets.take(), tickets.take()
    tickets.answer(other, True)
    tickets.answer(one, False)
    assert not first.done()
    tickets.answer(one, True)
    assert (first.result(), second.done()) == (False, False)
    tickets.fail(EngineDeadError("lost"))
    for future in (second, tickets.take()[1]):
        with pytest.raises(EngineDeadError):
            future.result(0)
    tickets.answer(other, True)
