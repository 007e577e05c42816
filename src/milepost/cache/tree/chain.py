"""The tokens of one request and the chained digests of their full pages.

Owns the token ids of a prompt and its answer. Knows nothing of pages or slots.

Digests are keys, the same in every process, of 16 bytes each:

    root        blake2b(identity of the model + salt as UTF-8, person="milepost")
    page i      blake2b(digest of page i - 1, or the root + the page's token ids)
    checkpoint  digest of its last full page, or the root; inside a page
                blake2b(that + the token ids of its tail, person="milepost state")

Token ids are packed little-endian uint32. So one digest stands for a page and everything before it,
and two models or two salts never meet. The identity is 16 bytes, or none where keys leave no
process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from sys import byteorder, maxsize

DIGEST_BYTES = 16
TOKEN_BYTES = 4

assert array("I").itemsize == TOKEN_BYTES
assert byteorder == "little", "keys are made of little-endian token ids"


class Chain:
    """A copy of token ids with the digests of their full pages, extended as tokens are appended.

    Nothing past `shared_end` is shared with others: no page and no state after it is published or
    reused. Raises OverflowError for a token id outside uint32.
    """

    __slots__ = ("_digests", "page_size", "root", "salt", "shared_end", "tokens")

    def __init__(
        self, tokens: Iterable[int], page_size: int, salt: str = "", identity: bytes = b""
    ) -> None:
        if isinstance(tokens, array) and tokens.typecode == "I":
            self.tokens: array[int] = tokens[:]
        else:
            self.tokens = array("I", tokens)
        self.page_size = page_size
        self.shared_end = maxsize
        self.salt = salt
        self.root = root_key(identity, salt)
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def digests(self, num_pages: int) -> list[bytes]:
        """Digests of at least the first `num_pages` full pages; hashes only pages not hashed
        before.
        """
        known = self._digests
        if len(known) < num_pages:
            self._extend(num_pages)
        return known

    def known_digests(self) -> Sequence[bytes]:
        """Digests of the first pages, as many as need not be computed any more."""
        return self._digests

    def learn(self, digests: Sequence[bytes]) -> None:
        """Note digests of the first pages whose own aren't known; they belong to equal tokens,
        after the same prefix.
        """
        self._digests.extend(digests)

    @property
    def num_pages(self) -> int:
        """Number of full pages that may be shared."""
        return min(len(self.tokens), self.shared_end) // self.page_size

    @property
    def last_resume(self) -> int:
        """The deepest position to resume from: at least the last token is computed."""
        return min(len(self.tokens) - 1, self.shared_end)

    def full_digests(self) -> list[bytes]:
        """Digests of all full pages that may be shared."""
        num = self.num_pages
        known = self.digests(num)
        return known if len(known) == num else known[:num]

    def token_bytes(self, start: int, end: int) -> bytes:
        """Token ids of [start, end) as packed uint32."""
        return self.tokens[start:end].tobytes()

    def page_bytes(self, first: int, end: int) -> Iterator[bytes]:
        """Token ids of the full pages [first, end), each as packed uint32."""
        data = self.token_bytes(first * self.page_size, end * self.page_size)
        step = self.page_size * TOKEN_BYTES
        return (data[start : start + step] for start in range(0, len(data), step))

    def _extend(self, num_pages: int) -> None:
        assert num_pages * self.page_size <= len(self.tokens), "digests exist for full pages only"
        known = self._digests
        digest = known[-1] if known else self.root
        for held in self.page_bytes(len(known), num_pages):
            digest = blake2b(digest + held, digest_size=DIGEST_BYTES).digest()
            known.append(digest)


def root_key(identity: bytes, salt: str) -> bytes:
    """Key that all keys of one model under one salt are chained from."""
    seed = identity + salt.encode()
    return blake2b(seed, digest_size=DIGEST_BYTES, person=b"milepost").digest()


def checkpoint_key(page: bytes, tail: bytes) -> bytes:
    """Key of a state after a page, or a root, and the packed `tail` past it."""
    if not tail:
        return page
    return blake2b(page + tail, digest_size=DIGEST_BYTES, person=b"milepost state").digest()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two runs of packed token ids, in tokens."""
    num = min(len(a), len(b)) // TOKEN_BYTES
    pairs = zip(memoryview(a).cast("I"), memoryview(b).cast("I"), strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), num)
