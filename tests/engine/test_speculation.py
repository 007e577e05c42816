"""Drafts never change an answer and never lose a state: with any drafter, however often it errs,
all is as it is without.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from msgspec import structs

from milepost import LLM
from milepost.engine.assembly.setup import build
from milepost.engine.assembly.sizing import num_drafts_of
from milepost.engine.outputs import GrowingOutput, joined
from milepost.engine.prompts import Prompt
from milepost.errors import UnsupportedModelError
from milepost.layers.gated_delta import Arrangement, GatedDelta, GatedDeltaShapes
from milepost.layers.parameters import ModuleScope
from milepost.runner import in_flight, runner
from milepost.runner.choice import SampledToken
from milepost.runner.in_flight import accept_at, accept_equal
from milepost.runner.plain import PlainExecutor
from milepost.runner.recording import read_records
from milepost.runner.replay import digest, replay
from milepost.runner.tables import RecordRows
from milepost.sampling_params import StructuredOutputs
from milepost.speculative_config import SpeculativeConfig
from tests.engine.speculating import Oracle, consult, drafting, never
from tests.engines import (
    THREE_LAYERS,
    answer,
    ask,
    cached,
    greedy,
    logprobs,
    metric,
    num_held,
    open_llm,
    prompt,
    sampled,
    save_tiny,
    steps_until_done,
    tokens,
)
from tests.invariants import check
from tests.runner.test_arrays import sequence

POOLS = {"num_pages": 96, "num_slots": 24}
IN_SLOTS = ["qwen3_5", "kimi_linear", "nemotron_h"]
STATES = [*IN_SLOTS, "lfm2", "lfm3"]
WIDELY = ["qwen3_5", "qwen3_next"]
BEFORE_ATTENTION = {
    "qwen3_5": {},
    "kimi_linear": {**THREE_LAYERS, "mlp_layer_types": ["dense"] * 3},
    "nemotron_h": {"hybrid_override_pattern": "M-M-*-"},
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"]},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
"""With all states there."""


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """A checkpoint of a family."""

    @cache
    def find(family, dtype=torch.float64):
        # There is room for what steps of any size write of windows.
        small = BEFORE_ATTENTION[family] if family == "lfm3" else {}
        return save_tiny(tmp_path_factory.mktemp(family), family, dtype, **small)

    return find


@pytest.fixture(scope="module")
def exact(family_of):
    return family_of("qwen3_5")


@pytest.fixture(scope="module", params=STATES)
def state(request, family_of):
    """One for each kind of state that takes drafts."""
    return family_of(request.param)


@pytest.fixture
def tiny(request, family_of):
    """In float64, and in float32 with experts."""
    name = request.param
    return family_of(name, torch.float32 if name == "qwen3_next" else torch.float64)


def mistakes(share: float):
    """Here and there, always at the same places."""
    return lambda place: random.Random(place).random() < share


def knowing(tiny, llm: LLM, prompts, params, errs=never) -> LLM:
    """Drafts what these prompts have to be answered."""
    tiny.learn(prompts, [params] * len(prompts))
    known = [(each, tiny.expected(each, params)) for each in prompts]
    return consult(llm, Oracle(known, errs))


def stats_of(llm: LLM):
    return llm.llm_engine.scheduler.stats


# --- answers --------------------------------------------------------------------------------------

WISHES = [
    greedy(24),
    sampled(24, temperature=0.7, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1),
    sampled(24, min_p=0.01, frequency_penalty=0.3, logit_bias={5: 3.0}, logprobs=2),
]


@pytest.mark.parametrize(
    ("tiny", "num", "is_ahead"),
    [
        *((name, *case) for name in WIDELY for case in ((1, False), (3, True), (17, False))),
        *((name, 3, True) for name in [*STATES, "bailing_hybrid"] if name not in WIDELY),
    ],
    indirect=["tiny"],
)
def test_answers_are_those_without_drafts(tiny, num, is_ahead):
    """Greedy and sampled together, each with mistakes of its own."""
    prompts = [tokens(40 + 5 * i, seed=i) for i in range(num)]
    wishes = [WISHES[i % 3] for i in range(num)]
    llm = tiny.open(**drafting(4), **POOLS, async_scheduling=is_ahead)
    tiny.learn(prompts, wishes)
    known = [(p, tiny.expected(p, w)) for p, w in zip(prompts, wishes, strict=True)]
    consult(llm, Oracle(known, mistakes(0.25)))
    outputs = llm.generate([prompt(p) for p in prompts], wishes, use_tqdm=False)
    check(llm.llm_engine.scheduler.cache)
    for output, wish in zip(outputs, wishes, strict=True):
        tiny.check([output], wish)
    assert stats_of(llm).num_accepted_tokens > 8 * num
    assert stats_of(llm).num_draft_tokens > stats_of(llm).num_accepted_tokens
    assert num_held(llm) == (0, 0)


@pytest.mark.parametrize("method", ["suffix", "ngram", ["ngram", "suffix"]])
def test_drafters_of_texts_leave_answers_as_they_are(exact, method):
    """Prompts that repeat themselves, and are asked twice."""
    shared = tokens(60, seed=5)
    prompts = [[*shared, i, *shared, i] for i in range(3)]
    config = {"method": method, "num_speculative_tokens": 5, "adaptive": False}
    config |= {"prompt_lookup_min": 2} if method != "suffix" else {}
    llm = exact.open(speculative_config=config, **POOLS)
    for params in (greedy(20), sampled(20)):
        exact.check(ask(llm, *prompts, params=params), params)
        exact.check(ask(llm, *prompts, params=params), params)
    assert stats_of(llm).num_drafts > 0
    if method != "ngram":
        assert stats_of(llm).num_accepted_tokens > 20, "of those who ask again"


@pytest.mark.parametrize(
    ("state", "wrong_at"),
    [
        *(("qwen3_5", wrong_at) for wrong_at in range(5)),
        *((name, wrong_at) for name in STATES if name != "qwen3_5" for wrong_at in (2, 4)),
    ],
    indirect=["state"],
)
def test_drafts_are_accepted_up_to_the_first_mistake(state, wrong_at):
    """At every position, of one family at least: the others' states are folded after runs of every
    length above. With no mistake at all each step yields all drafts, and one more token."""
    num_drafts, length = 4, 41
    period = wrong_at + 1
    errs = never if wrong_at == num_drafts else lambda place: place % period == 0
    llm = state.open(**drafting(num_drafts), **POOLS)
    token_ids, params = tokens(90), greedy(length)
    knowing(state, llm, [token_ids], params, errs)
    state.check(ask(llm, token_ids, params=params), params)
    stats = stats_of(llm)
    assert stats.num_accepted_tokens == stats.decode_tokens - (stats.num_steps - 1 - _folds(llm))
    if wrong_at == num_drafts:
        assert stats.num_accepted_by_position == [8, 8, 8, 8]
    else:
        assert sum(stats.num_accepted_by_position[wrong_at:]) == 0
        assert stats.num_drafts >= 40 // period - 1


def _folds(llm: LLM) -> int:
    """Steps that computed nothing."""
    stats = stats_of(llm)
    return stats.num_steps - 1 - stats.num_drafts - _plain(llm)


def _plain(llm: LLM) -> int:
    """Decodes without drafts: the rest of the tokens."""
    stats = stats_of(llm)
    return stats.decode_tokens - stats.num_accepted_tokens - stats.num_drafts


def test_where_drafts_run_out_of_tokens_the_answer_is_as_long_as_it_has_to_be(exact):
    token_ids = tokens(50)
    llm = knowing(exact, exact.open(**drafting(6), **POOLS), [token_ids], greedy(12))
    for max_tokens in (1, 2, 3, 7, 8, 11):
        llm.reset_prefix_cache()
        (output,) = ask(llm, token_ids, params=greedy(max_tokens))
        assert answer(output) == exact.expected(token_ids, greedy(12))[:max_tokens]
        assert output.outputs[0].finish_reason == "length"
        assert num_held(llm) == (0, 0)


# --- what ends an answer in the middle of a run, with text and forms ------------------------------

ENDINGS = [
    {"stop": ["{}"]},
    {"stop": ["{}"], "include_stop_str_in_output": True},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [-1], "min_tokens": 14},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]{5,30}"), "max_tokens": 30},
    {"structured_outputs": StructuredOutputs(json={"type": "array", "maxItems": 4})},
    {"logprobs": 3, "presence_penalty": 0.4, "temperature": 0.8, "seed": 3},
]


@pytest.fixture(scope="module")
def embedded():
    """The embedded model with and without drafts, and what it says to a question."""
    options = {"device": "cpu", "cpu_cache_gib": 0.05, "dtype": "float64"}
    return LLM(**options), LLM(**options, **drafting(5))


@pytest.mark.parametrize("index", range(len(ENDINGS)))
def test_what_ends_an_answer_ends_it_in_the_middle_of_a_run(embedded, index):
    plain, llm = embedded
    question = "Tell me about the sea and the ships."
    (full,) = ask_text(plain, question, sampled(20, temperature=0, logprobs=None))
    options = {"max_tokens": 20, "temperature": 0, "logprobs": 0} | ENDINGS[index]
    if "stop" in options:
        text = plain.get_tokenizer().decode(answer(full)[11:13])
        options["stop"] = [text[1:] or text]
    if "stop_token_ids" in options:
        options["stop_token_ids"] = [answer(full)[11]]
    params = sampled(options.pop("max_tokens"), **({"ignore_eos": False} | options))
    (expected,) = ask_text(plain, question, params)
    known = [(expected.prompt_token_ids, [*answer(expected), *answer(full)])]
    consult(llm, Oracle(known, mistakes(0.1)))
    num_accepted = stats_of(llm).num_accepted_tokens
    (found,) = ask_text(llm, question, params)
    assert_same(found, expected)
    if len(answer(expected)) > 8:
        assert stats_of(llm).num_accepted_tokens > num_accepted
    assert num_held(llm) == (0, 0)


def ask_text(llm, text, params):
    llm.reset_prefix_cache()
    return llm.generate([text], params, use_tqdm=False)


def assert_same(found, expected):
    (a,), (b,) = found.outputs, expected.outputs
    assert (a.token_ids, a.text) == (b.token_ids, b.text)
    assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    assert logprobs(a) == pytest.approx(logprobs(b), abs=1e-9)
    tops = [[{id_: lp.rank for id_, lp in row.items()} for row in o.logprobs] for o in (a, b)]
    assert tops[0] == tops[1]


# --- states ---------------------------------------------------------------------------------------


def traffic(llm: LLM, tiny, drafts: bool):
    """Every way in which a state comes back: a junction, a mark, an answer's end inside a page."""
    params = greedy(20)

    def asked(*prompts, **options):
        if drafts:
            knowing(tiny, llm, prompts, params, mistakes(0.3))
        return ask(llm, *prompts, params=params, **options)

    siblings = [tokens(200, seed=0) + tokens(50, seed=1 + i) for i in range(3)]
    outputs = [asked(each)[0] for each in siblings]
    outputs += asked([*tokens(130, seed=20), 1, 2], cache_marks=[100])
    outputs += asked([*tokens(130, seed=20), 3, 4], cache_marks=[100])
    turn = outputs[0]
    for number in range(3):
        new = tokens(7, seed=30 + number)
        (turn,) = asked([*turn.prompt_token_ids, *answer(turn), *new])
        outputs.append(turn)
    outputs += asked(*siblings)
    return outputs


