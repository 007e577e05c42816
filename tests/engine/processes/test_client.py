"""The engine process behind its client: what is given back, and what happens when it fails."""

import asyncio
import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import uvloop

from milepost.config import EngineConfig
from milepost.engine.loop.core import Engine
from milepost.engine.outputs import Output
from milepost.engine.processes import starting
from milepost.engine.processes.client import EngineClient
from milepost.engine.processes.stream import WATCHES, Stream
from milepost.engine.prompts import Prompt
from milepost.errors import (
    ConfigError,
    EngineDeadError,
    InvalidPromptError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    ServerClosingError,
    UnsupportedModelError,
)
from milepost.sampling_params import SamplingParams
from tests import chatmodel, forked

LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = Prompt(token_ids=list(range(10, 90)))
FAR = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 2**64}


class FailingEngine(Engine):
    """Fails in the third step."""

    def step(self):
        if self.scheduler.stats.num_steps == 2:
            self.pipeline.runner = None
        return super().step()


class HangingEngine(Engine):
    """Does not come back from its third step."""

    def step(self):
        while self.scheduler.stats.num_steps == 2:
            signal.pause()
        return super().step()


def vanish(config):
    os._exit(3)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = chatmodel.save(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), cpu_cache_gib=0.02, max_num_seqs=2)


@pytest.fixture(autouse=True)
def engines_are_forked(monkeypatch):
    """From a process that has imported what they need, which takes seconds. The first test starts
    its engine as a server does.
    """
    monkeypatch.setattr(starting, "CONTEXT", forked.context())


def run(config, scenario, **options):
    """Run a scenario with a started client, and end it."""

    async def whole():
        client = EngineClient(config, **options)
        await client.start()
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(whole())


async def take(stream):
    try:
        return [output async for arrived in stream for _, output in arrived]
    finally:
        stream.close()


async def gauges(client):
    return {
        metric.name.removeprefix("milepost:"): metric.value for metric in await client.metrics()
    }


def test_answers_come_in_order_and_whole(config, monkeypatch):
    monkeypatch.setattr(starting, "CONTEXT", multiprocessing.get_context("spawn"))

    async def scenario(client):
        first, second = await asyncio.gather(
            take(client.add([PROMPT], SHORT)), take(client.add([PROMPT], SHORT))
        )
        assert client.num_in_flight == 0
        return first, second

    first, second = run(config, scenario)
    for outputs in (first, second):
        tokens = [token for output in outputs for d in output.deltas for token in d.token_ids]
        assert len(tokens) == 6
        assert [output.finished for output in outputs][-1]
        assert outputs[0].report is not None
        assert all(output.report is None for output in outputs[1:])
    texts = ["".join(d.text for o in outputs for d in o.deltas) for outputs in (first, second)]
    assert texts[0] == texts[1]


def test_a_slow_reader_gets_the_same_joined(config):
    async def scenario(client):
        quick = await take(client.add([PROMPT], SHORT))
        stream = client.add([PROMPT], SHORT)
        while stream.open:
            await client.metrics()
        return quick, await take(stream)

    quick, slow = run(config, scenario)
    assert len(slow) == 1
    (delta,) = slow[0].deltas
    assert delta.text == "".join(d.text for o in quick for d in o.deltas)
    assert delta.finish_reason == "length"


def test_a_slow_reader_that_keeps_steps_gets_them_one_by_one(config):
    async def scenario(client):
        quick = await take(client.add([PROMPT], SHORT, keeps_steps=True))
        stream = client.add([PROMPT], SHORT, keeps_steps=True)
        while stream.open:
            await client.metrics()
        return quick, await take(stream)

    quick, slow = run(config, scenario)
    assert [output.deltas for output in slow] == [output.deltas for output in quick]
    assert [output.finished for output in slow] == [False] * 5 + [True]


def test_prompts_that_share_a_stream_lose_nothing(config):
    async def scenario(client):
        stream, tokens, ended = client.add([PROMPT] * 3, SHORT), [0, 0, 0], 0
        async for arrived in stream:
            for index, output in arrived:
                tokens[index] += sum(len(delta.token_ids) for delta in output.deltas)
                ended += output.finished
        assert (ended, client.num_in_flight) == (3, 3)
        stream.close()
        stream.close()
        assert client.num_in_flight == 0
        return tokens

    assert run(config, scenario) == [6, 6, 6]


