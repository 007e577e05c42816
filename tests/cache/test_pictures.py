"""Keys and comparisons of pages and tails that hold pictures."""

import itertools
from hashlib import blake2b

import hypothesis.strategies as st
import pytest
from hypothesis import given

from milepost.cache import Cache
from milepost.cache.tree import Chain, num_before_pictures, num_tokens
from milepost.cache.tree.chain import common_tokens
from tests.pictured_texts import LENGTHS, PAD, picture, read, split, text_of, whole, words_of

PAGE = 16
A, B, SMALL = sorted(LENGTHS, key=lambda identity: (-LENGTHS[identity], identity))
WORD = st.sampled_from([PAD, 1, 2**24])
PIECE = st.one_of(WORD.map(lambda token: (token,)), st.sampled_from([A, B, SMALL]).map(words_of))
TEXT = st.lists(PIECE, max_size=12).map(lambda pieces: tuple(itertools.chain(*pieces)))


def chain_of(text, page_size=PAGE):
    tokens, pictures = split(text)
    return Chain(tokens, page_size, pictures=pictures)


def test_a_page_without_pictures_keeps_its_key_and_another_has_records_before_their_tokens():
    tokens = [7] * PAGE * 4
    chain = Chain(tokens, PAGE, pictures=(picture(A, 2 * PAGE - 4),))
    plain = Chain(tokens, PAGE)
    assert chain.digests(4)[:1] == plain.digests(4)[:1]
    assert not set(chain.digests(4)[1:]) & set(plain.digests(4))
    page = plain.token_bytes(0, PAGE)

    def record(index):
        return b"\xff" * 4 + index.to_bytes(4, "little") + A

    second = chain.digests(1)[0] + page[:48] + record(0) + page[48:]
    third = blake2b(second, digest_size=16).digest() + record(4) + page
    fourth = blake2b(third, digest_size=16).digest() + page
    assert chain.digests(4)[3] == blake2b(fourth, digest_size=16).digest()


@given(TEXT, TEXT, TEXT)
def test_contents_compare_like_what_they_stand_for(shared, one, other):
    texts = [(*shared, *one)[:PAGE], (*shared, *other)[:PAGE]]
    chains = [chain_of(whole((*shared, *own, *words_of(A)))) for own in (one, other)]
    for text, chain in zip(texts, chains, strict=True):
        longest = chain.content(0, len(text))
        for length in range(len(text) + 1):
            content = chain.content(0, length)
            assert num_tokens(content) == length
            assert longest.startswith(content)
            assert tuple(read(content)) == text[:length]
    pairs = zip(*texts, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    a, b = (chain.content(0, len(text)) for chain, text in zip(chains, texts, strict=True))
    assert common_tokens(a, b) == same
    assert (a == b) == (texts[0] == texts[1])
    plain = [isinstance(word, int) for word in texts[0]]
    assert num_before_pictures(a) == (plain.index(False) if False in plain else len(plain))


@given(TEXT, st.integers(0, 5))
def test_pages_hold_the_parts_of_the_text(text, first):
    chain = chain_of(text, 8)
    num_pages = len(text) // 8
    contents = list(chain.page_contents(first, num_pages))
    held = [word for content in contents for word in read(content)]
    assert held == list(text[8 * first : 8 * num_pages])
    assert text_of(chain) == text


@pytest.fixture
def bench():
    cache = Cache(num_pages=64, num_slots=32, page_size=PAGE, grid=1)

    def compute(text, marks=()):
        tokens, pictures = split(text)
        chain = cache.chain(tokens, pictures=pictures)
        allocation = cache.admit(chain, match := cache.match(chain), marks=marks)
        for end in [*(m for m in marks if m > match.state_length), len(chain)]:
            exports = {e.slot: e.position for e in cache.take_exports(allocation, end)}
            cache.commit(allocation, end, {**exports, allocation.slot_out: end})
        cache.release(allocation)
        return match.state_length

    compute.cache = cache
    return compute


@pytest.mark.parametrize("before", range(2 * PAGE))
def test_the_same_picture_hits_and_another_of_the_same_size_never_does(bench, before):
    """At every offset in a page, with states inside the picture, at its ends and after it."""
    head, tail = [1] * before, [2] * PAGE
    marks = tuple(range(before + 1, before + LENGTHS[A] + 3))
    bench((*head, *words_of(A), *tail), marks)
    asked = (*head, *words_of(B), *tail)
    assert bench((*head, *words_of(A), *tail, 5)) > before
    match = bench.cache.match(bench.cache.chain(*[split(asked)[0]], pictures=split(asked)[1]))
    assert match.state_length <= before
    assert match.kv_length <= before
    assert all(position <= before for position in match.branch_points)
    assert match.report.lost["unseen"] >= LENGTHS[A] + len(tail)
    plain = bench.cache.match(bench.cache.chain([*head, *[PAD] * LENGTHS[A], *tail]))
    assert max(plain.state_length, plain.kv_length) <= before
    moved = (*head, PAD, *words_of(A), *tail)
    chain = bench.cache.chain(split(moved)[0], pictures=split(moved)[1])
    assert bench.cache.match(chain).state_length <= before


def test_swapped_pictures_part_where_they_begin(bench):
    bench((*[1] * 8, *words_of(A), *words_of(B), *[2] * 40))
    tokens, pictures = split((*[1] * 8, *words_of(B), *words_of(A), *[2] * 40))
    report = bench.cache.match(bench.cache.chain(tokens, pictures=pictures)).report
    assert (report.reused, report.lost["unseen"]) == (0, len(tokens) - 8)


def test_prompts_part_inside_a_page_behind_their_picture(bench):
    bench((*[1] * 8, *words_of(A), 2, 2, *[3] * 40))
    tokens, pictures = split((*[1] * 8, *words_of(A), 2, 2, *[4] * 40))
    match = bench.cache.match(bench.cache.chain(tokens, pictures=pictures))
    assert match.branch_points == (8 + LENGTHS[A] + 2,)
