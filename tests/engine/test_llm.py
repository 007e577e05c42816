"""What `LLM` does for its callers: outputs, streams, stop conditions, counters, and its own end."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import warnings
from array import array
from itertools import islice, pairwise
from operator import attrgetter

import numpy as np
import pytest
import torch
from tqdm import tqdm

from milepost import LLM, SamplingParams
from milepost.engine.prompts import Prompt
from milepost.errors import EngineDeadError, InvalidRequestError
from milepost.scheduler.plans import StepPlan
from tests.engines import (
    NUM_TOKENS,
    VOCAB_SIZE,
    WIDE_STATES,
    answer,
    ask,
    cached,
    greedy,
    metric,
    num_held,
    prompt,
    sampled,
    save_tiny,
    steps_until_done,
    tokens,
)
from tests.invariants import check

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float64, **WIDE_STATES)


@pytest.fixture
def llm(tiny):
    return tiny.open(max_model_len=1024)


@pytest.fixture(scope="module")
def talker_folder(tmp_path_factory, tokenizer):
    """A checkpoint with a tokenizer that covers its vocabulary, and a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    save_tiny(folder, "qwen3_next", torch.float64, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def talker(talker_folder):
    return LLM(talker_folder, num_pages=256, num_slots=32, max_model_len=2048)


def sentences(num: int) -> str:
    return "the quick brown fox jumps over the lazy dog, again and again. " * num


# --- outputs --------------------------------------------------------------------------------------


def test_outputs_stand_in_the_order_of_the_prompts(tiny, llm):
    """Whatever the order in which they end."""
    prompts = [tokens(200 - 30 * i, seed=i) for i in range(5)]
    params = [greedy(3 + 7 * (i % 3)) for i in range(5)]
    outputs = llm.generate([prompt(p) for p in prompts], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, own in zip(outputs, params, strict=True):
        tiny.check([output], own)
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4"]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompts", [prompt([1, 2, 3]), [1, 2, 3], [[1, 2, 3]]])
def test_one_prompt_need_not_stand_in_a_list(llm, prompts):
    (output,) = llm.generate(prompts, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.prompt is None
    assert output.outputs[0].text == ""


@pytest.mark.parametrize(
    "form",
    [tuple, lambda ids: array("I", ids), np.array, torch.tensor, lambda ids: list(np.array(ids))],
    ids=["tuple", "packed", "array", "tensor", "numbers of an array"],
)
def test_token_ids_may_come_in_any_form_of_integers(llm, form):
    ids = tokens(40)
    (plain,) = ask(llm, ids)
    (output,) = llm.generate([{"prompt_token_ids": form(ids)}], greedy(), use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.prompt_token_ids == ids


def test_no_prompts(llm):
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_text(talker, tokenizer):
    (output,) = talker.generate("the quick brown fox", greedy(), use_tqdm=False)
    assert output.prompt == "the quick brown fox"
    assert output.prompt_token_ids == tokenizer.encode("the quick brown fox")
    expected = tokenizer.decode(answer(output), skip_special_tokens=True)
    assert output.outputs[0].text == expected != ""


@pytest.mark.parametrize("text", ["\ud800", "fox \udfff"])
def test_halves_of_characters_are_refused(talker, text):
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        talker.generate(text, greedy())
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        talker.chat([{"role": "user", "content": text}], greedy())


@pytest.mark.parametrize("nothing", [None, 5])
def test_what_is_no_prompt_is_refused(talker, nothing):
    with pytest.raises(InvalidRequestError, match="prompt of type"):
        talker.generate(nothing, greedy())
    with pytest.raises(InvalidRequestError, match=f"messages={nothing}: use a list"):
        talker.chat(nothing, greedy())


@pytest.mark.parametrize("message", [5, None, "a", object()])
def test_a_message_that_is_none_is_named(talker, message):
    with pytest.raises(InvalidRequestError, match="use a dict with a role and a content"):
        talker.chat([message], greedy())


def test_chat_goes_on_with_the_last_message(talker, tokenizer):
    messages = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "the fox"}]
    (output,) = talker.chat(messages, greedy(), use_tqdm=False, continue_final_message=True)
    assert tokenizer.decode(output.prompt_token_ids).endswith("assistant\nthe fox")


def test_chat_template_of_a_call(talker, tokenizer):
    messages = [{"role": "user", "content": "again"}]
    template = "{{ messages[0].content }} and again"
    (output,) = talker.chat(messages, greedy(), use_tqdm=False, chat_template=template)
    assert tokenizer.decode(output.prompt_token_ids) == "again and again"
    assert next(talker.stream_chat(messages, greedy(), chat_template=template))


def test_without_detokenize_there_is_no_text(talker):
    (output,) = talker.generate("the fox", greedy(detokenize=False), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(answer(output)) == NUM_TOKENS


def test_several_answers(llm):
    (output,) = ask(llm, tokens(150), params=sampled(n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert num_held(llm) == (0, 0)


def test_seed_makes_samples_repeatable(llm):
    outputs = [ask(llm, tokens(50), params=sampled(seed=seed))[0] for seed in (1, 1, 2)]
    assert answer(outputs[0]) == answer(outputs[1]) != answer(outputs[2])


def test_engine_seed_makes_a_run_repeatable(tiny):
    """Requests without a seed of their own draw differently, and again so in the next run."""
    unseeded = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = [
        [answer(ask(llm, tokens(50), params=unseeded)[0]) for _ in range(2)]
        for llm in (tiny.open(seed=3), tiny.open(seed=3), tiny.open(seed=4))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


# --- how answers end ------------------------------------------------------------------------------


def test_max_tokens(llm):
    (output,) = ask(llm, tokens(50), params=greedy(7))
    (completion,) = output.outputs
    assert len(completion.token_ids) == 7
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_max_tokens_none_fills_max_model_len(tiny):
    llm = tiny.open(max_model_len=128)
    (output,) = ask(llm, tokens(100), params=greedy(None))
    assert len(answer(output)) == 28
    assert output.outputs[0].finish_reason == "length"


def test_stop_token_id(tiny, llm):
    full = tiny.expected(tokens(50), greedy())
    stop = full[5]
    (output,) = ask(llm, tokens(50), params=greedy(stop_token_ids=[stop]))
    (completion,) = output.outputs
    assert completion.token_ids == full[: full.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_min_tokens_suppresses_what_ends_the_answer(tiny, llm):
    stop = tiny.expected(tokens(50), greedy())[2]
    params = greedy(stop_token_ids=[stop], min_tokens=10)
    (output,) = ask(llm, tokens(50), params=params)
    assert len(answer(output)) >= 10
    assert stop not in answer(output)[:10]


def test_model_end(tiny, tmp_path_factory):
    """The checkpoint's own end-of-sequence token ends the answer, unless it is ignored."""
    folder = tmp_path_factory.mktemp("ends")
    full = tiny.expected(tokens(50), greedy())
    for file in tiny.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [full[4]]}))
    llm = LLM(folder, skip_tokenizer_init=True, num_pages=16, num_slots=4)
    ending = SamplingParams(temperature=0, max_tokens=20)
    outputs = [ask(llm, tokens(50), params=params)[0] for params in (ending, greedy())]
    assert answer(outputs[0]) == full[: full.index(full[4]) + 1]
    first = outputs[0].outputs[0]
    assert (first.finish_reason, first.stop_reason) == ("stop", None)
    assert answer(outputs[1]) == full
    assert outputs[1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("is_kept", [False, True])
def test_stop_string(talker, is_kept):
    (full,) = talker.generate("the fox", greedy(40), use_tqdm=False)
    text = full.outputs[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    params = greedy(40, stop=["no such text", stop], include_stop_str_in_output=is_kept)
    (output,) = talker.generate("the fox", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text == text[: text.index(stop) + len(stop) * is_kept]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 40
    assert completion.token_ids == answer(full)[: len(completion.token_ids)]
    assert num_held(talker) == (0, 0)


def test_an_answer_that_is_over_stays_as_it_is_when_its_job_is_given_up(talker, tokenizer):
    """Its last token goes on behind the stop string, with a part of a character."""
    cut = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]).endswith("🙂\ufffd"))
    params = sampled(9, stop=["🙂"], allowed_token_ids=[cut])
    job = talker.llm_engine.add(Prompt(token_ids=[5, 6]), params)
    while not job.is_finished:
        talker.llm_engine.step()
    before = job.output()
    talker.llm_engine.abort(job)
    assert before.outputs[0].stop_reason == "🙂"
    assert job.output() == before


def test_prompt_goes_on_behind_a_stop_string(talker):
    """What a stopped answer left in the cache is what a cold run computes."""
    (full,) = talker.generate("the fox", greedy(40), use_tqdm=False)
    stop = full.outputs[0].text[10:13]
    (output,) = talker.generate("the fox", greedy(40, stop=stop), use_tqdm=False)
    history = [*output.prompt_token_ids, *answer(output), 7, 8, 9]
    hit = talker.generate(prompt(history), greedy(), use_tqdm=False)
    assert hit[0].num_cached_tokens >= len(history) - 4
    talker.reset_prefix_cache()
    assert answer(talker.generate(prompt(history), greedy(), use_tqdm=False)[0]) == answer(hit[0])


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 3])
def test_logprobs(tiny, llm, num):
    (output,) = ask(llm, tokens(50), params=greedy(logprobs=num))
    (completion,) = output.outputs
    assert len(completion.logprobs) == len(completion.token_ids) == NUM_TOKENS
    full = tiny.logits([*tokens(50), *completion.token_ids]).log_softmax(-1)
    for place, (token, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True), start=49
    ):
        assert len(entry) == max(num, 1)
        assert (next(iter(entry)), entry[token].rank) == (token, 1)
        for id_, logprob in entry.items():
            assert math.isclose(logprob.logprob, full[place, id_].item(), rel_tol=1e-9)
    total = sum(
        e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert math.isclose(completion.cumulative_logprob, total)


def test_without_logprobs_there_are_none(llm):
    (output,) = ask(llm, tokens(50), params=SamplingParams(temperature=0))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


# --- streams --------------------------------------------------------------------------------------


def test_stream_grows_token_by_token(tiny, llm):
    full = tiny.expected(tokens(150), greedy())
    outputs = list(llm.stream(prompt(tokens(150)), greedy()))
    assert [answer(output) for output in outputs] == [full[: num + 1] for num in range(NUM_TOKENS)]
    assert [output.finished for output in outputs] == [False] * (NUM_TOKENS - 1) + [True]
    assert num_held(llm) == (0, 0)


def test_stream_of_text_is_cumulative(talker):
    (full,) = talker.generate("the fox", greedy(40), use_tqdm=False)
    texts = [output.outputs[0].text for output in talker.stream("the fox", greedy(40))]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == full.outputs[0].text


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_stream_closed_early_frees_everything(llm, num_taken):
    stream = llm.stream(prompt(tokens(150)), sampled(n=3))
    assert len(list(islice(stream, num_taken))) == num_taken
    assert (num_held(llm) != (0, 0)) == bool(num_taken)
    stream.close()
    assert num_held(llm) == (0, 0)
    assert not llm.llm_engine.has_work
    check(llm.llm_engine.scheduler.cache)


def test_stream_closed_in_mid_prefill_frees_everything(tiny):
    llm = tiny.open(max_num_batched_tokens=64)
    neighbour = llm.stream(prompt(tokens(20, 5)), greedy(40))
    next(neighbour)
    stream = llm.stream(prompt(tokens(500)), greedy())
    next(stream)
    stream.close()
    tiny.check([list(neighbour)[-1]], greedy(40))
    assert num_held(llm) == (0, 0)


def test_streams_side_by_side(tiny, llm):
    """Each gives all of its outputs that it can, though the others' steps advance it too."""
    streams = [llm.stream(prompt(tokens(50 + i, i)), greedy()) for i in range(3)]
    last = {}
    while len(last) < 3 or not all(output.finished for output in last.values()):
        for index, stream in enumerate(streams):
            for output in islice(stream, 1):
                last[index] = output
    tiny.check(last.values())


def test_stream_finished_by_another_call_gives_its_end(tiny, llm):
    stream = llm.stream(prompt(tokens(50)), greedy())
    next(stream)
    ask(llm, tokens(80, 1), params=greedy(40))
    (output,) = list(stream)
    assert output.finished
    tiny.check([output])


def test_stream_chat(talker):
    messages = [{"role": "user", "content": "what is the weather like?"}]
    outputs = list(talker.stream_chat(messages, greedy()))
    talker.reset_prefix_cache()
    (whole,) = talker.chat(messages, greedy(), use_tqdm=False)
    assert outputs[-1].outputs == whole.outputs
    assert len(outputs) == NUM_TOKENS
    stream = talker.stream_chat(messages, greedy())
    next(stream)
    stream.close()
    assert num_held(talker) == (0, 0)


# --- the cache ------------------------------------------------------------------------------------


def test_marks_of_a_chat_reach_the_cache(talker):
    """The second conversation already resumes behind the system prompt that it shares."""
    system = {"role": "system", "content": sentences(12)}
    asked = [[system, {"role": "user", "content": sentences(6) + str(i)}] for i in range(3)]
    asked[1][1] = {"role": "user", "content": "something else. " + sentences(6)}
    outputs = [talker.chat(messages, greedy(4), use_tqdm=False)[0] for messages in asked[:2]]
    shared = _common(outputs[0].prompt_token_ids, outputs[1].prompt_token_ids)
    assert shared > 128
    assert outputs[0].num_cached_tokens == 0
    # The mark is within a template's few tokens of where the prompts part.
    assert shared - 10 < outputs[1].num_cached_tokens <= shared


def test_second_turn_of_a_chat(talker):
    messages = [{"role": "user", "content": sentences(12)}]
    (first,) = talker.chat(messages, greedy(), use_tqdm=False)
    reply = {"role": "assistant", "content": first.outputs[0].text}
    (second,) = talker.chat(
        [*messages, reply, {"role": "user", "content": "go on"}], greedy(), use_tqdm=False
    )
    # The message's end is marked, a template's few tokens before the prompt's.
    length = len(first.prompt_token_ids)
    assert length - 10 < second.num_cached_tokens < length
    talker.reset_prefix_cache()
    (cold,) = talker.chat(
        [*messages, reply, {"role": "user", "content": "go on"}], greedy(), use_tqdm=False
    )
    assert cold.num_cached_tokens == 0
    assert answer(cold) == answer(second)


def test_several_chats_at_once(talker):
    chats = [[{"role": "user", "content": f"{i} is a number"}] for i in range(3)]
    outputs = talker.chat(chats, greedy(4), use_tqdm=False)
    assert len(outputs) == 3
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 3


def test_reset_prefix_cache(llm):
    ask(llm, tokens(500))
    assert llm.reset_prefix_cache() is True
    cache = llm.llm_engine.scheduler.cache
    assert cache.pages.num_free == cache.pages.total
    assert cache.slots.num_free == cache.slots.total
    stream = llm.stream(prompt(tokens(500)), greedy())
    assert next(stream).num_cached_tokens == 0
    assert llm.reset_prefix_cache() is False
    list(stream)
    assert cached(ask(llm, tokens(500))) == [448]


def test_metrics_add_up(tiny):
    """Hits and losses make up what was asked, and what was computed is what was lost."""
    llm = tiny.open(num_slots=10)
    outputs = []
    for seed in (0, 1, 0, 0, 1):
        outputs += ask(llm, tokens(300, seed) + tokens(20, 90 + len(outputs)), tokens(90, seed))
    reports = [output.cache_report for output in outputs]
    queries = metric(llm, "prefix_cache_queries")
    assert queries == sum(report.prompt_tokens for report in reports) == 5 * (320 + 90)
    assert metric(llm, "prefix_cache_hits") == sum(cached(outputs)) > 0
    lost = metric(llm, "prefix_cache_lost_tokens")
    assert metric(llm, "prefix_cache_hits") + lost == queries
    assert metric(llm, "num_preemptions") == 0
    assert metric(llm, "prompt_tokens_computed") == lost
    assert metric(llm, "decode_tokens") == 10 * (NUM_TOKENS - 1)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metric(llm, name) == 0


def test_metrics_are_unique(llm):
    ask(llm, tokens(100))
    found = [(m.name, tuple(m.labels.items())) for m in llm.get_metrics()]
    assert len(set(found)) == len(found)
    assert all(name.startswith("milepost:") for name, _ in found)
    assert llm.llm_engine.get_metrics() == llm.get_metrics()


def test_cache_off(tiny):
    llm = tiny.open(enable_prefix_caching=False)
    outputs = ask(llm, tokens(500)) + ask(llm, tokens(500))
    assert cached(outputs) == [0, 0]
    assert outputs[1].cache_report.lost == {"disabled": 500}
    cache = llm.llm_engine.scheduler.cache
    assert cache.pages.num_free == cache.pages.total
    tiny.check(outputs)


# --- around it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_progress_bar(llm, capsys, use_tqdm):
    with tqdm.external_write_mode():
        llm.generate([prompt(tokens(20, i)) for i in range(3)], greedy(2), use_tqdm=use_tqdm)
    assert ("3/3" in capsys.readouterr().err) == use_tqdm


def test_step_that_fails_ends_the_engine(llm, monkeypatch):
    """The call that runs into it says so, and so does every later one."""
    stream = llm.stream(prompt(tokens(50)), greedy())
    next(stream)
    monkeypatch.setattr(llm.llm_engine.runner.executor.model, "compute_logits", _fail)
    with pytest.raises(EngineDeadError, match=r"step loop failed: RuntimeError\('no memory'\)"):
        ask(llm, tokens(20))
    monkeypatch.undo()
    for call in (
        lambda: ask(llm, tokens(20)),
        lambda: next(stream),
        lambda: llm.stream(prompt(tokens(20)), greedy()),
    ):
        with pytest.raises(EngineDeadError, match=r"failed earlier .*no memory.*make a new engine"):
            call()


@pytest.mark.parametrize("part", ["schedule", "update"])
def test_broken_invariant_ends_the_engine(llm, monkeypatch, part):
    """It is reported as such, and not by a hang or by what cleaning up runs into."""
    monkeypatch.setattr(llm.llm_engine.scheduler, part, _fail)
    with pytest.raises(EngineDeadError, match="no memory"):
        ask(llm, tokens(20), tokens(30))
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="failed earlier"):
        ask(llm, tokens(20))


