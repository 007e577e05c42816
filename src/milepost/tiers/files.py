"""Pages and states as files, which outlive the engine and may be shared by several.

    <directory>/<space>/<first two digits of the key>/<key>-<parent>-<position>.<page|tail|state>

The space is the model's identity, so files of other models are never looked at. The name holds
everything an index needs. A file (`file_format`) is written under another name and renamed, so it
is whole or absent.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from itertools import cycle, islice
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from milepost.cache.plans import What
from milepost.tiers.file_format import KINDS, BadFileError, FileName, head_of, read_file, read_head

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([1-9][0-9]{0,15})\.(page|tail|state)")
_KIND_OF: dict[str, What] = {kind: kind for kind in KINDS}
NUM_FOLDERS = 256
TICK_NS = 2 * 10**9
"""A folder changed this recently may change again without a new time stamp."""
STALE_S = 3600.0
"""Temporary files older than this were left by an engine that has died."""


_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of this process or machine: the file may be sound, so it is kept and found again."""


class Files:
    """The files of one model in a directory, which `make` must have created."""

    def __init__(self, directory: Path, identity: bytes) -> None:
        assert len(identity) == 16, "files outlive the process, and so does the identity"
        self._identity = identity
        self._space = directory / identity.hex()
        self.num_looked = 0
        """Number of folders scanned so far."""
        self._seen: dict[str, int] = {}
        """Maps a folder to its modification time when it was last scanned."""
        self._held: dict[str, set[str]] = {}
        """Maps a folder to the files that were there at the last scan."""
        self._undeleted: deque[FileName] = deque()
        """Files that could not be deleted, or not be opened for a moment; they are not counted."""
        self._folders = cycle([f"{number:02x}" for number in range(NUM_FOLDERS)])
        self._complained: set[str] = set()

    @property
    def directory(self) -> Path:
        """This model's directory."""
        return self._space

    def make(self) -> None:
        """Creates the directory. Raises OSError if it cannot."""
        self._space.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: FileName) -> Path:
        key = name.key.hex()
        file = f"{key}-{name.parent.hex()}-{name.position}.{name.what}"
        return self._space / key[:2] / file

    def look(self, num_folders: int = NUM_FOLDERS) -> tuple[list[FileName], list[FileName]]:
        """Returns the files that have come and gone since the last look, in the next `num_folders`
        folders. Reads only names. One thread may call it at a time.
        """
        come: list[FileName] = []
        gone: list[FileName] = []
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
        """Returns the names in a folder, or None if it has not changed."""
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

    def write(self, name: FileName, tokens: bytes, contents: Sequence[memoryview]) -> bool:
        """Writes a file. Returns whether it is there; logs each cause of failure once. A directory
        that somebody has removed is created again.
        """
        path = self.path(name)
        aside = path.with_name(f".{token_hex(8)}")  # process ids are equal in different containers
        try:
            if path.exists():
                return True
            self._make_folder(path.parent)
            head = head_of(self._identity, name, tokens, contents)
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

    def read(self, name: FileName, contents: Sequence[memoryview]) -> bool:
        """Fills `contents`. Returns False, with `contents` undefined, if the file is missing or
        unusable. A file that is unusable or unreadable is deleted.
        """
        tokens = self._opened(name, lambda file: read_file(file, self._identity, name, contents))
        return tokens is not None

    def tokens(self, name: FileName) -> bytes | None:
        """Returns the packed token ids in a file's head, or None where `read` would return
        False.
        """
        return self._opened(name, lambda file: read_head(file, self._identity, name)[0])

    def _opened(self, name: FileName, use: Callable[[FileIO], T]) -> T | None:
        path = self.path(name)
        try:
            with path.open("rb", buffering=0) as file:
                return use(file)
        except FileNotFoundError:
            return None  # another engine has made room
        except OSError as error:
            self._complain("read from", error)
            if error.errno in _SHORT:
                self._undeleted.append(name)
                return None
        except BadFileError as error:
            if str(error) not in self._complained:
                self._complained.add(str(error))
                logger.warning(
                    "tiers: %s is %s, and is deleted, as are others like it", path, error
                )
        self._unlink(path)
        return None

    def remove(self, name: FileName) -> None:
        """Deletes a file, if it still exists. One that cannot be deleted is reported again by
        `look`.
        """
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


def _parse(file: str) -> FileName | None:
    match = _NAME.fullmatch(file)
    if match is None:
        return None
    key, parent, position, what = match.groups()
    return FileName(
        what=_KIND_OF[what],
        key=bytes.fromhex(key),
        parent=bytes.fromhex(parent),
        position=int(position),
    )


def _remove_stale(entry: os.DirEntry[str]) -> bool:
    """Deletes a temporary file if it is stale. Returns whether it is gone; otherwise the folder has
    to be scanned again.
    """
    try:
        if time.time() - entry.stat().st_mtime <= STALE_S:
            return False
        os.unlink(entry.path)
    except FileNotFoundError:
        pass  # its writer has renamed it
    except OSError:
        return False
    return True
