"""Answers that keep to allowed_token_ids, bad_words and thinking_token_budget."""

import random
from itertools import pairwise

import numpy as np
import pytest

from milepost import LLM, SamplingParams
from milepost.engine.constraints.guide import Guide, masks, masks_along
from milepost.engine.constraints.restrictions import Restriction, RuleBook
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import StructuredOutputs
from tests import chatmodel

PROMPT = "what is the weather"
LENGTH = 24
CHAT = [{"role": "user", "content": PROMPT}]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
WAYS = {
    "plain": {},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {**DRAFTS, "prompt_lookup_min": 1}},
    "drafts ahead": {
        "async_scheduling": True,
        "speculative_config": {**DRAFTS, "prompt_lookup_min": 1},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chatmodel.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=WAYS)
def llm(request, folder):
    return LLM(str(folder), cpu_cache_gib=0.02, max_num_seqs=4, **WAYS[request.param])


TOKENIZER = chatmodel.make_tokenizer()


@pytest.fixture(scope="module")
def book():
    return RuleBook(TOKENIZER, chatmodel.VOCAB_SIZE)


def answers(llm, *, num=6, **options):
    """Greedy and sampled, side by side."""
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=0.0 if i == 0 else 1.0, seed=i, **options)
        for i in range(num)
    ]
    outputs = llm.generate([PROMPT] * num, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def restriction(book, prompt=(), **options):
    rules = book.rules_of(SamplingParams(**options))
    return Restriction(rules, np.array(prompt, np.uint32))


def id_of(token):
    return TOKENIZER.convert_tokens_to_ids(token)


def may_come(own):
    return [i for i in range(chatmodel.VOCAB_SIZE) if own.allows(i)]


# --- in answers, each of which is the same however it is computed ---------------------------------


def test_only_allowed_tokens_come(llm):
    allowed = list(range(100, 140))
    for answer in answers(llm, allowed_token_ids=allowed, logprobs=0):
        assert len(answer.token_ids) == LENGTH
        assert set(answer.token_ids) <= set(allowed)


def test_bad_words_do_not_come(llm):
    """Words that answers have: of single tokens, and runs of them."""
    tokenizer = llm.get_tokenizer()
    free = answers(llm, ignore_eos=True)
    single = [tokenizer.decode([answer.token_ids[3]]) for answer in free[:3]]
    runs = [tokenizer.decode(answer.token_ids[8:10]) for answer in free]
    words = [word for word in single + runs if word.strip() and "\ufffd" not in word]
    banned = [tokenizer.encode(word.lstrip(), add_special_tokens=False) for word in words]
    assert any(len(ids) == 1 for ids in banned)
    assert any(len(ids) > 1 for ids in banned)
    assert any(_has(answer.token_ids, ids) for answer in free for ids in banned)
    for answer in answers(llm, ignore_eos=True, bad_words=words):
        assert not any(_has(answer.token_ids, ids) for ids in banned)
        assert len(answer.token_ids) == LENGTH


SEVERAL = {"bad_words": ["the", "ing a", "jump"], "allowed_token_ids": list(range(60, 420))}


@pytest.fixture(scope="module")
def plain_answers(folder):
    """Answers that keep to `SEVERAL`, of an engine without anything else."""
    plain = LLM(str(folder), cpu_cache_gib=0.02, max_num_seqs=4)
    return answers(plain, num=8, ignore_eos=True, **SEVERAL)


def test_answers_are_those_of_a_plain_engine(llm, plain_answers):
    found = answers(llm, num=8, ignore_eos=True, **SEVERAL)
    assert [a.token_ids for a in found] == [a.token_ids for a in plain_answers]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_is_closed_behind_its_budget(llm, budget):
    closes = llm.get_tokenizer().convert_tokens_to_ids("</think>")
    never = {closes: -99.0}
    params = [
        SamplingParams(
            max_tokens=20,
            temperature=temperature,
            seed=3,
            thinking_token_budget=budget,
            logit_bias=never,
            ignore_eos=True,
        )
        for temperature in (0.0, 1.0)
    ]
    thinking = {"enable_thinking": True}
    for each in params:
        (output,) = llm.chat(CHAT, each, use_tqdm=False, chat_template_kwargs=thinking)
        assert output.outputs[0].token_ids.index(closes) == budget
        (output,) = llm.chat(CHAT, each, use_tqdm=False)
        assert closes not in output.outputs[0].token_ids, "it had not begun to reason"


def test_a_form_begins_where_the_budget_ends(llm):
    tokenizer = llm.get_tokenizer()
    closes = tokenizer.convert_tokens_to_ids("</think>")
    wanted = StructuredOutputs(choice=["yes", "no"], starts_after=closes)
    params = SamplingParams(
        max_tokens=60,
        seed=2,
        structured_outputs=wanted,
        thinking_token_budget=5,
        logit_bias={closes: -99.0},
    )
    thinking = {"enable_thinking": True}
    (output,) = llm.chat(CHAT, params, use_tqdm=False, chat_template_kwargs=thinking)
    assert output.outputs[0].token_ids.index(closes) == 5
    assert output.outputs[0].text.partition("</think>")[2] in ("yes", "no")


def _has(token_ids, run):
    return any(token_ids[i : i + len(run)] == run for i in range(len(token_ids)))


# --- one answer -----------------------------------------------------------------------------------


def test_runs_are_banned_behind_their_beginning_alone(book):
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("fox j", " fox j")]
    own = restriction(book, bad_words=["fox j"])
    for run in ids:
        assert len(run) > 1
        for token_id in run[:-1]:
            assert own.allows(token_id)
            own.accept(token_id)
        assert not own.allows(run[-1])
        own.accept(run[0])
        assert own.allows(run[-1]) or len(run) == 2


