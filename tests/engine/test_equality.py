"""A hit never changes the answer: every way in which a state comes back, against a cold run.

Each test says which path it takes and makes sure that it was taken. Answers are compared, token by
token and with the tokens' log-probabilities, with those of an engine without a cache to one prompt
at a time, which are compared with the model's choice behind every prefix, computed in one pass
without any engine.
"""

from __future__ import annotations

import functools
import random
from itertools import islice

import pytest
import torch

from milepost.engine.prompts import Prompt
from milepost.kernels.attention import rows_per_page
from tests.engines import (
    NUM_TOKENS,
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
from tests.numbers import relative_error

DTYPES = [torch.float64, torch.float32]


def with_model(model: str, name: str, values: list[object], in_float32: object):
    """All values in float64, where answers are exact, and one in float32: what they stand for has
    nothing to do with the type."""
    cases = [*((torch.float64, value) for value in values), (torch.float32, in_float32)]
    ids = [f"{str(dtype)[6:]}-{value}" for dtype, value in cases]
    return pytest.mark.parametrize((model, name), cases, indirect=[model], ids=ids)


with_tiny = functools.partial(with_model, "tiny")


EACH_PAGE_SIZE = with_tiny("page_size", [16, 64, 128], 64)
END = 500 + NUM_TOKENS - 1
CHAT_ENDS = [300 + NUM_TOKENS - 1, 300 + NUM_TOKENS + 30 + NUM_TOKENS - 1]
"""Where the first two answers of a chat end that begins with 300 tokens and goes on with 30: their
last token was returned and not consumed.
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each is made once, with the cold answers that it comes to know: a fixture of the module whose
    parameter is the type would be made anew whenever that changes from test to test.
    """
    return functools.cache(
        lambda name, dtype: save_tiny(tmp_path_factory.mktemp(name), name, dtype, **WIDE_STATES)
    )


@pytest.fixture(params=DTYPES, ids=lambda d: str(d)[6:])
def tiny(request, saved):
    """With experts; takes every path."""
    return saved("qwen3_next", request.param)


@pytest.fixture(params=DTYPES, ids=lambda d: str(d)[6:])
def dense(request, saved):
    """Without experts, and with the other arrangement of weights; takes the main paths."""
    return saved("qwen3_5", request.param)


def siblings(shared: int, own: int, num: int) -> list[list[int]]:
    """Prompts that part after `shared` tokens."""
    return [tokens(shared, seed=0) + tokens(own, seed=1 + i) for i in range(num)]


def follow_up(output, num_new: int = 30) -> list[int]:
    """The next turn of a chat: all so far, then something new."""
    return [*output.prompt_token_ids, *answer(output), *tokens(num_new, seed=99)]


def test_answers_are_worth_comparing(tiny):
    """They vary, so that a state that came back wrong would show."""
    answers = [tiny.expected(token_ids, greedy()) for token_ids in siblings(400, 100, 3)]
    assert len({tuple(each) for each in answers}) == 3
    assert all(len(set(each)) > NUM_TOKENS // 2 for each in answers)


@with_tiny(
    "where",
    [(0, "conv"), (0, "recurrent"), (1, "conv"), (1, "recurrent"), (2, "kv")],
    (1, "recurrent"),
)
def test_answers_would_show_wrong_contents(tiny, where):
    """A hit on a state or KV of another prompt, in one layer alone, is seen."""
    layer, part = where
    llm = tiny.open()
    ask(llm, tokens(500))
    ask(llm, tokens(500, seed=1))
    pools, cache = llm.llm_engine.runner.pools, llm.llm_engine.scheduler.cache
    own, other = (cache.match(cache.chain(tokens(500, seed=seed))) for seed in (0, 1))
    if part == "kv":
        pool, right, wrong = pools.kv[layer][:, 0], own.path.nodes[3].page, other.path.nodes[3].page
    else:
        pool = getattr(pools.states[layer], part)
        right, wrong = own.checkpoint.slot, other.checkpoint.slot
    pool[right] = pool[wrong]
    (output,) = ask(llm, tokens(500))
    assert output.num_cached_tokens == 448
    with pytest.raises(AssertionError):
        tiny.check([output])


@pytest.mark.parametrize("params", [greedy(), sampled()], ids=["greedy", "sampled"])
def test_cold_answer_is_that_of_a_plain_loop(tiny, params):
    """The whole prefix computed again for every token, by the model alone."""
    assert tiny.expected(tokens(100), params) == tiny.loop(tokens(100), params)


# --- where a state comes back from ----------------------------------------------------------------


@EACH_PAGE_SIZE
def test_hit(tiny, page_size):
    llm = tiny.open(page_size=page_size)
    token_ids = tokens(500)
    outputs = [ask(llm, token_ids)[0] for _ in range(3)]
    assert cached(outputs) == [0, 448, 499]  # the end itself, where the grid gives up a tenth
    tiny.check(outputs)


@EACH_PAGE_SIZE
def test_branch_point(tiny, page_size):
    """The second prompt finds KV and no state: it shares the pages and computes all tokens."""
    llm = tiny.open(page_size=page_size)
    outputs = [ask(llm, token_ids)[0] for token_ids in siblings(400, 100, 4)]
    assert cached(outputs) == [0, 0, 384, 384]
    assert outputs[1].cache_report.kv_length == 400 // page_size * page_size
    tiny.check(outputs)


def test_shared_pages_are_not_written_again(tiny, monkeypatch):
    """Not even with the same values: others may be reading them."""
    llm = tiny.open()
    first, second, third = siblings(400, 100, 3)
    ask(llm, first)
    shared = set(_page_table(llm, second)[:6])
    model, written = llm.llm_engine.runner.executor.model, set()
    forward = model.forward

    def watched(token_ids, ctx):
        page_rows = rows_per_page(next(iter(ctx.kv.values())))
        kv_rows = ctx.step.kv_rows
        written.update((kv_rows[kv_rows >= 0] // page_rows).tolist())
        return forward(token_ids, ctx)

    monkeypatch.setattr(model, "forward", watched)
    ask(llm, second)
    ask(llm, third)
    assert len(shared) == 6
    assert written
    assert not shared & written


@EACH_PAGE_SIZE
def test_mark(tiny, page_size):
    llm = tiny.open(page_size=page_size)
    outputs = [ask(llm, token_ids, cache_marks=[400])[0] for token_ids in siblings(400, 100, 3)]
    assert cached(outputs) == [0, 384, 384]
    tiny.check(outputs)


@EACH_PAGE_SIZE
def test_answer_end(tiny, page_size):
    """The second and third turns of a chat resume where the answer before them ended, in a page."""
    llm = tiny.open(page_size=page_size)
    turns = ask(llm, tokens(300))
    for _ in range(2):
        turns += ask(llm, follow_up(turns[-1]))
    assert cached(turns) == [0, *CHAT_ENDS]
    assert all(position % page_size for position in CHAT_ENDS)
    tiny.check(turns)


@EACH_PAGE_SIZE
def test_two_resume_from_the_same_place_inside_a_page(tiny, page_size):
    """Each gets a copy of the tail page of its own."""
    llm = tiny.open(page_size=page_size)
    (first,) = ask(llm, tokens(300))
    base = [*first.prompt_token_ids, *answer(first)]
    outputs = ask(llm, *([*base, *tokens(20 + i, seed=50 + i)] for i in range(3)))
    assert cached(outputs) == [len(base) - 1] * 3
    tiny.check(outputs)


@with_tiny("page_size", [16, 128], 16)
@pytest.mark.parametrize(
    ("mode", "block_size", "expected"),
    [
        ("auto", 512, [0, 448, 384, END]),
        ("align", 128, [0, 384, 384, 384]),
        ("all", 64, [0, 448, 384, 512]),
        ("all", 192, [0, 384, 384, 384]),
        ("none", 512, [0, 0, 0, 0]),
    ],
)
def test_modes(tiny, mode, block_size, expected, page_size):
    """The same prompt again, one that parts from it, and the next turn."""
    llm = tiny.open(mamba_cache_mode=mode, mamba_block_size=block_size, page_size=page_size)
    first, second = siblings(400, 100, 2)
    outputs = [ask(llm, first)[0], ask(llm, first)[0]]
    if mode == "auto":
        ask(llm, tokens(400) + tokens(100, seed=77))  # leaves the state where the paths part
    outputs += ask(llm, second)
    outputs += ask(llm, follow_up(outputs[0]))
    assert cached(outputs) == expected
    tiny.check(outputs)


def test_state_of_a_block_inside_the_answer(tiny):
    """`all` keeps states that decoding passes."""
    llm = tiny.open(mamba_cache_mode="all", mamba_block_size=64)
    params = greedy(40)
    (first,) = ask(llm, tokens(300), params=params)
    outputs = [first, *ask(llm, follow_up(first), params=params)]
    assert cached(outputs) == [0, 320]
    tiny.check(outputs, params)


# --- how it is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "align", "all"])
@with_tiny("budget", [64, 130, 512], 130)
def test_chunks(tiny, budget, mode):
    llm = tiny.open(max_num_batched_tokens=budget, mamba_cache_mode=mode, mamba_block_size=128)
    first, second, third = siblings(600, 100, 3)
    outputs = ask(llm, first, params=greedy())
    assert metric(llm, "num_steps") == -(-700 // (budget // 64 * 64)) + NUM_TOKENS - 1
    outputs += ask(llm, second)
    outputs += ask(llm, third)
    outputs += ask(llm, first)
    assert min(cached(outputs)[2:]) >= 512
    tiny.check(outputs)


def test_neighbours(tiny):
    """Hits, cold prompts and decodes in the same steps."""
    llm = tiny.open(max_num_batched_tokens=512)
    warm = siblings(400, 100, 3)
    for token_ids in warm:
        ask(llm, token_ids)
    prompts = [warm[0], tokens(90, 11), warm[2], tokens(333, 12), warm[1], tokens(64, 13), [5]]
    jobs = [llm.llm_engine.add(*_read(token_ids)) for token_ids in prompts]
    assert max(steps_until_done(llm)) == len(prompts)
    outputs = [job.output() for job in jobs]
    assert cached(outputs) == [448, 0, 448, 0, 448, 0, 0]
    tiny.check(outputs)


@with_tiny("budget", [128, 130, 8192], 8192)
def test_prefix_shared_within_a_batch(tiny, budget):
    """Those behind wait for the first one's state."""
    llm = tiny.open(max_num_batched_tokens=budget)
    outputs = ask(llm, *siblings(400, 100, 4))
    assert cached(outputs) == [0, 384, 384, 384]
    assert metric(llm, "prefix_waits") > 0
    tiny.check(outputs)


def test_pages_computed_twice_within_a_batch(tiny):
    """A shared prefix too short to wait for: each computes it, and one copy is kept."""
    llm = tiny.open(page_size=16)
    outputs = ask(llm, *siblings(120, 50, 3))
    assert metric(llm, "prefix_waits") == 0
    assert metric(llm, "pages_duplicate") > 0
    outputs += ask(llm, *siblings(120, 50, 3))
    assert min(cached(outputs)[3:]) > 0
    tiny.check(outputs)


@with_tiny("pages", [(16, 72), (64, 18), (128, 11)], (64, 18))
def test_preempted_and_resumed(tiny, pages):
    page_size, num_pages = pages
    llm = tiny.open(num_pages=num_pages, page_size=page_size, max_num_batched_tokens=256)
    params = greedy(60)
    outputs = ask(llm, *(tokens(220 + 10 * i, seed=i) for i in range(4)), params=params)
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "resumed_hits") > 0
    tiny.check(outputs, params)


def test_preempted_in_the_middle_of_its_prompt(tiny):
    """Two decodes leave 64 tokens a step to the third, and want its pages before it is through."""
    llm = tiny.open(num_pages=10, max_num_batched_tokens=66)
    params = greedy(100)
    prompts = [tokens(125, 1), tokens(125, 2), tokens(300, 3)]
    outputs = ask(llm, *prompts, params=params)
    assert metric(llm, "num_preemptions") > 0
    tiny.check(outputs, params)


# --- what becomes of the cache --------------------------------------------------------------------


@with_tiny("cause", ["slots", "pages"], "slots")
def test_eviction_and_return(tiny, cause):
    """Prompts go round; what was evicted is computed again, what was not is a hit."""
    llm = tiny.open(**({"num_slots": 4} if cause == "slots" else {"num_pages": 14}))
    prompts = siblings(200, 100, 3) + [tokens(300, seed=20 + i) for i in range(2)]
    outputs = []
    for index in (0, 1, 0, 2, 1, 3, 4, 0, 0, 2, 3, 1, 4, 4, 0):
        outputs += ask(llm, prompts[index])
    assert metric(llm, "checkpoints_evicted", cause=cause) > 0
    lost = metric(llm, "prefix_cache_lost_tokens", reason="checkpoint_evicted")
    lost += metric(llm, "prefix_cache_lost_tokens", reason="kv_evicted")
    assert lost > 0
    assert metric(llm, "prefix_cache_hits") > 0
    tiny.check(outputs)


def test_no_slot_beside_the_state(tiny):
    """With a single slot a request cannot read one state and write another, so it starts cold."""
    llm = tiny.open(num_slots=1)
    turns = ask(llm, tokens(300))
    for _ in range(2):
        turns += ask(llm, follow_up(turns[-1]))
    assert cached(turns) == [0, 0, 0]
    lost = metric(llm, "prefix_cache_lost_tokens", reason="checkpoint_evicted")
    assert lost == sum(CHAT_ENDS)
    tiny.check(turns)


def test_no_page_beside_the_tail(tiny):
    """There is no room for a copy of the tail page."""
    llm = tiny.open(num_pages=6, max_num_seqs=1)
    turns = ask(llm, tokens(300))
    turns += ask(llm, follow_up(turns[-1]))
    assert cached(turns) == [0, 0]
    tiny.check(turns)


def test_reset(tiny):
    llm = tiny.open()
    outputs = ask(llm, tokens(500))
    assert llm.reset_prefix_cache()
    outputs += ask(llm, tokens(500)) + ask(llm, tokens(500))
    assert cached(outputs) == [0, 0, 448]
    tiny.check(outputs)


def test_salt(tiny):
    """Salts share nothing, and none changes the answer."""
    llm = tiny.open()
    salts = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}]
    outputs = [ask(llm, tokens(500), **salt)[0] for salt in salts]
    assert cached(outputs) == [0, 0, 0]
    assert [list(each.cache_report.lost) for each in outputs] == [["unseen"]] * 3
    outputs += [ask(llm, tokens(500), **salt)[0] for salt in salts]
    assert cached(outputs[3:]) == [448, 448, 448]
    tiny.check(outputs)


def test_abort_in_mid_stream(tiny):
    """What an abandoned answer leaves is used by the same prompt and by one that goes on."""
    llm = tiny.open()
    stream = llm.stream(prompt(tokens(500)), greedy())
    partial = list(islice(stream, 6))[-1]
    stream.close()
    assert num_held(llm) == (0, 0)
    assert not partial.finished
    assert answer(partial) == tiny.expected(tokens(500), greedy())[:6]
    outputs = ask(llm, tokens(500)) + ask(llm, follow_up(partial))
    assert cached(outputs) == [448, 505]
    tiny.check(outputs)


@with_tiny("num_steps", [1, 2, 3], 2)
def test_abort_in_mid_prefill(tiny, num_steps):
    llm = tiny.open(max_num_batched_tokens=130)
    job = llm.llm_engine.add(*_read(tokens(500)))
    for _ in range(num_steps):
        llm.llm_engine.step()
    llm.llm_engine.abort(job)
    assert num_held(llm) == (0, 0)
    outputs = ask(llm, tokens(500))
    assert cached(outputs) == [128 * num_steps]
    tiny.check(outputs)


@with_tiny("layer", [0, 1, 2], 1)
def test_interrupt_in_mid_step(tiny, layer, monkeypatch):
    """A step that was cut short has written some layers' states: none of it may be used again."""
    llm = tiny.open()
    neighbour = llm.stream(prompt(tokens(300, seed=5)), greedy())
    next(neighbour)
    stream = llm.stream(prompt(tokens(500)), greedy())
    partial = list(islice(stream, 6))[-1]
    with monkeypatch.context() as patch:
        mlp = llm.llm_engine.runner.executor.model.layers[layer].blocks[1].parts[0]
        patch.setattr(mlp, "run", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    rest = list(neighbour)
    assert num_held(llm) == (0, 0)
    outputs = [rest[-1], *ask(llm, follow_up(partial)), *ask(llm, tokens(500))]
    tiny.check(outputs)
    assert metric(llm, "resumed_tokens") >= 300, "the neighbour was computed again"


# --- sampling -------------------------------------------------------------------------------------


def test_sampled(tiny):
    """The draws of a request follow from its seed, however its prompt came to be computed."""
    llm = tiny.open()
    prompts = siblings(400, 100, 3)
    outputs = [ask(llm, each, params=sampled())[0] for each in (*prompts, prompts[0])]
    outputs += ask(llm, follow_up(outputs[0]), params=sampled())
    assert cached(outputs) == [0, 0, 384, 448, END]
    tiny.check(outputs, sampled())


def test_sampled_in_a_batch_preempted_and_resumed(tiny):
    llm = tiny.open(num_pages=12, max_num_batched_tokens=256)
    params = sampled(50, top_p=0.9, top_k=50, repetition_penalty=1.1)
    outputs = ask(llm, *(tokens(230 + 10 * i, seed=i) for i in range(4)), params=params)
    assert metric(llm, "num_preemptions") > 0
    tiny.check(outputs, params)


def test_several_answers(tiny):
    """All but the first read the prompt's state; each is the one that it would be alone."""
    llm = tiny.open()
    params = sampled(n=3)
    outputs = ask(llm, tokens(500), params=params) + ask(llm, tokens(500), params=params)
    assert cached(outputs) == [0, 448]
    assert metric(llm, "prefix_cache_hits") == 448 * 5
    assert len({tuple(each.token_ids) for each in outputs[0].outputs}) == 3
    tiny.check(outputs, params)


# --- everything at once ---------------------------------------------------------------------------


@with_tiny("seed", [0, 1], 1)
def test_mixture(tiny, seed):
    """A random tree of prompts in small pools, several at a time: every answer is the cold one."""
    rng = random.Random(seed)
    llm = tiny.open(
        page_size=rng.choice([16, 64]),
        num_pages=rng.choice([768, 1024]) // 16,
        num_slots=rng.choice([3, 5, 8]),
        max_num_batched_tokens=rng.choice([64, 130, 512]),
        max_num_seqs=4,
    )
    known, outputs = [tokens(200, seed=1)], []
    for turn in range(8):
        prompts = []
        for _ in range(rng.randint(1, 4)):
            base = rng.choice(known)
            prompts.append([*base[: rng.randint(1, len(base))], *tokens(rng.randint(1, 80), turn)])
        batch = ask(llm, *prompts)
        known += [*prompts[:1], [*prompts[-1], *answer(batch[-1])]]
        outputs += batch
    assert metric(llm, "prefix_cache_hits") > 0
    assert metric(llm, "checkpoints_evicted") > 0
    tiny.check(outputs)


def test_dense(dense):
    """The paths of the other tests in short: hit, branch point, chat, neighbours, answers."""
    llm = dense.open(max_num_batched_tokens=130)
    prompts = siblings(400, 100, 3)
    outputs = [ask(llm, token_ids)[0] for token_ids in (*prompts, prompts[0])]
    outputs += ask(llm, follow_up(outputs[0]), prompts[1], tokens(90, 11))
    assert cached(outputs) == [0, 0, 384, 448, END, 448, 0]
    dense.check(outputs)
    several = sampled(n=2)
    outputs = ask(llm, prompts[0], params=several)
    assert cached(outputs) == [499]
    dense.check(outputs, several)


def test_dense_preempted_and_resumed(dense):
    llm = dense.open(num_pages=18, max_num_batched_tokens=256)
    params = greedy(60)
    outputs = ask(llm, *(tokens(220 + 10 * i, seed=i) for i in range(4)), params=params)
    assert metric(llm, "resumed_hits") > 0
    dense.check(outputs, params)


# --- the states themselves ------------------------------------------------------------------------


def test_exported_state_is_what_the_prefill_leaves(tiny):
    """Bit for bit, in the slots: a chunk ends at 448, exports there, and leaves its own state."""
    llm = tiny.open(max_num_batched_tokens=448)
    job = llm.llm_engine.add(*_read(tokens(500)))
    llm.llm_engine.step()
    (allocation,) = llm.llm_engine.scheduler.cache.allocations
    assert allocation.committed == 448
    exported, left = _state_at(llm, tokens(500), 448), _state_in(llm, allocation.slot_out)
    assert all(torch.equal(exported[name], left[name]) for name in left)
    llm.llm_engine.abort(job)


@with_tiny("position", [64, 192, 448], 192)
def test_exported_state_is_that_of_a_prefill_that_ends_there(tiny, position):
    """A longer prefill's export and a shorter one's state: the same but for the rounding of matrix
    products of other shapes.
    """
    exporting, ending = tiny.open(), tiny.open()
    ask(exporting, tokens(500), params=greedy(1), cache_marks=[position])
    ask(ending, tokens(500)[:position], params=greedy(1))
    exported, left = (_state_at(llm, tokens(500), position) for llm in (exporting, ending))
    for name, tensor in exported.items():
        bound = 1e-12 if tensor.dtype == torch.float64 else 1e-4
        assert relative_error(tensor, left[name]) < bound, name


@with_model("dense", "position", [64, 192, 448], 192)
def test_exported_state_is_that_of_a_prefill_of_the_same_shape(dense, position):
    """Where the matrix products have the same rows: the shorter prefill's batch is filled up with a
    prompt that makes it as long. In float64 bit for bit; in float32 some CPUs add up the products
    of a batch of chunks in an order that depends on their number.
    """
    exporting, ending = dense.open(), dense.open()
    ask(exporting, tokens(500), params=greedy(1), cache_marks=[position])
    ask(ending, tokens(500)[:position], tokens(500 - position, seed=1), params=greedy(1))
    assert metric(ending, "num_steps") == 1
    exported, left = (_state_at(llm, tokens(500), position) for llm in (exporting, ending))
    for name, tensor in exported.items():
        assert tensor.abs().sum() > 0
        bound = 0.0 if tensor.dtype == torch.float64 else 1e-6
        assert relative_error(tensor, left[name]) <= bound, name


def _state_at(llm, token_ids: list[int], position: int) -> dict[str, torch.Tensor]:
    """The cached state of all layers after `position` tokens."""
    cache = llm.llm_engine.scheduler.cache
    match = cache.match(cache.chain(token_ids), limit=position)
    assert match.state_length == position
    return _state_in(llm, match.checkpoint.slot)


def _state_in(llm, slot: int) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": getattr(state, name)[slot]
        for index, state in llm.llm_engine.runner.pools.states.items()
        for name in ("conv", "recurrent")
    }


def _page_table(llm, token_ids: list[int]) -> list[int]:
    cache = llm.llm_engine.scheduler.cache
    return [node.page for node in cache.match(cache.chain(token_ids)).path.nodes]


def _read(token_ids):
    return Prompt(token_ids=list(token_ids)), greedy()


def _interrupt(*_):
    raise KeyboardInterrupt