def test_plan_without_progress_ends_the_engine(llm, monkeypatch):
    """Rather than turning for ever."""
    monkeypatch.setattr(llm.llm_engine.scheduler, "schedule", lambda: StepPlan(sequences=()))
    with pytest.raises(EngineDeadError, match="a step does some of the work"):
        ask(llm, tokens(20))


@pytest.mark.parametrize("num_steps", [0, 1, 9])
def test_interrupt_frees_the_requests(tiny, llm, monkeypatch, num_steps):
    """Ctrl-C in `generate`: nothing is left behind, and the engine goes on."""
    collect, calls = llm.llm_engine.runner.collect, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > num_steps:
            raise KeyboardInterrupt
        return collect(*args)

    monkeypatch.setattr(llm.llm_engine.runner, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, *(tokens(100 + i, i) for i in range(4)))
    monkeypatch.undo()
    assert not llm.llm_engine.has_work
    assert num_held(llm) == (0, 0)
    check(llm.llm_engine.scheduler.cache)
    tiny.check(ask(llm, *(tokens(100 + i, i) for i in range(4))))


@pytest.mark.parametrize("where", ["_intake.group", "scheduler.cache.match", "_completions.add"])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_interrupt_while_prompts_are_queued(tiny, llm, monkeypatch, where, num_before):
    """Those that are queued already are given up, wherever the next one is."""
    folder, _, name = where.rpartition(".")
    owner, calls = attrgetter(folder)(llm.llm_engine), []
    call = getattr(owner, name)

    def interrupted(*args, **named):
        calls.append(args)
        if len(calls) > num_before:
            raise KeyboardInterrupt
        return call(*args, **named)

    monkeypatch.setattr(type(owner), name, lambda _, *args, **named: interrupted(*args, **named))
    params = sampled(3, n=2)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, *(tokens(100 + i, i) for i in range(4)), params=params)
    monkeypatch.undo()
    assert len(calls) == num_before + 1
    assert not llm.llm_engine.has_work
    assert not list(llm.llm_engine.scheduler.waiting)
    assert num_held(llm) == (0, 0)
    check(llm.llm_engine.scheduler.cache)
    tiny.check(ask(llm, *(tokens(100 + i, i) for i in range(4))))


