"""Texts of tokens and pictures, for tests that know each token for what it is.

All tokens of pictures have the id PAD, which text may have too. Here a token of a picture is a pair
of the picture's identity and its index in it, so texts are equal exactly if a model reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from milepost.cache.tree import Chain
from milepost.pictures import Picture

PAD = 0
LENGTHS = {bytes(15) + b"a": 11, bytes(15) + b"b": 11, b"c" * 16: 3}
"""Tokens of each picture, by identity. Two are of one size."""

Word = int | tuple[bytes, int]


def words_of(identity: bytes) -> tuple[Word, ...]:
    """The tokens of a picture."""
    return tuple((identity, index) for index in range(LENGTHS[identity]))


def picture(identity: bytes, offset: int) -> Picture:
    length = LENGTHS[identity]
    return Picture(
        identity=identity, offset=offset, num_tokens=length, grid=(1, 2, 2), num_positions=1
    )


def whole(text: Sequence[Word]) -> Sequence[Word]:
    """A text without the picture that it ends in the middle of."""
    end = len(text)
    while end and not isinstance(text[end - 1], int):
        identity, index = text[end - 1]
        if index == LENGTHS[identity] - 1:
            break
        end -= 1
    return text[:end]


def split(text: Sequence[Word]) -> tuple[list[int], tuple[Picture, ...]]:
    """Token ids and pictures of a text."""
    begins = [
        (offset, word[0])
        for offset, word in enumerate(text)
        if not isinstance(word, int) and word[1] == 0
    ]
    tokens = [word if isinstance(word, int) else PAD for word in text]
    return tokens, tuple(picture(identity, offset) for offset, identity in begins)


def text_of(chain: Chain) -> tuple[Word, ...]:
    """The text that a chain stands for."""
    text: list[Word] = list(chain.tokens)
    for each in chain.pictures:
        text[each.offset : each.end] = words_of(each.identity)
    return tuple(text)


def read(content: bytes) -> Iterator[Word]:
    """The text that a page's or tail's content stands for."""
    words = list(memoryview(content).cast("I"))
    identity, index, place = b"", 0, 0
    while place < len(words):
        if words[place] == 2**32 - 1:
            index, identity = words[place + 1], content[4 * place + 8 : 4 * place + 24]
            place += 6
        is_picture = identity in LENGTHS and index < LENGTHS[identity]
        yield (identity, index) if is_picture else words[place]
        index, place = index + 1, place + 1
