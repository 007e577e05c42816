"""`AsyncLLM` answers as `LLM` does, from an event loop."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import pytest

from milepost import LLM, AsyncLLM, SamplingParams
from milepost.config import EngineConfig
from milepost.engine.processes import starting
from milepost.errors import ConfigError, EngineDeadError, InvalidRequestError
from tests import chatmodel, forked

OPTIONS = {"cpu_cache_gib": 0.02, "max_num_seqs": 4, "max_model_len": 2048, "device": "cpu"}
PROMPTS = ["the quick brown fox " * 8, "the lazy dog", {"prompt_token_ids": list(range(10, 90))}]
MESSAGES = [{"role": "user", "content": "what is the weather like in Zürich today?"}]
PARAMS = SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=12, logprobs=1, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chatmodel.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(folder, runner):
    """One engine for all tests, forked from a process that has imported what it needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "CONTEXT", forked.context())
        llm = AsyncLLM(folder, **OPTIONS)
        runner.run(llm.start())
        yield llm
        runner.run(llm.close())


async def last(outputs):
    async with aclosing(outputs):
        return [output async for output in outputs][-1]


async def held(llm):
    """What requests hold, and how many are open."""
    metrics = {m.name.removeprefix("milepost:"): m.value for m in await llm.get_metrics()}
    names = ("num_requests_running", "kv_cache_usage_perc", "state_cache_usage_perc")
    return [metrics[name] for name in names] + [len(llm._running), llm._client.num_in_flight]


def plain(output):
    """All but the ids and what was in the cache by then."""
    found = [
        (one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason)
        for one in output.outputs
    ]
    sums = [one.cumulative_logprob for one in output.outputs]
    return (output.prompt, list(output.prompt_token_ids), output.finished, found), sums


def test_answers_are_those_of_llm(llm, runner, folder):
    async def ask():
        asked = [last(llm.generate(prompt, PARAMS)) for prompt in PROMPTS]
        asked += [last(llm.chat(MESSAGES, PARAMS, cache_salt="a"))]
        return await asyncio.gather(*asked)

    outputs = runner.run(ask())
    with LLM(folder, **OPTIONS) as sync:
        expected = sync.generate(PROMPTS, PARAMS, use_tqdm=False)
        expected += sync.chat(MESSAGES, PARAMS, use_tqdm=False, cache_salt="a")
        assert runner.run(llm.get_default_sampling_params()) == sync.get_default_sampling_params()
    for output, other in zip(outputs, expected, strict=True):
        (own, sums), (others, their_sums) = plain(output), plain(other)
        assert own == others
        assert sums == pytest.approx(their_sums, abs=1e-3)
        assert output.cache_report.prompt_tokens == len(output.prompt_token_ids)
        assert len(output.outputs[0].logprobs) == 12


def test_outputs_grow(llm, runner):
    async def ask():
        return [output async for output in llm.generate(PROMPTS[0], PARAMS, "mine")]

    outputs = runner.run(ask())
    lengths = [sum(len(one.token_ids) for one in output.outputs) for output in outputs]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 24
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    again = runner.run(ask())[-1]
    assert again.num_cached_tokens == again.cache_report.reused > 0


def test_abort_ends_a_request_with_a_last_output(llm, runner):
    async def ask():
        outputs = []
        async for output in llm.generate(PROMPTS[1], LONG, "mine"):
            outputs.append(output)
            await llm.abort(["mine", "unknown"])
        return outputs, await held(llm)

    outputs, left = runner.run(ask())
    assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
    assert 0 < len(outputs[-1].outputs[0].token_ids) < 1500
    assert left == [0] * 5


def test_a_request_may_be_aborted_before_it_is_sent(llm, runner):
    async def ask():
        task = asyncio.ensure_future(last(llm.generate(PROMPTS[1], LONG, "mine")))
        while "mine" not in llm._running:
            await asyncio.sleep(0)
        await llm.abort("mine")
        return await task

    output = runner.run(ask())
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_reader_that_leaves_ends_its_request(llm, runner, how):
    async def ask():
        outputs = llm.generate(PROMPTS[1], LONG)
        if how == "closed":
            await anext(outputs)
            await outputs.aclose()
        else:
            task = asyncio.ensure_future(last(outputs))
            while not (await held(llm))[0]:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        return await held(llm)

    assert runner.run(ask()) == [0] * 5


