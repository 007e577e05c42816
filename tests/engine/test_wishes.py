"""Wishes that contradict each other, drawn together: what comes is what the rule of docs/server.md
has, stated here without masks, tables or steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from milepost import LLM, SamplingParams
from milepost.engine.constraints.guidance import FormGuide, form_masks
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import StructuredOutputs
from tests import chatmodel

NUM_TOKENS = 7
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
WAYS = {
    "plain": {},
    "drafts ahead": {
        "async_scheduling": True,
        "speculative_config": {**DRAFTS, "prompt_lookup_min": 1},
    },
}
TEXTS = ("a", "b", "c", "y", "e", "s", "n", "o", " a", " b")
TAGS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>")
WORDS = ("a", "b", "ab", "aa", "ba", "ye", "no", "<|im_end|>", "</think>", "a</think>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chatmodel.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=WAYS)
def llm(request, folder):
    return LLM(str(folder), cpu_cache_gib=0.02, max_num_seqs=8, **WAYS[request.param])


TOKENIZER = chatmodel.make_tokenizer()
OPENS, CLOSES = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
FEW = [*(TOKENIZER.encode(text, add_special_tokens=False)[0] for text in TEXTS)]
FEW += TOKENIZER.convert_tokens_to_ids(list(TAGS))

A, B, C = FEW[:3]
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
FORMS = [{"choice": ["yes", "no", "a"]}, {"regex": "[abc ]{1,4}"}, {"regex": "(ab)*"}]
PROMPTS = {"closed": [A, B, B, C, A, B, B], "open": [A, B, OPENS], "thought": [A, OPENS, B, CLOSES]}

some = st.sets(st.sampled_from(FEW), min_size=1, max_size=6).map(sorted)
alone = st.fixed_dictionaries(
    {}, optional={"min_tokens": st.integers(1, 4), "ignore_eos": st.just(True)}
)
formed = st.tuples(st.sampled_from(FORMS), st.sampled_from([None, CLOSES])).map(
    lambda form: {"structured_outputs": form}
)
limited = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.5]), "seed": st.integers(0, 99)},
    optional={
        "allowed_token_ids": some.map(lambda ids: sorted({*ids, CLOSES})) | some,
        "bad_words": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        "logit_bias": st.dictionaries(
            st.sampled_from(FEW), st.sampled_from([-100, 100, 40]), min_size=1, max_size=4
        ),
        "stop_token_ids": some,
        "thinking_token_budget": st.sampled_from([0, 1, 3]),
        "repetition_penalty": st.just(1.5),
        "top_k": st.just(2),
    },
)
wishes = st.builds(lambda *parts: {**parts[0], **parts[1]}, limited, alone | formed)
drawn = st.lists(st.tuples(wishes, st.sampled_from(sorted(PROMPTS))), min_size=8, max_size=8)

PLAIN = {"temperature": 0.0, "seed": 0}
AT_ODDS = [
    # What is left at the first choice, or later.
    {"allowed_token_ids": [A], "bad_words": ["a"]},
    {"allowed_token_ids": [A], "bad_words": ["aaa"]},
    {"allowed_token_ids": [A, END], "bad_words": ["aa"], "min_tokens": 3},
    {"allowed_token_ids": [A, END], "logit_bias": {A: -100}, "min_tokens": 1},
    {"allowed_token_ids": [A, B], "stop_token_ids": [A, B], "min_tokens": 2},
    # The budget, and what its token may not do.
    {"thinking_token_budget": 0, "bad_words": ["</think>"]},
    {"thinking_token_budget": 1, "bad_words": ["a</think>"], "allowed_token_ids": [A, CLOSES]},
    {"thinking_token_budget": 1, "stop_token_ids": [CLOSES], "min_tokens": 4},
    {"thinking_token_budget": 0, "structured_outputs": (FORMS[0], None)},
    {"thinking_token_budget": 2, "structured_outputs": (FORMS[0], CLOSES)},
    # Forms that come to what is excluded, in their middle and at their end.
    {"structured_outputs": (FORMS[0], None), "logit_bias": dict.fromkeys((A, FEW[6]), -100)},
    {"structured_outputs": ({"regex": "(ab){3}"}, None), "bad_words": ["aba"]},
    {"structured_outputs": (FORMS[2], None), "logit_bias": {END: -100, A: 100}},
    {"structured_outputs": (FORMS[1], None), "allowed_token_ids": [A, B]},
]


@dataclass
class Rule:
    """What one answer may have."""

    wish: dict[str, Any]
    prompt: list[int]
    ends: frozenset[int]
    """That the model itself has."""
    form: Any = None
    """A compiled form."""
    num_tokens: int = chatmodel.VOCAB_SIZE
    runs: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for word in self.wish.get("bad_words", ()):
            for text in (word, " " + word):
                self.runs.append(TOKENIZER.encode(text, add_special_tokens=False))
        own = () if self.wish.get("ignore_eos") else self.ends
        self.ends = frozenset((*own, *self.wish.get("stop_token_ids", ())))

    def is_excluded(self, token: int, before: list[int]) -> bool:
        allowed = self.wish.get("allowed_token_ids")
        return (
            (allowed is not None and token not in allowed)
            or self.wish.get("logit_bias", {}).get(token, 0) <= -100
            or any([*before, token][-len(run) :] == run for run in self.runs)
        )

    def guide(self, before: list[int]) -> FormGuide | None:
        if self.form is None:
            return None
        after = self.wish["structured_outputs"][1]
        guide = FormGuide(self.form, self.num_tokens, tuple(self.ends), after)
        for token in before:
            guide.accept(token)
        return guide

    def left(self, before: list[int]) -> set[int]:
        """The tokens that may come behind these."""
        left = {t for t in range(self.num_tokens) if not self.is_excluded(t, before)}
        guide = self.guide(before)
        if guide is not None and guide.is_bound:
            (mask,) = form_masks([guide])
            left &= {t for t in left if mask[t // 32] >> (t % 32) & 1}
        elif self.must_close(before) and CLOSES in left:
            left = {CLOSES}
        return left - self.ends if len(before) < self.wish.get("min_tokens", 0) else left

    def must_close(self, before: list[int]) -> bool:
        budget = self.wish.get("thinking_token_budget")
        tags = [t for t in self.prompt if t in (OPENS, CLOSES)]
        is_open, num = tags[-1:] == [OPENS], 0
        for token in before:
            num += is_open and token != CLOSES
            is_open = token == OPENS or (is_open and token != CLOSES)
        return budget is not None and is_open and num >= budget

    def is_refused(self) -> bool:
        """Whether the wishes leave nothing, whatever comes."""
        static = {t for t in range(self.num_tokens) if not self.is_excluded(t, [])}
        least, budget = self.wish.get("min_tokens", 0), self.wish.get("thinking_token_budget")
        refused = not static or (least and static <= self.ends)
        if budget is not None:
            refused = refused or CLOSES not in static or (least and CLOSES in self.ends)
        if self.form is not None:
            after = self.wish["structured_outputs"][1]
            refused = refused or least or self.wish.get("ignore_eos")
            if after is not None:
                refused = refused or after not in static
            else:
                (mask,) = form_masks([self.guide([])])
                refused = refused or not any(mask[t // 32] >> (t % 32) & 1 for t in static)
        return bool(refused)

    def check(self, tokens: list[int], reason: str) -> None:
        for num, token in enumerate(tokens):
            assert token in self.left(tokens[:num]), f"{token} behind {tokens[:num]}"
            is_end = token in self.ends and num + 1 >= self.wish.get("min_tokens", 0)
            assert not is_end or num + 1 == len(tokens), "it went on behind its end"
        guide = self.guide(tokens)
        is_whole = guide is None or guide.may_end
        if tokens and tokens[-1] in self.ends:
            assert reason == "stop"
        elif reason == "length":
            assert len(tokens) == NUM_TOKENS
        else:
            assert reason == ("stop" if is_whole else "error")
            assert not self.left(tokens), "something was left"


def params_of(wish: dict[str, Any]) -> SamplingParams:
    options = dict(wish, max_tokens=NUM_TOKENS)
    if "structured_outputs" in options:
        form, after = options["structured_outputs"]
        options["structured_outputs"] = StructuredOutputs(**form, starts_after=after)
    return SamplingParams(**options)


@settings(max_examples=25)
@given(drawn=drawn)
@example(drawn=[({**PLAIN, **wish}, name) for wish in AT_ODDS for name in PROMPTS])
def test_nothing_that_is_excluded_comes(llm, drawn):
    engine = llm.llm_engine
    served = []
    for wish, name in drawn:
        params, form = params_of(wish), None
        if params.structured_outputs is not None:
            plain = SamplingParams(structured_outputs=params.structured_outputs)
            form = engine._intake.form_of(plain)
        rule = Rule(wish, PROMPTS[name], frozenset(engine._intake._end_token_ids), form)
        if rule.is_refused():
            with pytest.raises(InvalidRequestError):
                engine.check(Prompt(token_ids=rule.prompt), params)
        else:
            served.append((rule, params))
    given = [{"prompt_token_ids": rule.prompt} for rule, _ in served]
    outputs = llm.generate(given, [params for _, params in served], use_tqdm=False)
    for (rule, _), output in zip(served, outputs, strict=True):
        answer = output.outputs[0]
        rule.check(answer.token_ids, answer.finish_reason)
