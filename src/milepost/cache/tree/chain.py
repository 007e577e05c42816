"""The tokens of one request and the chained digests of their full pages.

Owns the token ids of a prompt and its answer. Knows nothing of pages or slots.

Digests are keys, the same in every process, of 16 bytes each:

    root        blake2b(identity of the model + salt as UTF-8, person="milepost")
    page i      blake2b(digest of page i - 1, or the root + the page's token ids)
    checkpoint  digest of its last full page, or the root; inside a page
                blake2b(that + the token ids of its tail, person="milepost state")

Token ids are packed little-endian uint32. So one digest stands for a page and everything before it,
and two models or two salts never share one. The identity is 16 bytes, or empty if keys never leave
the process.

All tokens of a picture have the same id, whatever it shows. So if a page or tail has tokens of a
picture, a record precedes the first of them: a word that is no token id, the number of the
picture's tokens before the page, and the picture's identity. Tokens with their records are the
*content* of a page or tail. Whatever is hashed, compared or stored with a key is content; without
pictures that is the tokens alone. The content of a tail is a prefix of that of every longer tail.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from sys import byteorder, maxsize

from milepost.pictures import Picture, overlapping

DIGEST_BYTES = 16
TOKEN_BYTES = 4
RECORD = 2**32 - 1
"""The word that begins a picture's record."""
RECORD_BYTES = 24
"""Bytes of a record: six words."""

assert array("I").itemsize == TOKEN_BYTES
assert byteorder == "little", "keys are made of little-endian token ids"


class Chain:
    """A copy of token ids with the digests of their full pages; both grow as tokens are appended.

    Nothing after `shared_end` is shared with other requests: no page or state there is published or
    reused. Raises OverflowError for a token id outside uint32.
    """

    __slots__ = ("_digests", "page_size", "pictures", "root", "salt", "shared_end", "tokens")

    def __init__(
        self,
        tokens: Iterable[int],
        page_size: int,
        salt: str = "",
        identity: bytes = b"",
        pictures: Sequence[Picture] = (),
    ) -> None:
        self.tokens = array("I", tokens)
        self.page_size = page_size
        self.shared_end = maxsize
        self.salt = salt
        self.pictures = pictures
        self.root = root_key(identity, salt)
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def digests(self, num_pages: int) -> list[bytes]:
        """Returns the digests of at least the first `num_pages` full pages. Hashes only pages not
        hashed before."""
        known = self._digests
        if len(known) < num_pages:
            self._extend(num_pages)
        return known

    def known_digests(self) -> Sequence[bytes]:
        """Returns the digests of the first pages that are already computed."""
        return self._digests

    def learn(self, digests: Sequence[bytes]) -> None:
        """Appends digests of the next pages, taken from equal tokens after the same prefix."""
        self._digests.extend(digests)

    @property
    def num_pages(self) -> int:
        """Number of full pages that may be shared."""
        return min(len(self.tokens), self.shared_end) // self.page_size

    @property
    def last_resume(self) -> int:
        """The deepest position to resume from. At least the last token is computed."""
        return min(len(self.tokens) - 1, self.shared_end)

    def full_digests(self) -> list[bytes]:
        """Returns the digests of all full pages that may be shared."""
        return self.digests(self.num_pages)[: self.num_pages]

    def token_bytes(self, start: int, end: int) -> bytes:
        """Returns the token ids [start, end) as packed uint32."""
        return self.tokens[start:end].tobytes()

    def content(self, start: int, end: int) -> bytes:
        """Returns the content of [start, end), which begins at the start of a page and lies in that
        page."""
        data = self.token_bytes(start, end)
        if not self.pictures:
            return data
        pieces, done = [], start
        for each in overlapping(self.pictures, start, min(end, len(self))):
            first = max(each.offset, start)
            pieces += [self.token_bytes(done, first), _record(each, start)]
            done = first
        return b"".join((*pieces, self.token_bytes(done, end)))

    def page_contents(self, first: int, end: int) -> Iterator[bytes]:
        """Yields the contents of the full pages [first, end)."""
        size = self.page_size
        if self.pictures and first * size < self.pictures[-1].end:
            return (self.content(page * size, (page + 1) * size) for page in range(first, end))
        data = self.token_bytes(first * size, end * size)
        step = size * TOKEN_BYTES
        return (data[start : start + step] for start in range(0, len(data), step))

    def _extend(self, num_pages: int) -> None:
        assert num_pages * self.page_size <= len(self.tokens), "digests exist for full pages only"
        known = self._digests
        digest = known[-1] if known else self.root
        for content in self.page_contents(len(known), num_pages):
            digest = blake2b(digest + content, digest_size=DIGEST_BYTES).digest()
            known.append(digest)


def root_key(identity: bytes, salt: str) -> bytes:
    """Returns the key from which all keys of one model under one salt are chained."""
    seed = identity + salt.encode()
    return blake2b(seed, digest_size=DIGEST_BYTES, person=b"milepost").digest()


def checkpoint_key(page: bytes, tail: bytes) -> bytes:
    """Returns the key of a state: `page` is the key of its last full page or of the root, and
    `tail` the content after it."""
    if not tail:
        return page
    return blake2b(page + tail, digest_size=DIGEST_BYTES, person=b"milepost state").digest()


def num_tokens(content: bytes) -> int:
    """Returns the number of tokens in a content, or in the beginning of one."""
    words = memoryview(content).cast("I")
    return len(words) - sum(
        min(RECORD_BYTES // TOKEN_BYTES, len(words) - place) for place in _records(words)
    )


def num_before_pictures(contents: bytes) -> int:
    """Returns the number of tokens before the first picture in a run of contents."""
    words = memoryview(contents).cast("I")
    return next(_records(words), len(words))


def common_tokens(a: bytes, b: bytes) -> int:
    """Returns the number of tokens that two contents share from the start."""
    pairs = zip(memoryview(a).cast("I"), memoryview(b).cast("I"), strict=False)
    num = next(
        (index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // TOKEN_BYTES
    )
    return num_tokens(a[: num * TOKEN_BYTES])


def _record(picture: Picture, start: int) -> bytes:
    """Returns a picture's record for content that begins at position `start`."""
    head = array("I", (RECORD, max(start - picture.offset, 0)))
    return head.tobytes() + picture.identity


def _records(words: memoryview[int]) -> Iterator[int]:
    """Yields the places of the records, in words. Most contents have none."""
    if RECORD.to_bytes(TOKEN_BYTES, "little") not in words.tobytes():
        return
    place = 0
    while place < len(words):
        if words[place] == RECORD:
            yield place
            place += RECORD_BYTES // TOKEN_BYTES
        else:
            place += 1
