"""The server says once why nothing of a prompt under one page was reused."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from milepost.cache.report import CacheReport, Lost
from milepost.config import EngineConfig
from milepost.engine.outputs import Delta, Output, Report
from milepost.engine.prompts import Prompt
from milepost.sampling_params import SamplingParams
from milepost.server import stats
from milepost.server.config import ServerConfig
from milepost.server.generation import Generation
from milepost.server.protocol import CompletionRequest
from tests.server.inprocess import INFO, request_scope, service


class ShortAnswers:
    """One answer of one step, with a cache report."""

    def __init__(self, report):
        self._outputs = [Output(1, [Delta(0, "a", [7], finish_reason="stop")], True, report)]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._outputs:
            raise StopAsyncIteration
        return [(0, self._outputs.pop())]

    def close(self):
        pass


def report(num_tokens, reused=0):
    lost = {Lost.UNSEEN: num_tokens - reused}
    whole = CacheReport(
        prompt_tokens=num_tokens, kv_length=0, state_length=reused, reused=reused, lost=lost
    )
    return Report(whole, 0.0)


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(stats.logger, "propagate", True)
    caplog.set_level(logging.INFO, "milepost.stats")
    return lambda: [record.message for record in caplog.records if record.name == "milepost.stats"]


def test_an_answer_to_a_short_prompt_says_so_in_the_log_once(said, monkeypatch):
    async def ask(num_tokens):
        monkeypatch.setattr(own, "submit", lambda *_, **__: ShortAnswers(report(num_tokens)))
        scope = request_scope()
        request, prompts = CompletionRequest(prompt="a"), [Prompt(token_ids=[5] * num_tokens)]
        options = {"scope": scope, "field": "prompt"}
        async for _ in Generation(own, request, prompts, SamplingParams(), **options).deltas():
            pass

    async def run():
        for num_tokens in (64, 15, 16):
            await ask(num_tokens)
        await own.close()

    own = service(ServerConfig())
    asyncio.run(run())
    (line,) = said()
    assert line.startswith("15 prompt tokens are less than one page (64)")


def test_a_server_without_statistics_and_a_prompt_that_hit_say_nothing(said):
    for is_silent, short in ((True, report(15)), (False, report(30, reused=16))):
        config = EngineConfig(disable_log_stats=is_silent)
        stats.ShortPrompts(SimpleNamespace(info=INFO, config=config)).note(short)
    assert said() == []
