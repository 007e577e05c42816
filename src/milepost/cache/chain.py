"""The tokens of one request and the chained digests of their full pages.

Owns the token ids of a prompt and its answer. Knows nothing of pages or slots.

The digest of page i is blake2b(digest of page i - 1, the page's token ids as uint32), 16 bytes, and
the root's is that of the salt. So one digest stands for a page and everything
before it, and two salts never meet. It is a key in one cache only: what the KV of these tokens is
depends on the model, which it says nothing of.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1

assert array("I").itemsize == TOKEN_BYTES


class Chain:
    """A copy of token ids with the digests of their full pages, extended as tokens are appended.

    Raises OverflowError for a token id outside uint32.
    """

    __slots__ = ("_digests", "_unsalted", "page_size", "root", "salt", "tokens")

    def __init__(self, tokens: Iterable[int], page_size: int, salt: str = "") -> None:
        if isinstance(tokens, array) and tokens.typecode == "I":
            self.tokens: array[int] = tokens[:]
        else:
            self.tokens = array("I", tokens)
        self.page_size = page_size
        self.salt = salt
        self.root = blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"milepost").digest()
        self._digests: list[bytes] = []
        self._unsalted: Chain | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)

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

    def learn(self, first: int, digests: Sequence[bytes]) -> None:
        """Note the digests of the pages from `first` on, where what is known ends; whoever tells
        them holds the same tokens.
        """
        assert first == len(self._digests), "digests are known one after the other"
        self._digests.extend(digests)

    def full_digests(self) -> list[bytes]:
        """Digests of all full pages."""
        return self.digests(len(self.tokens) // self.page_size)

    def unsalted(self) -> Chain:
        """The same tokens under no salt; shares the token array and is made once."""
        if not self.salt:
            return self
        if self._unsalted is None:
            self._unsalted = Chain((), self.page_size)
            self._unsalted.tokens = self.tokens
        return self._unsalted

    def token_bytes(self, start: int, end: int) -> bytes:
        """Token ids of [start, end) as packed uint32."""
        return self.tokens[start:end].tobytes()

    def page_bytes(self, first: int, end: int) -> list[bytes]:
        """Token ids of the full pages [first, end), each as packed uint32."""
        data = self.token_bytes(first * self.page_size, end * self.page_size)
        step = self.page_size * TOKEN_BYTES
        return [data[start : start + step] for start in range(0, len(data), step)]

    def _extend(self, num_pages: int) -> None:
        assert num_pages * self.page_size <= len(self.tokens), "digests exist for full pages only"
        known = self._digests
        digest = known[-1] if known else self.root
        for held in self.page_bytes(len(known), num_pages):
            digest = blake2b(digest + held, digest_size=DIGEST_BYTES).digest()
            known.append(digest)


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two runs of packed token ids, in tokens."""
    num = min(len(a), len(b)) // TOKEN_BYTES
    if a[: num * TOKEN_BYTES] == b[: num * TOKEN_BYTES]:
        return num
    low = 0
    while num - low > 1:
        middle = (low + num) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            num = middle
    return low
