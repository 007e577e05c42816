"""Pages and states as files, which outlive the engine and may be shared by several.

    <directory>/<space>/<first two digits of the key>/<key>-<parent>-<position>.<page|tail|state>

The space is the model's identity, so another model's files are never looked at. The name holds all
that an index needs. A file is a head (what it is, for whom, its token ids, a checksum), padded to
4096 bytes, and the contents as in host memory. It is written under another name and renamed, so
that it is whole or absent; its head is checked before its contents are used.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from io import FileIO
from itertools import cycle, islice
from pathlib import Path
from secrets import token_hex
from typing import TypeVar
from zlib import crc32

from milepost.cache.plans import What
from milepost.cache.tree import checkpoint_key
from milepost.tiers.names import Name

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAGIC = b"milepost"
VERSION = 1
KINDS: tuple[What, ...] = ("page", "tail", "state")
ALIGNMENT = 4096
_HEAD = struct.Struct("<8sIB16s16s16sQIQII")
"""Magic, version, kind, identity, key, parent, position, bytes of token ids, bytes of contents,
their checksum, the head's own with this as 0."""
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([1-9][0-9]{0,15})\.(page|tail|state)")
_KIND_OF: dict[str, What] = {kind: kind for kind in KINDS}
NUM_FOLDERS = 256
TICK_NS = 2 * 10**9
"""A folder that has changed so lately may change again at what its clock has for the same time."""
STALE_S = 3600.0
"""Files that were being written longer ago than this were left by an engine that has died."""


class BadFileError(Exception):
    """A file is not what its name says, or not whole."""


