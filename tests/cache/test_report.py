import pytest

from milepost.cache.report import CacheReport, Lost


def report(reused, lost):
    total = reused + sum(lost.values())
    return CacheReport(
        prompt_tokens=total, kv_length=total, state_length=reused, reused=reused, lost=lost
    )


def test_summary_names_the_losses_largest_first():
    text = str(report(1472, {Lost.GRID: 28, Lost.UNSEEN: 700, Lost.KV_EVICTED: 0}))
    assert text == (
        "1472 of 2200 prompt tokens from the cache; "
        "computed 728: 700 not seen before, 28 after the last saved state"
    )


def test_summary_of_a_full_hit_has_no_reasons():
    assert str(report(64, {})) == "64 of 64 prompt tokens from the cache"


def test_every_reason_has_words():
    for reason in Lost:
        assert report(0, {reason: 3}).reasons() == [f"3 {reason.phrase}"]


@pytest.mark.parametrize(
    ("reused", "lost", "said"),
    [
        (0, {Lost.UNSEEN: 63}, "63 prompt tokens are less than one page (64): "),
        (
            0,
            {Lost.LAST_TOKEN: 1},
            "1 prompt token is less than one page (64): ",
        ),
        (0, {Lost.UNSEEN: 64}, None),
        (16, {Lost.UNSEEN: 20}, None),
        (0, {Lost.DISABLED: 20}, None),
    ],
)
def test_a_hint_says_when_a_prompt_is_under_one_page(reused, lost, said):
    hint = report(reused, lost).hint(64)
    assert hint == (said and f"{said}a prompt this short is reused late or not at all")


def test_tokens_that_nobody_accounts_for_are_a_broken_invariant():
    with pytest.raises(AssertionError, match="R1"):
        CacheReport(prompt_tokens=10, kv_length=0, state_length=0, reused=4, lost={Lost.UNSEEN: 5})