def test_an_error_that_comes_with_an_output_is_told_after_it():
    async def scenario():
        stream = Stream([3], 1, SimpleNamespace(forget=lambda _: None))
        output = Output(number=3, deltas=[], finished=False)
        stream.put(output)
        stream.fail(RequestTimeoutError("late"))
        assert await anext(stream) == [(0, output)]
        with pytest.raises(RequestTimeoutError):
            await anext(stream)

    asyncio.run(scenario())


def test_a_closed_stream_is_free_before_the_next_step(config):
    async def scenario(client):
        stream = client.add([PROMPT], LONG)
        await anext(stream)
        assert (await gauges(client))["num_requests_running"] == 1
        stream.close()
        return await gauges(client)

    found = run(config, scenario)
    assert found["num_requests_running"] == found["kv_cache_usage_perc"] == 0
    assert found["state_cache_usage_perc"] == 0


def test_lower_priority_numbers_go_first(config):
    async def scenario(client):
        blockers = [client.add([PROMPT], LONG) for _ in range(2)]
        late = client.add([PROMPT], SHORT, priority=5)
        soon = client.add([PROMPT], SHORT, priority=-5)
        order = []

        async def note(name, stream):
            await take(stream)
            order.append(name)

        waiting = asyncio.gather(note("late", late), note("soon", soon))
        await anext(blockers[0])
        blockers[0].close()
        await waiting
        blockers[1].close()
        return order

    assert run(config, scenario) == ["soon", "late"]


def test_the_queue_is_bounded(config):
    async def scenario(client):
        streams = [client.add([PROMPT], LONG) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 answers"):
            client.add([PROMPT], SHORT)
        for stream in streams:
            stream.close()
        return await take(client.add([PROMPT], SHORT))

    assert run(config, scenario, max_waiting=1)[-1].finished


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (Prompt(token_ids=[10], kv_transfer_params=FAR), "kv_transfer_params"),
        (Prompt(token_ids=[10, -1]), "prompt_token_ids"),
        (Prompt(token_ids=[10, 2**32]), "prompt_token_ids"),
    ],
    ids=["parameters", "negative", "large"],
)
def test_what_cannot_be_sent_takes_no_place_in_the_queue(config, prompt, named):
    async def scenario(client):
        with pytest.raises(InvalidRequestError, match=named):
            client.add([prompt], SHORT)
        assert client.num_in_flight == 0
        return await take(client.add([PROMPT], SHORT))

    assert run(config, scenario)[-1].finished


def test_a_request_that_is_refused_at_the_door_is_not_sent(config):
    async def scenario(client):
        with pytest.raises(InvalidPromptError, match="vocabulary"):
            client.add([PROMPT, Prompt(token_ids=[10**6])], SHORT)
        assert client.num_in_flight == 0
        return await take(client.add([PROMPT], SHORT))

    assert run(config, scenario)[-1].finished


def test_a_refusal_by_the_engine_concerns_one_request(config):
    """Whether parameters leave a token is known where they are compiled."""
    nothing = SamplingParams(allowed_token_ids=[7], logit_bias={7: -100})

    async def scenario(client):
        bad = client.add([PROMPT], nothing)
        good = client.add([PROMPT], SHORT)
        with pytest.raises(InvalidRequestError, match="leave no token"):
            await take(bad)
        return await take(good)

    assert run(config, scenario)[-1].finished


def test_reset_waits_for_nobody(config):
    async def scenario(client):
        stream = client.add([PROMPT], LONG)
        await anext(stream)
        while_running = await client.reset_prefix_cache()
        stream.close()
        return while_running, await client.reset_prefix_cache()

    assert run(config, scenario) == (False, True)


