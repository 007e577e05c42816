"""Ranks in processes of their own: they answer as one does, and when one is lost all streams are
told and no process is left."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import msgspec
import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.config import EngineConfig
from milepost.engine.assembly import AnnexCommand, setup, team
from milepost.engine.assembly.team import OtherRanks, RankMessage, Team, TicketedCommand
from milepost.engine.processes import starting
from milepost.engine.processes.client import EngineClient
from milepost.engine.processes.engine import Engine, Loop
from milepost.engine.processes.rank import follow
from milepost.engine.prompts import Prompt
from milepost.errors import ConfigError, EngineDeadError
from milepost.frames import read_frames
from milepost.kernels import norm
from milepost.parallel.gloo import GlooLink, open_store
from milepost.parallel.gpu import far_behind
from milepost.scheduler.plans import StepPlan, StepResult
from tests import forked
from tests.parallel.team import ThreadTeam

SMALL = {"num_pages": 64, "num_slots": 8, "max_model_len": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def engine_that_tells(config: EngineConfig) -> Engine:
    """Its ranks' process ids stand among its defaults."""
    made = Engine(config)
    made.sampling_defaults = {str(pid): pid for pid in made._team.pids}
    return made


def test_two_processes_answer_as_one_until_a_rank_is_killed(monkeypatch):
    """Then every stream says which, and no process is left."""
    monkeypatch.setattr(starting, "CONTEXT", forked.context())
    alone = LLM(**SMALL)
    prompts = [list(range(10, 40 + index)) for index in range(3)]

    async def run() -> None:
        config = EngineConfig(tensor_parallel_size=2, **SMALL)
        client = EngineClient(config, make_engine=engine_that_tells)
        ready = await client.start()
        pids = [client.pid, *ready.sampling_defaults.values()]
        for _ in range(2):
            found = alone.generate(
                [{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False
            )
            for output, token_ids in zip(found, prompts, strict=True):
                stream = client.add([Prompt(token_ids=token_ids)], GREEDY)
                parts = [part async for arrived in stream for _, part in arrived]
                text = "".join(delta.text for part in parts for delta in part.deltas)
                assert text == output.outputs[0].text
                stream.close()
        long = SamplingParams(max_tokens=900, ignore_eos=True)
        streams = [client.add([Prompt(token_ids=each)], long) for each in prompts]
        for stream in streams:
            await anext(stream)
        os.kill(pids[1], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1 has ended: killed by signal 9"):
                async for _ in stream:
                    pass
            stream.close()
        await client.close()
        assert len(pids) == 2
        assert all(map(is_gone, pids))

    asyncio.run(run())


def test_a_rank_leaves_the_end_to_the_first_one_and_is_gone_once_the_engine_is_closed(tmp_path):
    """Slurm sends SIGTERM to every process of a job, and answers may be running.

    The engine's owner keeps it. On GPUs the ranks also hold memory and torch's only process group,
    so that an engine that is opened afterwards in the same process would find neither. The runner
    goes first, since NCCL ends only once no CUDA graph holds its operations.
    """
    runners = []

    def note_runner() -> None:
        gc.collect()
        runners.append(runner())

    with LLM(tensor_parallel_size=2, cache_dir=str(tmp_path), **SMALL) as llm:
        runner, team = weakref.ref(llm.llm_engine.runner), llm.llm_engine._team
        team.closing.append(note_runner)
        pids = team.pids
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)
        assert not any(map(is_gone, pids))
    assert len(pids) == 1
    assert all(map(is_gone, pids))
    assert runners == [None]


def test_nobody_outside_the_machine_reaches_where_ranks_meet():
    store = open_store(0, 2, 30, is_first=True)
    open_store(store.port, 2, 30, is_first=False).set("rank 1", "is here")
    assert store.get("rank 1") == b"is here"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 5)


def test_a_rank_that_hangs_is_given_up():
    """Whoever waits for it is told, after as long as it may be silent. Before, all ranks hold the
    same sums."""
    store = open_store(0, 2, 30, is_first=True)

    def link(rank):
        own = store if rank == 0 else open_store(store.port, 2, 30, is_first=False)
        return GlooLink(own, rank, 2, timeout_s=900, why_lost=lambda: f"said to rank {rank}")

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(link, range(2))
        assert list(threads.map(lambda each: each.least(5 + each.rank), (first, second))) == [5, 5]
        hidden, scale, partials = torch.ones(3, 4), torch.rand(4), torch.randn(2, 3, 2, 4)
        found = list(
            threads.map(
                lambda each: each.add_norm(hidden, partials[each.rank], scale, 1e-6, 0.5),
                (first, second),
            )
        )
        expected = norm.add_norm(hidden, partials.sum((0, 2)), scale, 1e-6, 0.5)
        for pair, other in zip(zip(*found, strict=True), expected, strict=True):
            assert torch.equal(*pair)
            torch.testing.assert_close(pair[0], other)
        first.wait_up_to(0.2)
        with pytest.raises(EngineDeadError, match="said to rank 0"):
            first.all_reduce(torch.ones(2))


def test_what_several_threads_tell_ranks_comes_whole():
    """The engine's, and the one that speaks with other engines."""
    ours, theirs = socket.socketpair()
    ranks = OtherRanks([])
    ranks.members = [Mock(socket=ours)]
    long = AnnexCommand(bytes(900_000))
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [ranks.write(TicketedCommand(5, long)) for _ in range(3)])
        frames = read_frames(theirs.makefile("rb").read)
        for _ in range(12):
            assert msgspec.msgpack.decode(next(frames), type=RankMessage) == TicketedCommand(
                5, long
            )
    ranks.members = []
    ranks.end()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("takes_orders", [True, False])
