"""The README's table of hits, for every architecture whose layers keep states in slots."""

from __future__ import annotations

import pytest

from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, answer, ask, cached, greedy, open_llm, tokens

ARCHITECTURES = (
    "qwen3_next",
    "qwen3_5",
    "olmo_hybrid",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "kimi_linear",
    "bailing_hybrid",
    "alice_ai",
    "qwen4_exp",
    "intern_s2_preview",
    "minicpmv4_6",
    "lfm3",
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def llm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder, vocab_size=VOCAB_SIZE)
    return open_llm(folder, num_pages=256, num_slots=32)


@pytest.mark.parametrize(
    ("shared", "own", "marks", "expected"),
    [
        (100, 64, [], [0, 0, 100, 100]),
        (100, 64, [100], [0, 100, 100]),
        (400, 100, [], [0, 0, 384, 384]),
        (400, 100, [400], [0, 384, 384]),
        (400, 0, [], [0, 384]),
    ],
)
def test_shared_prefixes(llm, shared, own, marks, expected):
    assert llm.reset_prefix_cache()
    prompts = [tokens(shared) + tokens(own, 1 + i) for i in range(len(expected))]
    outputs = [ask(llm, each, params=greedy(2), cache_marks=marks)[0] for each in prompts]
    assert cached(outputs) == expected


def test_second_turn_of_a_chat(llm):
    assert llm.reset_prefix_cache()
    (first,) = ask(llm, tokens(200), params=greedy(30))
    history = [*tokens(200), *answer(first)]
    (second,) = ask(llm, [*history, *tokens(50, 1)], params=greedy(2))
    assert cached([second]) == [len(history) - 1]
