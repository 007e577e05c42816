"""What is drafted from the texts that there are, and that it costs no more than it should."""

from __future__ import annotations

import random

import pytest

from milepost.speculative import DraftWish, FirstOf, NgramDrafter, SuffixDrafter
from milepost.speculative.occurrences import MOST_PLACES, Occurrences
from tests.pictured_texts import LENGTHS, PAD, picture
from tests.speculative.requests import request

WORDS = list(range(100, 140))


def drafts(drafter, made, most=8):
    (tokens,) = drafter.propose([DraftWish(made, most)])
    return list(tokens)


# --- occurrences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_end_is_found_wherever_it_stands(seed):
    """Against all places of all lengths, tried one by one."""
    rng = random.Random(seed)
    width, depth = rng.choice([1, 2, 3]), 6
    text, held = [], Occurrences(width)
    for _ in range(60):
        new = rng.choices(range(3), k=rng.choice([1, 1, 4]))
        text += new
        held.extend(new)
        places = held.find(held.text[-depth:], depth=depth, before=len(text))
        by_length = {
            length: [e for e in range(length, len(text)) if text[e - length : e] == text[-length:]]
            for length in range(width, min(depth, len(text)) + 1)
        }
        longest = max((length for length, ends in by_length.items() if ends), default=None)
        seen = [e for e in by_length.get(width, []) if e < len(text)][-MOST_PLACES:]
        if places is None:
            assert longest is None
        elif len(by_length[width]) <= MOST_PLACES:
            assert places.length == longest
            assert sorted(places.ends) == by_length[longest]
        else:
            assert set(places.ends) <= set(seen), "the latest places"


def test_a_search_looks_at_few_places_however_long_the_text():
    looked = []
    for num in (1000, 30000):
        held = Occurrences(3)
        held.extend([7] * num)
        before = held.num_looked_at
        held.find(held.text[-24:], depth=24, before=len(held))
        looked.append(held.num_looked_at - before)
    assert looked == [MOST_PLACES, MOST_PLACES]


# --- ngram ----------------------------------------------------------------------------------------


def test_ngram_drafts_what_followed():
    made = request([1, 2, 3, 4, 5, 6], [9, 2, 3])
    assert drafts(NgramDrafter(2, 4), made) == [4, 5, 6, 9, 2, 3]
    assert drafts(NgramDrafter(2, 4), made, most=2) == [4, 5]
    assert drafts(NgramDrafter(3, 4), made) == []


def test_ngram_prefers_the_longer_and_then_the_later():
    made = request([5, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3, 6], [5, 2, 3])
    assert drafts(NgramDrafter(2, 5), made, most=1) == [7]
    assert drafts(NgramDrafter(2, 2), made, most=1) == [6], "each as likely: the latest"


def test_ngram_follows_a_request_as_it_grows():
    drafter, made = NgramDrafter(2, 4), request([1, 2, 3])
    assert drafts(drafter, made) == []
    for token in (9, 1, 2):
        made.extend([token])
    assert drafts(drafter, made) == [3, 9, 1, 2]
    drafter.forget(made)
    assert drafts(drafter, made) == [3, 9, 1, 2], "it may be asked for again"


# --- suffix ---------------------------------------------------------------------------------------


def test_suffix_drafts_as_much_as_it_has_found():
    made = request([*WORDS, 0, 1], WORDS[5:8])
    assert drafts(SuffixDrafter(), made) == WORDS[8:11]
    assert drafts(SuffixDrafter(factor=2.0), made) == WORDS[8:14]
    made = request([*WORDS, 0, 1], WORDS[5:12])
    assert drafts(SuffixDrafter(), made) == WORDS[12:19]
    assert drafts(SuffixDrafter(), request([*WORDS, 0], WORDS[5:7])) == [], "two tokens are few"


@pytest.mark.parametrize("drafter", [NgramDrafter(3, 6), SuffixDrafter(depth=6)])
def test_drafts_compare_pictures_and_do_not_run_into_one(drafter):
    one, other, _ = sorted(LENGTHS, key=lambda identity: (-LENGTHS[identity], identity))
    shown = [*[PAD] * LENGTHS[one], 50, 51, 52]
    prompt = [*shown, *WORDS[:4], *shown, *WORDS[4:8], *shown]
    for last, following in ((one, WORDS[:4]), (other, WORDS[4:8])):
        pictures = [picture(one, 0), picture(other, 18), picture(last, 36)]
        made = request(prompt, pictures=pictures)
        assert drafts(drafter, made, 6) == following, "after the same picture, up to the next"
        drafter.forget(made)


