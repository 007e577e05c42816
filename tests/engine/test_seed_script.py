"""One long prompt, several times, with the cache on and off: the first thing that people try."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import milepost
from tests.engine.test_hits import SMALL
from tests.engines import save_tiny

PARAGRAPH = (
    "The lighthouse keeper writes one line each evening about wind , water and the boats that "
    "passed . Read the log and answer in a short letter to the harbour office . Say which nights "
    "were calm , which boats came late and what the lamp needs before the winter storms begin . "
)
QUESTION = "The letter begins : dear friends of the harbour ,"
NUM_PARAGRAPHS = 31_700 // len(PARAGRAPH.split())
NUM_ASKED = {True: 3, False: 2}
"""Times with the cache on and off; without it each time takes as long as the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3-Next MoE with a tokenizer that has one token for a word."""
    folder = tmp_path_factory.mktemp("next")
    words = sorted({*PARAGRAPH.split(), *QUESTION.split()})
    words += [f"word{i}" for i in range(len(words), 320)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    save_tiny(folder, "qwen3_next", torch.float32, **SMALL)
    return folder


@pytest.mark.slow
def test_a_long_prompt_again_with_the_cache_on_and_off(folder, tables):
    text = PARAGRAPH * NUM_PARAGRAPHS + QUESTION
    params = milepost.SamplingParams(temperature=0.0, ignore_eos=True)
    texts, hits = {}, {}
    for is_on, num_asked in NUM_ASKED.items():
        llm = milepost.LLM(str(folder), enable_prefix_caching=is_on, disable_log_stats=False)
        texts[is_on], hits[is_on] = [], []
        for _ in range(num_asked):
            (output,) = llm.generate(text, params, use_tqdm=False)
            texts[is_on].append(output.outputs[0].text)
            assert len(output.outputs[0].token_ids) == 16
            (metric,) = [
                m for m in llm.llm_engine.get_metrics() if m.name.endswith(":prefix_cache_hits")
            ]
            assert metric in llm.get_metrics()
            hits[is_on].append(metric.value)
        length = len(output.prompt_token_ids)
    rows = [("cache", "prefix_cache_hits after each")]
    rows += [("on" if is_on else "off", str(hits[is_on])) for is_on in NUM_ASKED]
    tables[f"{length}-token prompt generated again and again"] = rows
    assert 31_600 < length < 31_800
    assert len(set(texts[True] + texts[False])) == 1
    assert len(set(texts[True][0].split())) > 4
    per_repeat = (length - 1) // 64 * 64
    assert hits[True] == [0, per_repeat, 2 * per_repeat]
    assert hits[False] == [0, 0]