def test_an_interrupt_behind_the_end_of_an_answer_leaves_nothing_of_it(tiny, monkeypatch):
    """While the step that was launched ahead is sampled, for another answer."""
    llm = tiny.open(async_scheduling=True)
    engine = llm.llm_engine
    wishes = greedy(4, repetition_penalty=1.1), greedy(12, repetition_penalty=1.1)
    jobs = [engine.add(Prompt(token_ids=tokens(20, seed)), wishes[seed]) for seed in (0, 1)]
    sample = engine.runner.sample

    def interrupted(*args):
        sample(*args)
        if jobs[0].is_finished and not jobs[1].is_finished and engine.pipeline.in_flight:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(steps_until_done(llm))
    list(steps_until_done(llm))
    assert [token for job in jobs for token in job.output().outputs[0].token_ids] == [
        token
        for job, wish in zip(jobs, wishes, strict=True)
        for token in tiny.expected(job.prompt.token_ids, wish)
    ]
    assert len(engine._completions) == 0


def test_interrupted_bookkeeping_ends_the_engine(llm, monkeypatch):
    """What it had half done cannot be known."""
    monkeypatch.setattr(llm.llm_engine.scheduler, "update", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, tokens(20))
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        ask(llm, tokens(20))


# --- sampling parameters are none of them ignored -------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 8},
        {"temperature": 3.0, "top_k": 2},
        {"temperature": 3.0, "top_p": 0.5},
        {"temperature": 3.0, "min_p": 0.3},
        {"max_tokens": 5},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {7: 100.0}},
        {"logprobs": 2},
    ],
    ids=str,
)
def test_every_parameter_has_an_effect(llm, changes):
    base = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "seed": 7}
    plainest = base | {k: v for k, v in changes.items() if k == "temperature" and len(changes) > 1}
    params = [SamplingParams(**plainest), SamplingParams(**(base | changes))]
    without, with_ = (ask(llm, tokens(50), params=each)[0].outputs[0] for each in params)
    assert (without.token_ids, without.logprobs) != (with_.token_ids, with_.logprobs)


def test_ids_stay_inside_the_vocabulary(llm):
    (output,) = ask(llm, tokens(50), params=sampled(100, temperature=5.0))
    assert all(0 <= token < VOCAB_SIZE for token in answer(output))


def _common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def _fail(*_):
    raise RuntimeError("no memory")


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_forked_process_is_told_to_make_its_own(llm):
    """The engine's thread does not exist there: a call would wait for ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: this process has threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            llm.generate(prompt(tokens(8)), greedy(1), use_tqdm=False)
        except EngineDeadError as error:
            status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert llm.generate(prompt(tokens(8)), greedy(1), use_tqdm=False)


def test_an_llm_is_not_sent_to_other_processes(llm):
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(llm)