def test_suffix_goes_by_the_majority_and_stops_where_none_is_likely():
    head, texts = [1, 2, 3], [[4, 5, 6], [4, 5, 7], [4, 8, 9]]
    prompt = [token for n, tail in enumerate(texts) for token in (*head, *tail, 50 + n)]
    made = request(prompt, head)
    assert drafts(SuffixDrafter(factor=9.0, min_prob=0.5), made) == [4, 5]
    assert drafts(SuffixDrafter(factor=9.0, min_prob=0.9), made) == [4]


def test_suffix_drafts_from_an_earlier_answer_under_the_same_prefix():
    system = list(range(500, 500 + 20))
    drafter = SuffixDrafter()
    earlier = request([*system, 1, 2, 3], WORDS)
    drafter.forget(earlier)
    assert drafts(drafter, request([*system, 7, 8], WORDS[:6])) == WORDS[6:12]
    other = [*range(600, 620)]
    assert drafts(drafter, request([*other, 7, 8], WORDS[:6])) == []


def test_suffix_tells_no_tenant_what_another_was_answered():
    prompt, drafter = list(range(500, 520)), SuffixDrafter()
    drafter.forget(request(prompt, WORDS, salt="a"))
    assert drafts(drafter, request(prompt, WORDS[:6], salt="a"))
    assert drafts(drafter, request(prompt, WORDS[:6], salt="b")) == []
    drafter.forget(request([1, 2], WORDS, salt="a"))
    assert drafts(drafter, request([1, 2], WORDS[:6], salt="a"))
    assert drafts(drafter, request([1, 2], WORDS[:6], salt="b")) == [], "nor without a full page"


def test_suffix_drafts_nothing_past_the_end_of_an_answer():
    prompt, drafter = list(range(500, 520)), SuffixDrafter()
    drafter.forget(request(prompt, WORDS))
    drafter.forget(request(prompt, [7] * 10))
    assert drafts(drafter, request([*prompt, 9], WORDS[-6:])) == []
    assert drafts(drafter, request([*prompt, 9], WORDS[-8:-2])) == WORDS[-2:]


def test_suffix_keeps_so_many_answers_and_so_many_tokens(monkeypatch):
    drafter = SuffixDrafter(max_answers=2)
    prompts = [[n] * 20 for n in range(3)]
    for prompt in prompts:
        drafter.forget(request(prompt, WORDS))
    has = [bool(drafts(drafter, request(prompt, WORDS[:6]))) for prompt in prompts]
    assert has == [False, True, True]
    monkeypatch.setattr("milepost.speculative.lookup.MAX_EARLIER", 200)
    drafter = SuffixDrafter()
    answers = [[1000 * n + i for i in range(40)] for n in range(30)]
    for answer in answers:
        drafter.forget(request(prompts[0], answer))
        (text,) = drafter._earlier.values()
        assert len(text) <= 201
    has = [bool(drafts(drafter, request([*prompts[0], 5], each[:6]))) for each in answers]
    assert has[-1]
    assert not any(has[:-5])
    drafter = SuffixDrafter(max_answers=0)
    drafter.forget(request(prompts[0], WORDS))
    assert drafts(drafter, request([*prompts[0], 5], WORDS[:6])) == []


# --- several methods ------------------------------------------------------------------------------


class Fixed:
    method = "fixed"

    def __init__(self, *drafts):
        self.drafts, self.asked, self.forgotten = drafts, [], []

    def propose(self, wishes):
        self.asked.append([wish.request for wish in wishes])
        return [self.drafts[: wish.most] for wish in wishes]

    def is_ready(self, _made):
        return bool(self.drafts)

    def forget(self, made):
        self.forgotten.append(made)


def test_the_first_that_has_drafts_is_taken():
    quoting, other = request(WORDS, WORDS[3:7]), request(WORDS, [1, 2, 3])
    last = Fixed(11, 12)
    drafter = FirstOf([SuffixDrafter(), last])
    found = drafter.propose([DraftWish(other, 3), DraftWish(quoting, 2)])
    assert [list(each) for each in found] == [[11, 12], WORDS[7:9]]
    assert last.asked == [[other]]
    drafter.propose([DraftWish(quoting, 2)])
    assert len(last.asked) == 1, "nobody is asked for nothing"
    drafter.forget(quoting)
    assert last.forgotten == [quoting]