@pytest.fixture(scope="module")
def visited(state):
    """Engines that had the same traffic, with and without drafts."""
    plain, llm = state.open(**POOLS), state.open(**drafting(4), **POOLS)
    return plain, llm, traffic(plain, state, False), traffic(llm, state, True)


def test_hits_are_those_without_drafts(state, visited):
    plain, llm, expected, found = visited
    assert cached(found) == cached(expected)
    assert [o.cache_report.lost for o in found] == [o.cache_report.lost for o in expected]
    assert sum(cached(found)) > 1000
    state.check(found, greedy(20))
    assert stats_of(llm).num_accepted_tokens > 50
    assert stats_of(plain).num_drafts == 0


def test_checkpoints_are_those_without_drafts(visited):
    plain, llm, expected, _ = visited
    for output in expected:
        chain = [*output.prompt_token_ids, *answer(output), 1]
        (length, states), (own_length, own) = state_behind(plain, chain), state_behind(llm, chain)
        assert length == own_length == end_of(plain, chain)
        for a, b in zip(states, own, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def state_behind(llm: LLM, token_ids):
    """Tokens and contents of the deepest checkpoint; or what lies beside each page."""
    cache, pools = llm.llm_engine.scheduler.cache, llm.llm_engine.runner.pools
    match = cache.match(cache.chain(token_ids))
    if match.checkpoint is None:
        rows = [node.page + 1 for node in match.path.nodes]
        assert len(rows) == match.state_length // 64 > 0
        return match.state_length, [pool[rows] for pool in pools.conv_states.values()]
    slot = match.checkpoint.slot
    parts = [p[slot] for s in pools.states.values() for p in (s.conv, s.recurrent)]
    return match.state_length, parts


def end_of(llm: LLM, token_ids):
    """Where a state stands: before an answer's last token, or at the last page's end."""
    has_slots = llm.llm_engine.scheduler.cache.slots_each
    return len(token_ids) - 2 if has_slots else (len(token_ids) - 2) // 64 * 64


@pytest.mark.parametrize("family", BEFORE_ATTENTION)
def test_checkpoints_are_the_same_bits_where_products_are(family, tmp_path, monkeypatch):
    """Where a row of a product does not depend on the rows beside it: those of these models' states
    are of the layers before attention."""
    state = save_tiny(tmp_path, family, torch.float64, **BEFORE_ATTENTION[family])
    whole = torch.nn.functional.linear

    def by_rows(x, *weights):
        return torch.stack([whole(row, *weights) for row in x.flatten(0, -2)]).view(
            *x.shape[:-1], -1
        )

    token_ids = tokens(70, seed=3)
    params = greedy(16)
    state.expected(token_ids, params)
    monkeypatch.setattr(torch.nn.functional, "linear", by_rows)
    plain, llm = state.open(**POOLS), state.open(**drafting(4), **POOLS)
    knowing(state, llm, [token_ids], params, mistakes(0.3))
    expected, found = (ask(each, token_ids, params=params)[0] for each in (plain, llm))
    assert answer(found) == answer(expected)
    assert stats_of(llm).num_accepted_tokens > 5
    chain = [*token_ids, *answer(found), 1]
    (length, states), (own_length, own) = state_behind(plain, chain), state_behind(llm, chain)
    assert length == own_length == end_of(plain, chain)
    assert all(map(torch.equal, states, own))


@pytest.mark.parametrize("state", IN_SLOTS, indirect=True)
def test_a_running_request_holds_one_slot(state):
    llm = state.open(**drafting(4), **POOLS)
    knowing(state, llm, [tokens(90)], greedy(30), mistakes(0.3))
    llm.llm_engine.add(Prompt(token_ids=tokens(90)), greedy(30))
    held = {num_held(llm)[1] for running in steps_until_done(llm) if running}
    assert held == {1}


@pytest.mark.parametrize(
    ("state", "is_ahead"),
    [("qwen3_5", False), ("lfm2", False), *((name, True) for name in STATES)],
    indirect=["state"],
)
def test_who_is_preempted_or_given_up_leaves_what_is_final(state, is_ahead):
    """Little memory, so that requests make room for each other; and one that is aborted."""
    prompts = [tokens(150, seed=i) for i in range(4)]
    params = greedy(60)
    llm = state.open(**drafting(4), num_pages=10, num_slots=8, async_scheduling=is_ahead)
    knowing(state, llm, prompts, params, mistakes(0.2))
    engine = llm.llm_engine
    jobs = [engine.add(Prompt(token_ids=each), params) for each in prompts]
    for number, _ in enumerate(steps_until_done(llm)):
        check(engine.scheduler.cache)
        if number == 20:
            engine.abort(jobs[1])
    assert stats_of(llm).num_preemptions > 0
    assert stats_of(llm).num_accepted_tokens > 40
    state.check([job.output() for job in jobs if job is not jobs[1]], params)
    assert num_held(llm) == (0, 0)
    state.check(ask(llm, prompts[1], params=params), params)


def test_what_was_verified_is_handed_on_while_the_next_step_runs(exact):
    """A step with drafts is launched only once the one before is taken, but then at once."""
    llm = exact.open(**drafting(4), **POOLS, async_scheduling=True)
    knowing(exact, llm, [tokens(90)], greedy(30), mistakes(0.3))
    engine = llm.llm_engine
    job = engine.add(Prompt(token_ids=tokens(90)), greedy(30))
    num_verifying = 0
    for running in steps_until_done(llm):
        if running:
            assert engine.pipeline.in_flight is not None
            num_verifying += engine.pipeline.in_flight.plan.num_drafts > 0
    assert num_verifying > 3
    exact.check([job.output()], greedy(30))
    assert num_held(llm) == (0, 0)


def test_a_step_that_is_interrupted_is_taken_back(exact, monkeypatch):
    llm = exact.open(**drafting(4), **POOLS)
    token_ids, params = tokens(150), greedy(30)
    knowing(exact, llm, [token_ids], params, mistakes(0.2))
    engine = llm.llm_engine
    job = engine.add(Prompt(token_ids=token_ids), params)
    for _ in range(4):
        engine.step()

    def interrupt(_flight):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    for _ in steps_until_done(llm):
        check(engine.scheduler.cache)
    exact.check([job.output()], params)


def test_steps_with_drafts_can_be_run_again(exact, tmp_path):
    """From what was recorded of them: the same pools, and the same runs."""
    path, prompts, params = tmp_path / "plans", [tokens(60, seed=i) for i in range(2)], WISHES[1]
    llm = exact.open(**drafting(3), **POOLS, record_plans=str(path))
    known = [(each, exact.expected(each, params)) for each in prompts]
    consult(llm, Oracle(known, mistakes(0.3)))
    ask(llm, *prompts, params=params)
    records = read_records(path)
    heading = next(records)
    again = build(replace(heading.config, record_plans=None)).runner
    steps = list(replay(records, again))
    assert [found.tokens for _, found in steps] == [recorded.tokens for recorded, _ in steps]
    assert any(len(run) > 1 for found, _ in steps for run in found.tokens.values())
    assert digest(again.pools) == digest(llm.llm_engine.runner.pools)


# --- that the tests above would show it -----------------------------------------------------------


def _folds_one_less(monkeypatch):
    launch = PlainExecutor.launch

    def wrong(self, plan, before):
        sequences = tuple(
            structs.replace(s, fold=s.fold - 1) if s.fold else s for s in plan.sequences
        )
        flight = launch(self, structs.replace(plan, sequences=sequences), before)
        flight.plan = plan
        return flight

    monkeypatch.setattr(PlainExecutor, "launch", wrong)


def _shifts_rows(monkeypatch):
    rows, shifts = RecordRows.rows, count(1)

    def wrong(self, sequences):
        shift = next(shifts)
        return [(row + shift) % 64 if row >= 0 else row for row in rows(self, sequences)]

    monkeypatch.setattr(RecordRows, "rows", wrong)


def _accepts_one_more(monkeypatch):
    def wrong(sequence, drafts, sampled):
        num = len(accept_equal(sequence, drafts, sampled))
        return list(sampled[: num + 1])

    monkeypatch.setattr(in_flight, "accept_equal", wrong)
    monkeypatch.setattr(runner, "accept_equal", wrong)
    monkeypatch.setattr("milepost.engine.assembly.rank.accept_equal", wrong)


@pytest.mark.parametrize("break_it", [_folds_one_less, _shifts_rows, _accepts_one_more])
def test_answers_would_show_what_is_wrong(exact, monkeypatch, break_it):
    prompts, params = [tokens(60, seed=i) for i in range(2)], greedy(40)
    exact.learn(prompts, [params] * len(prompts))
    expected = [exact.expected(each, params) for each in prompts]
    break_it(monkeypatch)
    llm = exact.open(**drafting(4), **POOLS)
    knowing(exact, llm, prompts, params, mistakes(0.3))
    found = llm.generate([prompt(each) for each in prompts], params, use_tqdm=False)
    with pytest.raises(AssertionError):
        exact.check(found, params)
    assert [len(answer(each)) for each in found] == [len(each) for each in expected]


# --- acceptance -----------------------------------------------------------------------------------


def test_synthetic_acceptance_is_as_often_as_it_is_told():
    rates, num = (0.8, 0.65, 0.5), 4000
    accept = accept_at(rates)
    drafts, drawn = [1, 2, 3], [SampledToken(9)] * 4
    counts = [0, 0, 0]
    for number in range(num):
        run = accept(sequence(number, [5, 1, 2, 3], 7, num_drafts=3), drafts, drawn)
        assert [one.token_id for one in run] == [*drafts[: len(run) - 1], 9]
        for place in range(len(run) - 1):
            counts[place] += 1
    assert [count / num for count in counts] == pytest.approx(rates, abs=0.03)


def test_synthetic_acceptance_through_an_engine(exact):
    options = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 0.0)}
    llm = exact.open(**drafting(2, **options), **POOLS)
    consult(llm, Oracle([(tokens(50), [7] * 40)], never))
    (output,) = ask(llm, tokens(50), params=greedy(40))
    assert stats_of(llm).num_accepted_by_position[0] == stats_of(llm).num_drafts > 15
    assert stats_of(llm).num_accepted_by_position[1] == 0
    assert answer(output).count(7) > 15


