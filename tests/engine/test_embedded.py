"""The embedded model in the engine: a trained one, so its choices are not those of noise.

A hit answers as a cold run does: at a branch point, at a mark, at an answer's end inside a page,
after preemption, in a batch, in every mode.
"""

from __future__ import annotations

import pytest

from milepost import LLM, SamplingParams
from milepost.engine.text import chat

SYSTEM = {
    "role": "system",
    "content": "You are Milepost-tiny, an assistant for Python's standard library. " * 8,
}
QUESTIONS = (
    "What does `str.partition` do?",
    "What does `os.path.join` do?",
    "When is `KeyError` raised?",
    "What is the module `json` for?",
)
PARAMS = SamplingParams(temperature=0, max_tokens=20)


def open_llm(**options) -> LLM:
    return LLM(device="cpu", cpu_cache_gib=0.25, **options)


def conversations() -> list[list[dict[str, str]]]:
    return [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def cold():
    """Each conversation's answer and its follow-up's, with the cache off and nothing beside it."""
    llm = open_llm(enable_prefix_caching=False)
    return {history[1]["content"]: ask_twice(llm, history) for history in conversations()}


def ask_twice(llm: LLM, history: list[dict[str, str]]) -> list[tuple[str, list[int]]]:
    """A question, then a follow-up in the same conversation: texts and token ids."""
    answers = []
    for _ in range(2):
        (output,) = llm.chat(history, PARAMS, use_tqdm=False)
        answer = output.outputs[0]
        answers.append((answer.text, answer.token_ids))
        follow_up = {"role": "user", "content": "What arguments does it take?"}
        history = [*history, {"role": "assistant", "content": answer.text}, follow_up]
    return answers


def test_it_says_what_it_was_taught(cold):
    text, _ = cold["What does `str.partition` do?"][0]
    assert "Split the string at the first occurrence of *sep*" in text


@pytest.mark.parametrize("mode", ["auto", "align", "all"])
def test_hits_answer_as_cold_runs_do(cold, mode):
    llm = open_llm(mamba_cache_mode=mode, mamba_block_size=64)
    asked = conversations()
    for again in (asked, asked[:2]):
        for history in again:
            assert ask_twice(llm, history) == cold[history[1]["content"]]
    assert llm.llm_engine.scheduler.cache.stats.hits > 0


def test_a_batch_that_is_preempted_answers_as_cold_runs_do(cold):
    llm = open_llm(num_pages=8, num_slots=8, max_num_batched_tokens=128)
    outputs = llm.chat(conversations(), PARAMS, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [cold[question][0][0] for question in QUESTIONS]
    assert llm.llm_engine.scheduler.stats.num_preemptions > 0


def test_every_shared_token_hits_from_the_second_conversation_on():
    llm = open_llm()
    outputs = [llm.chat(history, PARAMS, use_tqdm=False)[0] for history in conversations()]
    system_end = chat.render(llm.get_tokenizer(), conversations()[0]).cache_marks[0]
    assert min(output.num_cached_tokens for output in outputs[1:]) >= system_end // 64 * 64 > 0
