"""Answers of 4,000 tokens with drafts are those without, whoever drafts, at several numbers of
sequences, greedy and sampled. Not of every run: `make test-nightly`.

In float64 they are the same token by token. In float32 a product of several rows may be rounded
otherwise than one row's, and where two tokens are about as likely, an answer may go another way.
"""

from __future__ import annotations

import random
from itertools import takewhile
from typing import Any

import pytest
import torch

from milepost import CompletionOutput
from tests.engine.speculating import Oracle, consult
from tests.engines import WIDE_STATES, Tiny, ask_all, greedy, logprobs, sampled, save_tiny
from tests.mtp import add_head

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

NUM_TOKENS = 4000
MOST = 17
VOCAB_SIZE = 24
"""So few that the same runs of tokens come again and again."""
PROMPTS = [random.Random(i).choices(range(VOCAB_SIZE), k=40) for i in range(MOST)]
WISHES = [
    greedy(NUM_TOKENS) if i % 2 == 0 else sampled(NUM_TOKENS, temperature=0.8, seed=i)
    for i in range(MOST)
]
POOLS = {"num_pages": 72 * MOST, "num_slots": 3 * MOST}
CLOSE = 1e-3
"""Of log-probabilities in float32."""
METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp"},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2},
    "erring": {"method": "ngram"},
}


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def tiny(request, tmp_path_factory) -> Tiny:
    # A state is no smaller than a page.
    sizes = {"vocab_size": VOCAB_SIZE, **WIDE_STATES}
    made = save_tiny(tmp_path_factory.mktemp("long"), "qwen3_5", request.param, **sizes)
    add_head(made.folder)
    return made


@pytest.fixture(scope="module")
def plain(tiny) -> list[CompletionOutput]:
    llm = tiny.open(**POOLS, max_num_seqs=MOST, enable_prefix_caching=False)
    return ask_all(llm, PROMPTS, WISHES)


@pytest.mark.parametrize("num", [1, 3, MOST])
@pytest.mark.parametrize("method", METHODS)
def test_long_answers_are_those_without_drafts(tiny, plain, method, num):
    config = {"num_speculative_tokens": 3, "adaptive": False, **METHODS[method]}
    llm = tiny.open(**POOLS, max_num_seqs=MOST, speculative_config=config)
    if method == "erring":
        known = [(p, own.token_ids) for p, own in zip(PROMPTS, plain, strict=True)]
        consult(llm, Oracle(known, lambda place: place % 4 == 1, VOCAB_SIZE))
    found = ask_all(llm, PROMPTS[:num], WISHES[:num])
    stats = llm.llm_engine.scheduler.stats
    print(f"{tiny.dtype} {method} {num}: {stats.num_accepted_tokens} of {stats.num_draft_tokens}")
    assert stats.num_draft_tokens > NUM_TOKENS / 4
    if tiny.dtype == torch.float64:
        assert [each.token_ids for each in found] == [own.token_ids for own in plain[:num]]
        return
    others = [length for length in map(num_common, found, plain) if length < NUM_TOKENS]
    assert len(others) <= 1 + num // 10, others


def num_common(found: CompletionOutput, expected: CompletionOutput) -> int:
    """Tokens until an answer goes another way, which are as likely as they have to be."""
    pairs = zip(found.token_ids, expected.token_ids, strict=True)
    num = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    close = zip(logprobs(found)[:num], logprobs(expected)[:num], strict=True)
    assert all(abs(a - b) < CLOSE for a, b in close)
    return num