# --- what is told of it ---------------------------------------------------------------------------


def test_metrics_have_vllms_names(exact):
    llm = exact.open(**drafting(3), **POOLS)
    knowing(exact, llm, [tokens(50)], greedy(20))
    ask(llm, tokens(50), params=greedy(20))
    stats = stats_of(llm)
    assert metric(llm, "spec_decode_num_drafts") == stats.num_drafts > 0
    assert metric(llm, "spec_decode_num_draft_tokens") == stats.num_draft_tokens
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
    assert accepted == stats.num_accepted_tokens == stats.num_draft_tokens
    by_position = [
        metric(llm, "spec_decode_num_accepted_tokens_per_pos", position=str(place))
        for place in range(3)
    ]
    assert by_position == stats.num_accepted_by_position
    assert sum(by_position) == accepted


def test_outputs_say_what_became_of_drafts(exact):
    """As a whole, and in a stream, whose parts may be joined."""
    llm = exact.open(**drafting(3), **POOLS)
    knowing(exact, llm, [tokens(50)], greedy(20), mistakes(0.3))
    engine = llm.llm_engine
    job = engine.add(Prompt(token_ids=tokens(50)), greedy(20))
    summed, growing = None, GrowingOutput("0", job.prompt, 1)
    while engine.has_work:
        for _ in engine.step():
            new = job.take_output()
            growing.take(new)
            summed = new if summed is None else joined(summed, new)
    (whole,), (delta,), stats = growing.output().outputs, summed.deltas, stats_of(llm)
    found = [(each.num_draft_tokens, each.num_accepted_tokens) for each in (whole, delta)]
    assert found == [(stats.num_draft_tokens, stats.num_accepted_tokens)] * 2
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


