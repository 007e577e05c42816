import pytest

from milepost.engine.outputs import (
    PHRASES,
    CacheReport,
    CompletionOutput,
    Logprob,
    token_logprobs,
)


def report(reused, lost):
    total = reused + sum(lost.values())
    return CacheReport(
        prompt_tokens=total, kv_length=total, state_length=reused, reused=reused, lost=lost
    )


def test_summary_names_the_losses_largest_first():
    text = str(report(1472, {"grid": 28, "unseen": 700, "kv_evicted": 0}))
    assert text == (
        "1472 of 2200 prompt tokens from the cache; "
        "computed 728: 700 not seen before, 28 beyond the 64-token grid"
    )


def test_summary_of_a_full_hit_has_no_reasons():
    assert report(64, {}).summary() == "64 of 64 prompt tokens from the cache"


def test_every_reason_has_words_and_an_unknown_one_is_shown():
    for reason, phrase in PHRASES.items():
        assert report(0, {reason: 3}).reasons() == [f"3 {phrase}"]
    assert report(0, {"moonphase": 3}).reasons() == ["3 moonphase"]


def test_tokens_that_nobody_accounts_for_are_a_broken_invariant():
    with pytest.raises(AssertionError, match="reused or lost"):
        CacheReport(prompt_tokens=10, kv_length=0, state_length=0, reused=4, lost={"unseen": 5})


def test_an_answer_is_finished_when_it_has_a_reason():
    assert not CompletionOutput(index=0, text="a", token_ids=[1]).finished
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length").finished


def test_token_logprobs_have_the_chosen_token_first_and_once():
    entry = token_logprobs(7, -2.0, 3, {1: -0.5, 7: -2.0}, {7: "x", 1: "y"})
    assert entry == {
        7: Logprob(logprob=-2.0, rank=3, decoded_token="x"),
        1: Logprob(logprob=-0.5, rank=1, decoded_token="y"),
    }
    assert list(entry) == [7, 1]
    assert token_logprobs(7, -2.0, 3, {})[7].decoded_token is None