class Files:
    """The files of one model in a directory, once `make` has been called by somebody."""

    def __init__(self, directory: Path, identity: bytes) -> None:
        assert len(identity) == 16, "files outlive the process, and so does the identity"
        self._identity = identity
        self._space = directory / identity.hex()
        self.num_looked = 0
        """Folders that were looked through."""
        self._seen: dict[str, int] = {}
        """By folder, when it had last changed before it was looked through."""
        self._held: dict[str, set[str]] = {}
        """By folder, what was there."""
        self._undeleted: deque[Name] = deque()
        """They are there, though nobody counts them."""
        self._folders = cycle([f"{number:02x}" for number in range(NUM_FOLDERS)])
        self._complained: set[str] = set()

    @property
    def directory(self) -> Path:
        """Of this model."""
        return self._space

    def make(self) -> None:
        """Make the directory. Raises OSError if that cannot be."""
        self._space.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: Name) -> Path:
        key = name.key.hex()
        file = f"{key}-{name.parent.hex()}-{name.position}.{name.what}"
        return self._space / key[:2] / file

    def look(self, num_folders: int = NUM_FOLDERS) -> tuple[list[Name], list[Name]]:
        """What has come and what has gone since the last look, in so many folders, the next ones
        with each call. Only names are read. One thread at a time.
        """
        come: list[Name] = []
        gone: list[Name] = []
        while self._undeleted:
            path = self.path(self._undeleted.popleft())
            self._held.get(path.parent.name, set()).discard(path.name)
            self._seen.pop(path.parent.name, None)
        for folder in islice(self._folders, num_folders):
            self.num_looked += 1
            try:
                files = self._files_in(folder)
            except OSError as error:
                self._complain("looked through", error)
                continue
            if files is not None:
                known = self._held.pop(folder, set())
                come += filter(None, map(_parse, sorted(files - known)))
                gone += filter(None, map(_parse, sorted(known - files)))
                if files:
                    self._held[folder] = files
        return come, gone

    def _files_in(self, folder: str) -> set[str] | None:
        """None if nothing has changed there."""
        try:
            changed_ns = (self._space / folder).stat().st_mtime_ns
        except FileNotFoundError:
            return set()
        if self._seen.get(folder) == changed_ns:
            return None
        is_still = time.time_ns() - changed_ns > TICK_NS
        files: set[str] = set()
        with os.scandir(self._space / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    is_still = _remove_stale(entry) and is_still
                elif entry.is_file(follow_symlinks=False):
                    files.add(entry.name)
        if is_still:
            self._seen[folder] = changed_ns
        return files

    def write(self, name: Name, tokens: bytes, contents: Sequence[memoryview]) -> bool:
        """Whether the file is there; what stands in the way is said once. A directory that somebody
        has removed is made again."""
        path = self.path(name)
        aside = path.with_name(f".{token_hex(8)}")  # in containers process ids are the same
        try:
            if path.exists():
                return True
            self._make_folder(path.parent)
            head = self._head(name, tokens, contents)
            try:
                self._write_aside(aside, [memoryview(head), *contents])
                os.replace(aside, path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._complain("written to", error)
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            self.make()
            folder.mkdir(mode=0o700, exist_ok=True)

    def _write_aside(self, path: Path, pieces: Sequence[memoryview]) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for piece in pieces:
                rest = piece
                while rest:
                    rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)

    def _head(self, name: Name, tokens: bytes, contents: Sequence[memoryview]) -> bytes:
        num_bytes, checksum = 0, 0
        for piece in contents:
            num_bytes, checksum = num_bytes + piece.nbytes, crc32(piece, checksum)
        return _packed(self._identity, name, tokens, num_bytes, checksum)

    def read(self, name: Name, contents: Sequence[memoryview]) -> bool:
        """Fill `contents`; False, and what they hold is nothing, if the file is not there or no
        good. One that is no good, or cannot be read, is deleted.
        """
        return self._opened(name, lambda file: self._read(file, name, contents)) is not None

    def tokens(self, name: Name) -> bytes | None:
        """The token ids that a file says it is of, packed; None as `read` returns False."""
        return self._opened(name, lambda file: self._read_head(file, name)[0])

    def _opened(self, name: Name, use: Callable[[FileIO], T]) -> T | None:
        path = self.path(name)
        try:
            with path.open("rb", buffering=0) as file:
                return use(file)
        except FileNotFoundError:
            return None  # another engine has made room
        except OSError as error:
            self._complain("read from", error)
        except BadFileError as error:
            if str(error) not in self._complained:
                self._complained.add(str(error))
                logger.warning(
                    "tiers: %s is %s, and is deleted, as are others like it", path, error
                )
        self._unlink(path)
        return None

    def _read_head(self, file: FileIO, name: Name) -> tuple[bytes, int, int, int]:
        """Token ids, bytes of the head and of the contents, and the contents' checksum."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise BadFileError("cut short")
        num_tokens_bytes, num_bytes, checksum = _HEAD.unpack(head)[7:10]
        if num_tokens_bytes > 2**20:
            raise BadFileError("not what it should be")
        tokens = file.read(num_tokens_bytes)
        expected = _packed(self._identity, name, tokens, num_bytes, checksum)
        if head + tokens != expected[: len(head) + len(tokens)]:
            raise BadFileError("not what it should be")
        if not _is_key(name, tokens):
            raise BadFileError("of other tokens")
        return tokens, len(expected), num_bytes, checksum

    def _read(self, file: FileIO, name: Name, contents: Sequence[memoryview]) -> bytes:
        tokens, start, num_bytes, checksum = self._read_head(file, name)
        if num_bytes != sum(piece.nbytes for piece in contents):
            raise BadFileError("not what it should be")
        if os.fstat(file.fileno()).st_size != start + num_bytes:
            raise BadFileError("cut short")
        file.seek(start)
        found = 0
        for piece in contents:
            _read_into(file, piece)
            found = crc32(piece, found)
        if found != checksum:
            raise BadFileError("damaged")
        return tokens

    def remove(self, name: Name) -> None:
        """Delete a file, which somebody else may have done; one that stays is found again."""
        if not self._unlink(self.path(name)):
            self._undeleted.append(name)

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._complain("deleted from", error)
            return False
        return True

    def _complain(self, what: str, error: OSError) -> None:
        if error.strerror not in self._complained:
            self._complained.add(str(error.strerror))
            logger.error(
                "tiers: %s cannot be %s (%s): what it lacks is computed", self._space, what,
                error.strerror,
            )  # fmt: skip


def _packed(identity: bytes, name: Name, tokens: bytes, num_bytes: int, checksum: int) -> bytes:
    """The head of a file, padded."""
    fields = (
        MAGIC, VERSION, KINDS.index(name.what), identity, name.key, name.parent, name.position,
        len(tokens), num_bytes, checksum,
    )  # fmt: skip
    own = crc32(tokens, crc32(_HEAD.pack(*fields, 0)))
    head = _HEAD.pack(*fields, own) + tokens
    return head + bytes(-len(head) % ALIGNMENT)


def _is_key(name: Name, tokens: bytes) -> bool:
    """Whether a key is that of these tokens behind the parent."""
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


def _parse(file: str) -> Name | None:
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    key, parent, position, what = found.groups()
    return Name(
        what=_KIND_OF[what],
        key=bytes.fromhex(key),
        parent=bytes.fromhex(parent),
        position=int(position),
    )


def _remove_stale(entry: os.DirEntry[str]) -> bool:
    """Whether what is being written is gone by now; else it has to be looked at again."""
    try:
        if time.time() - entry.stat().st_mtime <= STALE_S:
            return False
        os.unlink(entry.path)
    except FileNotFoundError:
        pass  # whoever wrote it has renamed it
    except OSError:
        return False
    return True
