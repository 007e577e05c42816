"""The format of one file: a head (kind, model, token ids, checksum), padded to 4096 bytes, and the
contents as in host memory. The head is checked before the contents are used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from io import FileIO
from zlib import crc32

from milepost.cache.plans import What
from milepost.cache.tree import checkpoint_key
from milepost.tiers.names import FileName

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
