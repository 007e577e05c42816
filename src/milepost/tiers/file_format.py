"""The format of one file: a name, which alone suffices to build the index; a head (kind, model,
token ids, checksum), padded to 4096 bytes; and the contents as in host memory. The head is checked
before the contents are used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from io import FileIO
from zlib import crc32

from milepost.cache.plans import What
from milepost.cache.tree import checkpoint_key
from milepost.tiers.tier import Item

MAGIC = b"milepost"
VERSION = 1
KINDS: tuple[What, ...] = ("page", "tail", "state")
ALIGNMENT = 4096
_HEAD = struct.Struct("<8sIB16s16s16sQIQII")
"""Magic, version, kind, identity, key, parent, position, bytes of token ids, bytes of contents,
checksum of the contents, checksum of the head (computed with 0 in its own place).
"""


class BadFileError(Exception):
    """A file does not match its name, or is incomplete."""


def head_of(
    identity: bytes, name: FileName, tokens: bytes, contents: Sequence[memoryview]
) -> bytes:
    """Returns the head of a file with these contents."""
    num_bytes, checksum = 0, 0
    for piece in contents:
        num_bytes, checksum = num_bytes + piece.nbytes, crc32(piece, checksum)
    return _packed(identity, name, tokens, num_bytes, checksum)


def read_head(file: FileIO, identity: bytes, name: FileName) -> tuple[bytes, int, int, int]:
    """Returns the token ids, the sizes of head and contents in bytes, and the contents' checksum.
    Raises BadFileError."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise BadFileError("cut short")
    num_tokens_bytes, num_bytes, checksum = _HEAD.unpack(head)[7:10]
    if num_tokens_bytes > 2**20:
        raise BadFileError("not what it should be")
    tokens = file.read(num_tokens_bytes)
    expected = _packed(identity, name, tokens, num_bytes, checksum)
    if head + tokens != expected[: len(head) + len(tokens)]:
        raise BadFileError("not what it should be")
    if not _is_key(name, tokens):
        raise BadFileError("of other tokens")
    return tokens, len(expected), num_bytes, checksum


def read_file(
    file: FileIO, identity: bytes, name: FileName, contents: Sequence[memoryview]
) -> bytes:
    """Fills `contents`, and returns the token ids. Raises BadFileError."""
    tokens, start, num_bytes, checksum = read_head(file, identity, name)
    if num_bytes != sum(piece.nbytes for piece in contents):
        raise BadFileError("not what it should be")
    if os.fstat(file.fileno()).st_size != start + num_bytes:
        raise BadFileError("cut short")
    file.seek(start)
    checksum_read = 0
    for piece in contents:
        _read_into(file, piece)
        checksum_read = crc32(piece, checksum_read)
    if checksum_read != checksum:
        raise BadFileError("damaged")
    return tokens


def _packed(identity: bytes, name: FileName, tokens: bytes, num_bytes: int, checksum: int) -> bytes:
    """Returns the head of a file, padded."""
    fields = (
        MAGIC, VERSION, KINDS.index(name.what), identity, name.key, name.parent, name.position,
        len(tokens), num_bytes, checksum,
    )  # fmt: skip
    checksum_of_head = crc32(tokens, crc32(_HEAD.pack(*fields, 0)))
    head = _HEAD.pack(*fields, checksum_of_head) + tokens
    return head + bytes(-len(head) % ALIGNMENT)


def _is_key(name: FileName, tokens: bytes) -> bool:
    """Whether the name's key is the key of these tokens after its parent."""
    if name.what == "page":
        return blake2b(name.parent + tokens, digest_size=16).digest() == name.key
    return checkpoint_key(name.parent, tokens) == name.key


def _read_into(file: FileIO, piece: memoryview) -> None:
    rest = piece
    while rest:
        num = file.readinto(rest)
        if not num:
            raise BadFileError("cut short")
        rest = rest[num:]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """The name of a file: kind, key, parent and position of the item it holds."""

    what: What
    key: bytes
    parent: bytes
    position: int


def name_of(item: Item) -> FileName:
    return FileName(what=item.what, key=item.key, parent=item.parent, position=item.position)


@dataclass(slots=True, kw_only=True)
class News:
    """Results of a look at a directory."""

    found: list[FileName] = field(default_factory=list)
    """New files, in the order in which to register them: if room runs out, items without dependents
    are evicted first, then those registered longest ago.
    """
    loose: list[FileName] = field(default_factory=list)
    """Parts that nothing needs, although there was time for their heads to appear."""
    lost: list[FileName] = field(default_factory=list)
    """Files that were there at the last look and have gone."""


class Finds:
    """Collects new files, part by part, until all folders have been scanned: a state is rarely in
    the same folder as its pages. `is_needed` tells whether a part is needed
    that no collected item needs.
    """

    def __init__(self, head: What, is_needed: Callable[[FileName], bool]) -> None:
        self._head = head
        self._is_needed = is_needed
        self._new: list[FileName] = []
        self._waiting: list[FileName] = []
        """Parts of items that may have been half written when they were found."""

    def add(self, names: Iterable[FileName]) -> None:
        self._new += names

    def end_round(self) -> News:
        """Returns the news of a complete round through the folders."""
        new, waiting = set(self._new), self._waiting
        whole, rest = _with_their_pages([*waiting, *self._new], self._head)
        needed, rest = self._parted(rest)
        self._new, self._waiting = [], [name for name in rest if name in new]
        return News(found=whole + needed, loose=[name for name in rest if name not in new])

    def _parted(self, rest: list[FileName]) -> tuple[list[FileName], list[FileName]]:
        """Splits parts into those that a registered item needs and the others."""
        needed: list[FileName] = []
        others: list[FileName] = []
        parents: set[bytes] = set()
        for name in sorted(rest, key=_order, reverse=True):
            if name.key in parents or self._is_needed(name):
                needed.append(name)
                parents.add(name.parent)
            else:
                others.append(name)
        return needed, others


def _with_their_pages(
    names: Iterable[FileName], head: What
) -> tuple[list[FileName], list[FileName]]:
    """Returns heads, the shallowest first, each after those of its parts not returned yet, and the
    parts that no head needs. Heads are states or, without states, the last pages of paths.
    """
    parts = {(name.what, name.key): name for name in names}
    inner = {name.parent for name in parts.values() if name.what == "page"}
    heads = [name for name in parts.values() if name.what == head]
    if head == "page":
        heads = [name for name in heads if name.key not in inner]
    found: list[FileName] = []
    for one in sorted(heads, key=_order):
        path = [parts.pop((one.what, one.key))]
        tail = parts.pop(("tail", one.key), None)
        if tail is not None:
            path.append(tail)
        above = one.parent
        while (page := parts.pop(("page", above), None)) is not None:
            path.append(page)
            above = page.parent
        found += reversed(path)
    return found, list(parts.values())


def _order(name: FileName) -> tuple[int, bytes, str]:
    return name.position, name.key, name.what
