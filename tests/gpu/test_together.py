"""Features with each other, in memory as tight as can be: chats of several turns on the embedded
model give the answers of an engine that keeps nothing, drafts nothing and has room for all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.engine.assembly import sizing
from milepost.sampling_params import StructuredOutputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_CHATS, NUM_TURNS = 12, 3
BYTES = 24 << 20
"""Of memory for pages and slots together, where they share it."""
TIGHT = {"num_pages": 30, "num_slots": 9}
SYSTEMS = ["You answer shortly.", "You are a patient teacher of Python. " * 12]
QUESTIONS = [
    "What does `str.partition` do?",
    "What is the module `json` for?",
    "How do I use `textwrap.dedent`?",
    "When is `KeyError` raised?",
    "Show a function that adds two numbers.",
    "What does `zip` return?",
    "Explain `itertools.chain`.",
    "What is a generator?",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
HEAD = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
BOTH = {"method": ["suffix", "mtp"], "num_speculative_tokens": 3, "adaptive": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
Answers = dict[tuple[int, int], str]
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "head": HEAD,
    "both": BOTH,
    "ngram": NGRAM,
}


def params(kind: str, chat: int, turn: int) -> SamplingParams:
    each: dict[str, Any] = {"max_tokens": 48 + 8 * (chat % 4), "seed": 100 * turn + chat}
    if kind == "greedy":
        return SamplingParams(temperature=0.0, **each)
    each |= {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    if kind == "recommended":
        stop = ["\n\n"] if chat % 2 else None
        logprobs = 2 if chat % 3 == 0 else None
        return SamplingParams(presence_penalty=1.5, logprobs=logprobs, stop=stop, **each)
    guided = StructuredOutputs(json=SCHEMA) if chat % 2 else None
    return SamplingParams(repetition_penalty=1.1, structured_outputs=guided, **each)


def talk(llm: LLM, kind: str, said: Answers | None = None) -> Answers:
    """What each chat answers in each turn; behind it goes on what was `said`, or else that."""
    history = [[{"role": "system", "content": SYSTEMS[n % 2]}] for n in range(NUM_CHATS)]
    answers: Answers = {}
    for turn in range(NUM_TURNS):
        for n, messages in enumerate(history):
            question = QUESTIONS[(n + 3 * turn) % len(QUESTIONS)]
            messages.append({"role": "user", "content": question})
        asked = [params(kind, n, turn) for n in range(NUM_CHATS)]
        for n, output in enumerate(llm.chat(history, asked, use_tqdm=False)):
            answers[turn, n] = output.outputs[0].text
            answer = (said or answers)[turn, n]
            history[n].append({"role": "assistant", "content": answer})
    return answers


def open_llm(**options: Any) -> LLM:
    return LLM(dtype="float32", max_model_len=1024, max_num_batched_tokens=192, **options)


@pytest.mark.parametrize("kind", ["greedy", "recommended", "guided"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("drafter", "host", "memory"),
    [
        ("none", 0.02, "shared"),
        ("head", None, "shared"),
        ("head", 0.02, "split"),
        ("both", 0.02, "shared"),
        ("ngram", None, "split"),
    ],
)
def test_answers_are_those_of_a_plain_engine(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    kv: str,
    drafter: str,
    host: float | None,
    memory: str,
) -> None:
    """(Rounding of products of several rows may turn an answer now and then.)"""
    roomy = {"num_pages": 200, "num_slots": 16, "max_num_seqs": NUM_CHATS}
    plain = open_llm(enable_prefix_caching=False, kv_cache_dtype=kv, enforce_eager=True, **roomy)
    expected = talk(plain, kind)
    del plain
    if memory == "shared":
        monkeypatch.setattr(sizing, "free_bytes", lambda *_, **__: BYTES)
    llm = open_llm(
        kv_cache_dtype=kv,
        cache_host_gib=host,
        speculative_config=DRAFTERS[drafter],
        max_num_seqs=6,
        **({"cache_memory": "shared"} if memory == "shared" else TIGHT),
    )
    answers = talk(llm, kind, expected)
    same = sum(answers[each] == expected[each] for each in expected)
    assert same >= 0.9 * len(expected)
    assert llm.llm_engine.scheduler.stats.num_drafts > 0 or drafter == "none"