def test_a_random_walk_keeps_to_its_rules(book):
    """Beside a plain reading of what was asked for."""
    rng = random.Random(0)
    own = restriction(book, bad_words=["fox", "the q", "a"], allowed_token_ids=list(range(300)))
    words = [
        TOKENIZER.encode(prefix + word, add_special_tokens=False)
        for word in ("fox", "the q", "a")
        for prefix in ("", " ")
    ]
    walk: list[int] = []
    for _ in range(400):
        free = [
            i
            for i in range(300)
            if not any((walk + [i])[-len(run) :] == run for run in words)  # noqa: RUF005
        ]
        assert may_come(own) == free
        # Often the beginning of a word, so that its end is asked for.
        begun = [i for i in free if any(i in run for run in words)]
        walk.append(rng.choice(begun or free))
        own.accept(walk[-1])


def test_reasoning_that_the_answer_opens_is_counted(book):
    opens, closes = id_of("<think>"), id_of("</think>")
    own = restriction(book, thinking_token_budget=2)
    for token_id in (9, 9, 9, opens, 9):
        assert own.mask() is None
        own.accept(token_id)
    assert own.mask() is None
    own.accept(9)
    assert may_come(own) == [closes]
    own.accept(closes)
    assert own.mask() is None
    own.accept(opens)
    assert may_come(own) == [closes], "the budget is the answer's, not the block's"


@pytest.mark.parametrize(("tags", "is_open"), [("oc", False), ("o", True), ("oco", True)])
def test_the_prompt_says_whether_reasoning_is_open(book, tags, is_open):
    ids = {"o": id_of("<think>"), "c": id_of("</think>")}
    own = restriction(book, [5, *(ids[tag] for tag in tags), 6], thinking_token_budget=0)
    assert (own.mask() is not None) is is_open


def test_what_waits_for_tokens(book):
    """Only where they decide what may come next."""
    own = restriction(book, [id_of("<think>")], thinking_token_budget=3)
    assert [own.waits_for(num) for num in (1, 2, 3)] == [False, False, True]
    own.accept(9)
    assert [own.waits_for(num) for num in (1, 2)] == [False, True]
    assert not restriction(book, allowed_token_ids=[1, 2]).waits_for(9)
    assert restriction(book, bad_words=["fox j"]).waits_for(1)


def test_drafts_are_verified_along_the_rules(book):
    run = TOKENIZER.encode("fox j", add_special_tokens=False)
    guide = Guide(None, restriction(book, bad_words=["fox j"]))
    along = masks_along(guide, [*run, 7], *masks([guide]))
    assert len(along) == len(run), "behind a draft that may not come nothing is known"
    assert guide.num_allowed([*run, 7]) == len(run) - 1
    assert guide.allows(run[0]), "the answer itself has gone nowhere"
    ahead = guide.copy()
    assert all(ahead.follows(token_id) for token_id in run[:-1])
    assert not ahead.allows(run[-1])
    assert not ahead.follows(run[-1])
    for before, after in pairwise(along[:-1]):
        assert before is None
        assert after is None
    assert along[-1] is not None


