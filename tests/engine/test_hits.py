"""The hits that Milepost promises, at page size 64 in the default mode, with a real model.

The measured table is shown when all tests are over. vLLM's figures are those of its 0.33.0
scheduler and block manager on Qwen3-Next's geometry with FlashInfer (blocks of 576 tokens, or of
1088 where it says so).
"""

from __future__ import annotations

import pytest
import torch

from milepost.cache.tree import upwards
from tests.engines import answer, ask, cached, greedy, metric, open_llm, prompt, save_tiny, tokens
from tests.mtp import add_head

TITLE = "prompt tokens reused (page size 64, default mode)"
SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tiny = save_tiny(tmp_path_factory.mktemp("small"), "qwen3_next", torch.float32, **SMALL)
    add_head(tiny.folder)
    return tiny.folder


@pytest.fixture(params=[None, {"method": "mtp"}], ids=["plain", "mtp"])
def llm(folder, request):
    """With a head that drafts, too, every hit is the same."""
    return open_llm(folder, num_pages=2048, num_slots=64, speculative_config=request.param)


@pytest.fixture(scope="module")
def row(tables):
    """Adds a row to the table that is shown at the end."""
    rows = tables.setdefault(TITLE, [("case", "vLLM 0.33", "Milepost")])
    return lambda *cells: cells in rows or rows.append(cells)


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


@pytest.mark.parametrize(
    ("shared", "own", "marks", "theirs", "least"),
    [
        (100, 64, [], "0, 0, 0, 0", [0, 0, 100, 100]),
        (100, 64, [100], "0, 0, 0, 0", [0, 100, 100, 100]),
        (400, 100, [], "0, 0, 0, 0", [0, 0, 384, 384]),
        (400, 100, [400], "0, 0, 0, 0", [0, 384, 384, 384]),
        (1500, 700, [], "0, 0, 1152", [0, 0, 1472]),
        (1500, 700, [1500], "0, 0, 1152", [0, 1472, 1472]),
    ],
)
def test_shared_prefix(llm, row, shared, own, marks, theirs, least):
    prompts = [tokens(shared, 0) + tokens(own, 1 + i) for i in range(len(least))]
    outputs = [ask(llm, each, params=greedy(4), cache_marks=marks)[0] for each in prompts]
    named = ", the shared part marked" if marks else ""
    row(
        f"{shared} shared + {own} own, {len(least)} requests{named}",
        theirs,
        listed(cached(outputs)),
    )
    assert cached(outputs) == least


def test_chance_agreement_makes_no_states(llm):
    """Own parts that begin alike by chance don't move the branch point of a short prefix."""
    shared = tokens(100, 0)
    for first in (1, 2, 3, 3, 3, 3):
        ask(llm, [*shared, first, first, *tokens(60, first)], params=greedy(1))
    (output,) = ask(llm, [*shared, 9, 9, *tokens(60, 9)], params=greedy(1))
    assert cached([output]) == [100]
    made = metric(llm, "checkpoints_made")
    ask(llm, [*shared, 9, 8, *tokens(60, 8)], params=greedy(1))
    assert metric(llm, "checkpoints_made") - made == 2  # the prompt's end and the answer's


def test_same_prompt_twice(llm, row):
    outputs = [ask(llm, tokens(2200), params=greedy(4))[0] for _ in range(2)]
    row("2200-token prompt sent twice", "0, 1728", listed(cached(outputs)))
    assert cached(outputs) == [0, 2176]


def test_second_turn_of_a_chat(llm, row):
    (first,) = ask(llm, tokens(1000), params=greedy(800))
    history = [*tokens(1000), *answer(first)]
    (second,) = ask(llm, [*history, *tokens(50, 1)], params=greedy(4))
    row("chat, 1000 in / 800 out, second turn", "576", listed(cached([second])))
    assert len(history) == 1800
    assert cached([second]) == [1799]


def test_forward_passes_of_a_cold_prompt(llm, row):
    ask(llm, tokens(1057), params=greedy(1))
    num_steps = metric(llm, "num_steps")
    row("forward passes for a cold 1057-token prompt", "1", f"{num_steps:.0f}")
    assert num_steps == 1
    assert metric(llm, "prompt_tokens_computed") == 1057


@pytest.mark.slow
@pytest.mark.parametrize("llm", [None], indirect=True, ids=["plain"])
def test_long_chat_loses_its_checkpoints_one_by_one(llm, row):
    """Each loss costs the tokens back to the next one; 0 is left only without any."""
    history = tokens(1000)
    while len(history) <= 20_000:
        (output,) = ask(llm, history, params=greedy(40))
        history += [*answer(output), *tokens(1000, len(history))]
    cache = llm.llm_engine.scheduler.cache
    chain = cache.chain(history)
    checkpoints = list(upwards(cache.match(chain).checkpoint))
    positions = [checkpoint.position for checkpoint in checkpoints]
    assert len(positions) >= 3
    left = []
    for checkpoint in checkpoints:
        left.append(cache.match(chain).state_length)
        cache.reclaimer.evict_checkpoint(checkpoint, "slots")
    row("finished 20k-token chat: reusable", "19584 (1088)", f"{left[0]}")
    row("finished 20k-token chat after the loss of one state", "0 (1088)", f"{left[1]}")
    assert left == positions
    (output,) = ask(llm, history, params=greedy(4))
    assert output.num_cached_tokens == 0
    assert output.cache_report.lost["checkpoint_evicted"] > 19_000


def test_long_chat_resumes_from_the_next_checkpoint(folder):
    """The same through `generate`: what is left is what is reused."""
    llm = open_llm(folder, num_pages=512)
    history = tokens(1000)
    for turn in range(4):
        (output,) = ask(llm, history, params=greedy(40))
        history += [*answer(output), *tokens(1000, 50 + turn)]
    cache = llm.llm_engine.scheduler.cache
    answer_end, prompt_end, left, *_ = upwards(cache.match(cache.chain(history)).checkpoint)
    for checkpoint in (answer_end, prompt_end):
        cache.reclaimer.evict_checkpoint(checkpoint, "slots")
    (output,) = ask(llm, history, params=greedy(4))
    assert output.num_cached_tokens == left.position > 0
    lost = output.cache_report.lost["checkpoint_evicted"]
    assert lost == prompt_end.position - left.position


def test_slots_of_one_running_request(llm, row):
    stream = llm.stream(prompt(tokens(2000)), greedy(8))
    next(stream)
    slots = llm.llm_engine.scheduler.cache.slots
    row("state slots that a running request holds", "4 blocks of 576", f"{slots.num_used}")
    assert slots.num_used == 1
    assert slots.num_cached == 1, "the end of its prompt; gives way under pressure"
    stream.close()


def test_own_checkpoints_give_way(folder):
    """As many requests as there are slots run side by side, and none is preempted for a state."""
    llm = open_llm(folder, num_slots=3)
    jobs = ask(llm, *(tokens(500, i) for i in range(3)), params=greedy(8))
    assert metric(llm, "num_preemptions") == 0
    assert metric(llm, "num_steps") == 8
    assert [len(answer(job)) for job in jobs] == [8, 8, 8]
