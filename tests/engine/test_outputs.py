from milepost.engine.outputs import (
    CompletionOutput,
    Logprob,
    token_logprobs,
)


def test_an_answer_is_finished_when_it_has_a_reason():
    assert not CompletionOutput(index=0, text="a", token_ids=[1]).finished
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length").finished


def test_token_logprobs_have_the_chosen_token_first_and_once():
    entry = token_logprobs(7, -2.0, 3, {1: -0.5, 7: -2.0}, {7: "x", 1: "y"}.get)
    assert entry == {
        7: Logprob(logprob=-2.0, rank=3, decoded_token="x"),
        1: Logprob(logprob=-0.5, rank=1, decoded_token="y"),
    }
    assert list(entry) == [7, 1]
    assert token_logprobs(7, -2.0, 3, {})[7].decoded_token is None