def test_a_form_that_comes_to_what_is_excluded_ends_the_answer(llm):
    """Its text is none of the form's, so it says so; nothing of what is excluded comes."""
    tokenizer = llm.get_tokenizer()
    sevens = {i: -100 for i in range(chatmodel.VOCAB_SIZE) if "7" in tokenizer.decode([i])}
    wanted = StructuredOutputs(regex="ye7", field="response_format")
    params = SamplingParams(structured_outputs=wanted, logit_bias=sevens, seed=1, max_tokens=9)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("ye", "error")
    assert output.stop_reason == "response_format: nothing is left of it beside logit_bias"


def test_an_answer_whose_end_is_excluded_ends_without_it(llm):
    ends = dict.fromkeys(llm.llm_engine._intake._end_token_ids, -100)
    wanted = StructuredOutputs(choice=["yes"])
    params = SamplingParams(structured_outputs=wanted, logit_bias=ends, seed=1, max_tokens=9)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("yes", "stop")
    assert not ends.keys() & set(output.token_ids)


def test_an_answer_that_may_have_nothing_more_is_over(llm):
    """Here a run of the one token that is allowed is a bad word."""
    tokenizer = llm.get_tokenizer()
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    params = SamplingParams(allowed_token_ids=[a], bad_words=["aaa"], max_tokens=9)
    assert len(tokenizer.encode("aaa", add_special_tokens=False)) == 3
    output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([a, a], "stop")


def test_words_are_spelled_before_a_request_is_added(folder, monkeypatch):
    """By who has the time: steps wait for `add`."""
    engine = LLM(str(folder), cpu_cache_gib=0.02, max_num_seqs=4).llm_engine
    params = SamplingParams(bad_words=["fox j"], max_tokens=2)
    assert params.takes_preparing
    assert not SamplingParams(allowed_token_ids=[1]).takes_preparing
    engine.prepare(params)
    monkeypatch.setattr(RuleBook, "_spellings", lambda *_: pytest.fail("spelled again"))
    engine.add(Prompt(token_ids=[5, 6]), params)


def test_nothing_is_known_behind_a_draft_that_leads_to_a_dead_end(llm):
    (a,) = llm.get_tokenizer().encode("a", add_special_tokens=False)
    (end, *_) = llm.llm_engine._intake._end_token_ids
    for wish in ({"allowed_token_ids": [a]}, {"allowed_token_ids": [a, end], "min_tokens": 9}):
        params = SamplingParams(bad_words=["aaa"], max_tokens=9, **wish)
        job = llm.llm_engine._intake.group(
            Prompt(token_ids=[a]), params, number=None, priority=0, form=None
        )
        (answer,) = job.completions
        drafts, (mask,) = [a, a, a], masks([answer.guide])
        rows = list(answer.samplings(params, drafts=drafts, mask=mask))
        assert len(rows) == 4, "each draft is verified"
        assert answer._num_known == 2, "a and a, and then nothing"


# --- what cannot be kept --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids=\\[\\]: use at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1"),
        ({"bad_words": [""]}, "bad_words='': use strings"),
        ({"bad_words": [3]}, "bad_words=3"),
        ({"thinking_token_budget": -1}, "thinking_token_budget=-1: use 0 or more"),
    ],
)
def test_values_that_cannot_be_meant(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


def test_what_depends_on_the_model_is_checked(book):
    with pytest.raises(InvalidRequestError, match="allowed_token_ids=448: use token ids below"):
        SamplingParams(allowed_token_ids=[448]).check_vocab(448)
    fox = TOKENIZER.encode("a", add_special_tokens=False)
    for wishes, message in (
        ({"bad_words": ["a"], "allowed_token_ids": fox}, "allowed_token_ids and bad_words: they"),
        ({"logit_bias": dict.fromkeys(range(448), -100)}, "logit_bias: they leave no token"),
        (
            {"allowed_token_ids": fox, "stop_token_ids": fox, "min_tokens": 1},
            "min_tokens: allowed_token_ids leave only tokens that end the answer",
        ),
        (
            {"allowed_token_ids": fox, "thinking_token_budget": 4},
            "thinking_token_budget=4: allowed_token_ids exclude </think>",
        ),
        (
            {
                "thinking_token_budget": 4,
                "stop_token_ids": [id_of("</think>")],
                "min_tokens": 1,
            },
            "thinking_token_budget=4: </think>, which closes the reasoning, ends the answer here",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            book.rules_of(SamplingParams(**wishes))
    bare = RuleBook(None, 448)
    with pytest.raises(InvalidRequestError, match="bad_words: no tokenizer is loaded"):
        bare.rules_of(SamplingParams(bad_words=["a"]))
    assert bare.rules_of(SamplingParams(allowed_token_ids=[1])) is not None