def test_a_model_that_cannot_take_drafts_is_refused_by_name_or_warned_of(tmp_path, caplog):
    folder = save_tiny(tmp_path, "lfm2", torch.float32).folder
    config = SpeculativeConfig(method="suffix")
    with pytest.raises(UnsupportedModelError, match="layers of Mixer cannot take drafts"):
        num_drafts_of(config, [], ["Mixer"], has_head=False, is_fused=False)
    llm = open_llm(folder, speculative_config={"method": "auto"}, **POOLS)
    assert llm.llm_engine.pipeline.speculation is None
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "head" in warning


@pytest.mark.parametrize("sizes", [(48, 64), (64, 48), (8, 8)], ids=str)
def test_heads_of_odd_sizes_take_drafts_by_the_reference_alone(sizes, caplog):
    def num_drafts(method: str, sizes: tuple[int, int], *, is_fused: bool) -> int:
        key_dim, value_dim = sizes
        shapes = GatedDeltaShapes(
            hidden_size=16,
            num_key_heads=1,
            num_value_heads=1,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=4,
            norm_eps=1e-6,
        )
        kind = ModuleScope(dtype=torch.float32, device=torch.device("meta"))
        layer = GatedDelta(shapes, kind, Arrangement(sections=lambda _: [("in", 16)]))
        config = SpeculativeConfig(method=method, num_speculative_tokens=3)
        return num_drafts_of(config, [layer.spec], [], has_head=True, is_fused=is_fused)

    assert num_drafts("suffix", sizes, is_fused=False) == 3
    assert num_drafts("suffix", (128, 64), is_fused=True) == 3
    with pytest.raises(UnsupportedModelError, match="heads of {} by {}, on a GPU,".format(*sizes)):
        num_drafts("suffix", sizes, is_fused=True)
    assert not caplog.records
    assert num_drafts("auto", sizes, is_fused=True) == 0
    assert len(caplog.records) == 1