def test_a_killed_process_fails_streams_and_questions(config):
    deaths = []

    async def scenario(client):
        stream = client.add([PROMPT], LONG)
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="signal 9"):
            await take(stream)
        with pytest.raises(EngineDeadError):
            client.add([PROMPT], SHORT)
        with pytest.raises(EngineDeadError):
            await client.metrics()

    run(config, scenario, on_death=deaths.append)
    assert len(deaths) == 1


def test_a_question_to_an_engine_that_hangs_has_an_end(config):
    async def scenario(client):
        stream = client.add([PROMPT], LONG)
        async for _ in stream:
            break
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(RequestTimeoutError):
            await client.reset_prefix_cache(timeout_s=0.01)
        asked = asyncio.ensure_future(client.reset_prefix_cache())
        await asyncio.sleep(0)
        client.fail_questions(ServerClosingError("the server is shutting down"))
        with pytest.raises(ServerClosingError):
            await asked
        os.kill(client.pid, signal.SIGCONT)
        stream.close()

    run(config, scenario)


def test_a_step_that_fails_says_why(config):
    async def scenario(client):
        with pytest.raises(EngineDeadError, match="AttributeError"):
            await take(client.add([PROMPT], LONG))

    run(config, scenario, make_engine=FailingEngine)


def test_a_step_that_does_not_end_is_ended(config):
    deaths = []

    async def scenario(client):
        with pytest.raises(EngineDeadError, match=r"no sign of life for 0\.4 seconds"):
            await take(client.add([PROMPT], LONG))
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await client.metrics()

    run(
        config,
        scenario,
        make_engine=HangingEngine,
        step_timeout_s=0.4,
        on_death=deaths.append,
    )
    assert len(deaths) == 1


def test_an_engine_that_works_or_rests_is_left_alone(config):
    """While it works, and then while it rests, it is asked more often than silence is borne."""

    async def scenario(client):
        stream, asked, send = client.add([PROMPT], LONG), asyncio.Queue(), client._send

        def noted(message):
            asked.put_nowait(None)
            send(message)

        client._questions._send = noted
        while asked.qsize() <= WATCHES:
            await anext(stream)
        stream.close()
        for _ in range(asked.qsize() + 2 * WATCHES):
            await asked.get()
        return await take(client.add([PROMPT], SHORT))

    assert run(config, scenario, step_timeout_s=1.0)[-1].finished


def test_an_engine_that_cannot_be_built(tmp_path):
    async def start(config, **options):
        client = EngineClient(config, **options)
        await client.start()

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for folder, kind in ((tmp_path, UnsupportedModelError), (tmp_path / "none", ConfigError)):
        config = EngineConfig(model=str(folder), load_format="dummy", skip_tokenizer_init=True)
        with pytest.raises(kind):
            asyncio.run(start(config))
    with pytest.raises(EngineDeadError, match="exit code 3"):
        asyncio.run(start(EngineConfig(), make_engine=vanish))


def test_open_streams_end_with_the_client(config):
    async def scenario(client):
        stream = client.add([PROMPT], LONG)
        await anext(stream)
        closing = asyncio.create_task(client.close())
        with pytest.raises(EngineDeadError, match="stopped"):
            await take(stream)
        await closing

    run(config, scenario)


def test_between_an_engines_end_and_the_notice_of_it_nothing_else_is_raised(config, monkeypatch):
    """uvloop, which serves, raises RuntimeError for writes to a socket that it has closed."""

    async def scenario():
        client = EngineClient(config)
        await client.start()
        has_ended, may_notice = threading.Event(), threading.Event()
        join = client._process.join

        async def slow_join():
            await join()
            has_ended.set()
            assert await asyncio.to_thread(may_notice.wait, 10)

        monkeypatch.setattr(client._process, "join", slow_join)
        first = client.add([PROMPT], LONG)
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.to_thread(has_ended.wait)
        client.add([PROMPT], SHORT).close()
        while not client._writer.is_closing():
            await asyncio.sleep(0)
        second, question = client.add([PROMPT], SHORT), asyncio.create_task(client.metrics())
        client.add([PROMPT], SHORT).close()
        await asyncio.sleep(0)
        may_notice.set()
        for waiting in (take(first), take(second), question):
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                await waiting
        assert client.num_in_flight == 0
        await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
