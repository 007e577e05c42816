"""The server's side of the process that tries out forms: whose verdict is whose."""

import asyncio
import json
from collections import deque

import pytest

from milepost.engine.constraints.grammars import Vocabulary
from milepost.engine.constraints.process import FormChecks
from milepost.errors import InvalidRequestError
from milepost.sampling_params import StructuredOutputs

VOCABULARY = Vocabulary(tokenizer_json="{}", num_tokens=4, end_token_ids=())
GOOD = StructuredOutputs(regex="a+", field="regex")
BAD = StructuredOutputs(regex="(", field="regex")


class FakeChild:
    """A process behind a pipe: it answers all that it is asked, whoever reads that."""

    def __init__(self):
        self.pid = None
        self.asked = []
        self.is_prompt = asyncio.Event()
        self.num_deaths = 0
        """So many times it ends over what it is asked first."""
        self._pipe = deque()

    async def start(self):
        self.pid = 1

    async def ask(self, message, _timeout_s=None):
        asked = json.loads(message)
        self.asked.append(asked)
        if self.num_deaths:
            self.num_deaths -= 1
            self.pid = None
            return None, -9
        self._pipe.append("it is no expression" if asked.get("regex") == "(" else "")
        try:
            await self.is_prompt.wait()
        except BaseException:
            self.pid = None
            self._pipe.clear()
            raise
        return json.dumps(self._pipe.popleft()).encode(), 0


def run(scenario):
    async def whole():
        checks = FormChecks(VOCABULARY, timeout_s=1.0)
        checks._child = FakeChild()
        return await asyncio.wait_for(scenario(checks, checks._child), 30)

    return asyncio.run(whole())


async def until_asked(child, num):
    while len(child.asked) < num:
        await asyncio.sleep(0)


def test_a_client_that_leaves_while_the_process_starts_leaves_no_answer_behind():
    async def scenario(checks, child):
        leaving = asyncio.create_task(checks.check(GOOD))
        await until_asked(child, 1)  # the tokenizer
        leaving.cancel()
        await asyncio.wait([leaving])
        child.is_prompt.set()
        with pytest.raises(InvalidRequestError, match="no expression"):
            await checks.check(BAD)
        await checks.check(GOOD)

    run(scenario)


def test_a_form_is_tried_again_for_who_comes_as_the_last_one_leaves():
    async def scenario(checks, child):
        await child.start()
        leaving = asyncio.create_task(checks.check(GOOD))
        await until_asked(child, 1)
        leaving.cancel()
        coming = asyncio.create_task(checks.check(GOOD))
        child.is_prompt.set()
        await coming
        assert leaving.cancelled()
        assert not checks._trials

    run(scenario)


def test_a_process_that_could_not_start_once_is_started_again():
    async def scenario(checks, child):
        child.num_deaths = 2
        child.is_prompt.set()
        await checks.start()
        with pytest.raises(InvalidRequestError, match="did not start"):
            await checks.check(GOOD)
        await checks.check(GOOD)

    run(scenario)