def test_an_id_that_is_in_use_is_refused(llm, runner):
    async def ask():
        async with aclosing(llm.generate(PROMPTS[1], LONG, "mine")) as first:
            await anext(first)
            with pytest.raises(InvalidRequestError, match="request_id='mine': in use"):
                await last(llm.generate(PROMPTS[1], PARAMS, "mine"))
            await anext(first)
        return await held(llm)

    assert runner.run(ask()) == [0] * 5


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("\ud800", PARAMS, "not valid Unicode"),
        ({"prompt": "a", "image": 1}, PARAMS, "prompt key 'image'"),
        ({"prompt_token_ids": [10**6]}, PARAMS, "the vocabulary has"),
        (None, PARAMS, "prompt of type NoneType"),
        ("fox " * 4000, PARAMS, "max_model_len=2048 leaves no room"),
        ("a", SamplingParams(structured_outputs={"json": {"minimum": {1}}}), "not JSON serial"),
        ("a", SamplingParams(structured_outputs={"regex": "("}), "structured_outputs"),
    ],
)
def test_what_cannot_be_served_is_refused(llm, runner, prompt, params, said):
    with pytest.raises(InvalidRequestError, match=said):
        runner.run(last(llm.generate(prompt, params)))
    assert runner.run(held(llm)) == [0] * 5


def test_forms_and_keywords(llm, runner):
    form = SamplingParams(max_tokens=9, structured_outputs={"choice": ["yes", "no"]})
    output = runner.run(last(llm.generate("a", form, lora_request=None, trace_headers={})))
    assert output.outputs[0].text in ("yes", "no")
    with pytest.raises(InvalidRequestError, match="lora_request='a' is not supported"):
        llm.generate("a", form, lora_request="a")
    with pytest.raises(InvalidRequestError, match="did you mean chat_template"):
        llm.chat(MESSAGES, form, chat_templat="a")


def test_a_template_that_hangs_is_refused(llm, runner):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    runner.run(llm._encoder.get())._template_timeout_s = 0.2
    with pytest.raises(InvalidRequestError, match="the chat template takes more than"):
        runner.run(last(llm.chat(MESSAGES, PARAMS, chat_template=endless)))


def test_the_cache_can_be_reset(llm, runner):
    async def ask():
        async with aclosing(llm.generate(PROMPTS[1], LONG)) as running:
            await anext(running)
            while_running = await llm.reset_prefix_cache()
        await llm.check_health()
        return while_running, await llm.reset_prefix_cache()

    assert runner.run(ask()) == (False, True)
    assert runner.run(llm.get_tokenizer()).encode("the fox")


def test_one_belongs_to_one_loop(llm):
    with pytest.raises(EngineDeadError, match="another event loop"):
        asyncio.run(llm.get_metrics())


def test_what_cannot_be_loaded(runner, tmp_path):
    with pytest.raises(ConfigError, match="did you mean dtype"):
        AsyncLLM("model", dtypee="a")
    missing = AsyncLLM.from_engine_args(EngineConfig(model=str(tmp_path / "none")))

    async def ask():
        for _ in range(2):
            with pytest.raises(ConfigError, match="none"):
                await last(missing.generate("a"))
        await missing.close()

    runner.run(ask())


def test_after_its_end_it_takes_nothing(llm, runner, folder):
    async def ask():
        other = AsyncLLM(folder, **OPTIONS)
        async with other:
            running = other.generate("a", LONG)
            await anext(running)
        for again in (running, other.generate("a", LONG)):
            with pytest.raises(EngineDeadError, match=r"was (stopped|closed)"):
                await last(again)
        await other.close()

    runner.run(ask())


def test_an_engine_that_is_killed_says_so(llm, runner, folder):
    async def ask():
        async with AsyncLLM(folder, **OPTIONS) as other:
            running = other.generate("a", LONG)
            await anext(running)
            os.kill(other._client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await last(running)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await other.check_health()

    runner.run(ask())


SCRIPT = """
import asyncio
from milepost import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(device="cpu")
    params = SamplingParams(temperature=0, max_tokens=4)
    async for output in llm.generate("What does str.partition do?", params):
        pass
    print(output.finished)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_no_close(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert "Traceback" not in done.stderr