def test_a_rank_that_ends_while_it_starts_ends_the_start(monkeypatch, takes_orders):
    """At once, though the ranks wait long for each other then; also before it is told anything."""
    monkeypatch.setattr(sys, "executable", "false")
    if not takes_orders:

        def refuse(*_):
            raise BrokenPipeError

        monkeypatch.setattr(team, "framed", refuse)
    with pytest.raises(EngineDeadError, match="rank 1 has ended: exit code 1"):
        LLM(tensor_parallel_size=2, **SMALL)


def test_a_rank_whose_process_cannot_be_started_ends_the_start(monkeypatch):
    """Nobody else would say that it is over: the engine waited for ever."""

    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(team.subprocess, "Popen", refuse)
    config = EngineConfig(device="cpu", tensor_parallel_size=3)
    with pytest.raises(EngineDeadError, match="rank 1: its process cannot be started: Resource"):
        Team(config)


def test_a_rank_that_is_lost_while_nothing_runs_ends_the_engine(monkeypatch):
    """Nobody has to ask for anything first."""
    monkeypatch.setattr(setup, "Team", ThreadTeam)
    engine = Engine(EngineConfig(tensor_parallel_size=2, **SMALL))
    alarm, bell = socket.socketpair()
    engine._team.alarm = alarm
    ours, theirs = socket.socketpair()
    bell.send(b".")
    loop = Loop(engine, ours)
    with pytest.raises(EngineDeadError, match="rank 1 is lost"):
        loop.run()
    assert not engine._team.close.alive
    loop.close()
    for each in (ours, theirs, alarm, bell):
        each.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_step_came_to_without_a_rank_is_not_taken(is_done):
    """The device may have been let go on."""
    team = object.__new__(Team)
    team._others = OtherRanks([])
    team.wait(Mock(query=Mock(return_value=True)))
    team._others.lost.set()
    with pytest.raises(EngineDeadError, match="a rank has ended"):
        team.wait(Mock(query=Mock(return_value=is_done)))
    team._others.end()


@pytest.mark.parametrize("turn", [0, 5, 2**29, 2**31 - 1, -(2**31), -7])
def test_signals_of_a_lost_rank_are_ahead_of_all_turns(turn):
    """As the kernels count, whose turns begin again some day."""
    signal = far_behind(torch.tensor([turn, turn]))
    for later in (0, 1, 1000):
        difference = (turn + later - signal + 2**31) % 2**32 - 2**31
        assert -(2**31) <= difference <= 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 3}, "num_key_heads=4 is not a multiple"),
        ({"tensor_parallel_size": 8}, "num_key_heads=4 is not a multiple"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: use 1 or more"),
    ],
)
def test_a_size_that_does_not_divide_starts_no_process(options, named, monkeypatch):
    monkeypatch.delattr(setup, "Team")
    with pytest.raises(ConfigError, match=named):
        LLM(**options)


def test_a_rank_that_samples_something_else_ends():
    found, other = (StepResult(tokens={1: [token]}, written={}) for token in (7, 8))
    runner = Mock(collect=Mock(return_value=Mock(result=found)))
    plan = StepPlan(sequences=())
    follow([plan, found], runner)
    with pytest.raises(EngineDeadError, match=r"sampled \{1: \[7\]\} where rank 0 .* \{1: \[8\]\}"):
        follow([plan, other], runner)
