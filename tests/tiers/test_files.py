"""Files hold what they are named for, or are no good: whatever was done to them, and whatever the
system refuses."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from array import array
from dataclasses import replace
from hashlib import blake2b

import pytest

from milepost.cache.tree import checkpoint_key
from milepost.tiers.file_format import ALIGNMENT, FileName
from milepost.tiers.files import NUM_FOLDERS, Files

IDENTITY, PARENT = b"i" * 16, b"p" * 16
TOKENS = array("I", range(16)).tobytes()
PAGE = FileName(
    what="page",
    key=blake2b(PARENT + TOKENS, digest_size=16).digest(),
    parent=PARENT,
    position=32,
)
STATE = FileName(what="state", key=PARENT, parent=PARENT, position=16)
TAIL = FileName(what="tail", key=checkpoint_key(PARENT, TOKENS[:12]), parent=PARENT, position=19)


def in_the_folder_of(name):
    """Another page that hangs on the same."""
    for token in range(10_000):
        tokens = array("I", [token] * 16).tobytes()
        key = blake2b(PARENT + tokens, digest_size=16).digest()
        if key[0] == name.key[0]:
            return replace(name, key=key), tokens
    raise AssertionError("one in 256 is")


SIBLING, SIBLING_TOKENS = in_the_folder_of(PAGE)


def contents():
    return [memoryview(bytearray(os.urandom(1000))), memoryview(bytearray(os.urandom(24)))]


def empty():
    return [memoryview(bytearray(1000)), memoryview(bytearray(24))]


def refuse_all(*_, **__):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path / "kept", IDENTITY)
    files.make()
    return files


def written(files, name=PAGE, tokens=TOKENS):
    held = contents()
    assert files.write(name, tokens, held)
    return held


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_directory_that_was_removed_is_made_again(files, depth, caplog):
    """The folder of some files, the model's, and the one that the operator named."""
    written(files)
    files.look()
    shutil.rmtree(files.path(PAGE).parents[depth])
    assert files.look() == ([], [PAGE])
    assert not files.read(PAGE, empty())
    held, found = written(files), empty()
    assert files.read(PAGE, found)
    assert found == held
    assert files.look() == ([PAGE], [])
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
    assert not caplog.records


@pytest.mark.parametrize(("name", "tokens"), [(PAGE, TOKENS), (STATE, b""), (TAIL, TOKENS[:12])])
def test_what_was_written_is_read(files, name, tokens):
    held, found = written(files, name, tokens), empty()
    assert files.read(name, found)
    assert found == held
    assert Files(files.path(name).parents[2], IDENTITY).look() == ([name], [])
    path = files.path(name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stat().st_size == ALIGNMENT + 1024
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing is left aside"


def test_another_engine_of_the_same_model_reads_it_and_one_of_another_does_not(files, tmp_path):
    written(files)
    assert Files(tmp_path / "kept", IDENTITY).read(PAGE, empty())
    other = Files(tmp_path / "kept", b"o" * 16)
    assert other.look() == ([], [])
    os.makedirs(other.path(PAGE).parent)
    os.link(files.path(PAGE), other.path(PAGE))
    assert not other.read(PAGE, empty()), "a file says itself whose it is"
    assert not other.path(PAGE).exists()
    assert files.path(PAGE).exists()


@pytest.mark.parametrize("size", [0, 5, 100, ALIGNMENT, ALIGNMENT + 1023, ALIGNMENT + 1030])
def test_a_file_that_is_cut_or_longer_is_no_good(files, size, caplog):
    written(files)
    os.truncate(files.path(PAGE), size)
    assert not files.read(PAGE, empty())
    assert not files.path(PAGE).exists()
    assert "is deleted" in caplog.text
    written(files)
    assert files.read(PAGE, empty())


def test_files_that_are_no_good_are_named_once_for_what_they_are(files, caplog):
    """A prompt of 32,000 tokens has 500 of them."""
    for _ in range(3):
        for name, tokens in ((PAGE, TOKENS), (STATE, b"")):
            written(files, name, tokens)
            os.truncate(files.path(name), 100)
            assert not files.read(name, empty())
    written(files)
    files.path(PAGE).write_bytes(b"something else" * 1000)
    assert not files.read(PAGE, empty())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert [text in caplog.text for text in ("cut short", "not what it should be")] == [True, True]


def test_any_flipped_bit_is_seen(files):
    held = written(files)
    path = files.path(PAGE)
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\0")) if not held[1][-1] else len(whole)
    head = 8 + 4 + 1 + 48 + 8 + 4 + 8 + 4 + 4 + len(TOKENS)
    for place in [*range(head), *range(ALIGNMENT, used, 97), used - 1]:
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << (place % 8)
        path.write_bytes(spoilt)
        assert not files.read(PAGE, empty()), f"byte {place}"
        assert not path.exists()


def test_a_file_of_other_tokens_is_no_good_though_it_says_so_itself(files):
    """A name does not make it what it is: no tenant reads another's."""
    held = contents()
    assert files.write(PAGE, TOKENS[4:] + TOKENS[:4], held)
    assert not files.read(PAGE, empty())


def test_a_file_that_is_gone_is_a_miss(files, caplog):
    assert not files.read(PAGE, empty())
    files.remove(PAGE)
    assert caplog.text == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_system_refuses_is_said_once(files, number, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    assert not files.write(PAGE, TOKENS, contents())
    assert not files.write(PAGE, TOKENS, contents())
    assert caplog.text.count(os.strerror(number)) == 1
    monkeypatch.undo()
    assert list(files.path(PAGE).parent.iterdir()) == [], "nothing half is left"
    written(files)
    monkeypatch.setattr(type(files.path(PAGE)), "open", refuse)
    assert not files.read(PAGE, empty())
    assert caplog.text.count(os.strerror(number)) == 1


def test_names_that_are_not_ours_are_passed_over(files, tmp_path):
    written(files)
    folder = files.path(PAGE).parent
    for name in ("x.page", "-.page", "a-b-c.page", f"{'0' * 32}-{'0' * 32}-0.page", "README"):
        (folder / name).write_text("")
    (folder.parent / "stray").write_text("")
    left = folder / ".1f2e"
    left.write_text("half")
    assert files.look() == ([PAGE], [])
    assert left.exists(), "somebody may be writing it"
    os.utime(left, (0, 0))
    files.look()
    assert not left.exists()


def test_a_folder_with_something_left_aside_is_looked_through_until_that_is_stale(files):
    """Who was killed while it wrote leaves it, and nothing may ever change there again."""
    written(files)
    left = files.path(PAGE).parent / ".1f2e"
    left.write_text("half")
    for _ in range(2):
        os.utime(left.parent, ns=(0, 10**9))
        files.look()
    os.utime(left, (0, 0))
    os.utime(left.parent, ns=(0, 10**9))
    files.look()
    assert not left.exists()


def test_engines_that_write_to_one_folder_at_a_time_are_not_in_each_others_way(
    files, monkeypatch, caplog
):
    """In containers both are process 1."""
    other, write, begun = Files(files.path(PAGE).parents[2], IDENTITY), os.write, []

    def meanwhile(number, piece):
        if not begun:
            begun.append(other)
            written(other)
        return write(number, piece)

    monkeypatch.setattr(os, "write", meanwhile)
    held = written(files)
    assert files.read(PAGE, found := empty())
    assert found == held
    assert caplog.text == ""


def test_a_folder_that_cannot_be_looked_through_hides_no_other(files, monkeypatch, caplog):
    written(files)
    written(files, STATE, b"")
    scan = os.scandir

    def refuse(path):
        if path.name == min(PAGE.key.hex()[:2], STATE.key.hex()[:2]):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert len(files.look()[0]) == 1
    assert caplog.text.count("Permission denied") == 1


def test_only_folders_that_have_changed_are_looked_through_again(files, monkeypatch):
    """Every engine looks for what others have written, all the while."""
    looked = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (looked.append(path.name), scan(path))[1])
    others = Files(files.path(PAGE).parents[2], IDENTITY)
    written(others)
    folder = files.path(PAGE).parent
    changed_ns = folder.stat().st_mtime_ns
    assert files.look() == ([PAGE], [])
    written(others, SIBLING, SIBLING_TOKENS)
    os.utime(folder, ns=(0, changed_ns))
    assert files.look() == ([SIBLING], []), (
        "it has changed so lately that it may have changed since"
    )
    os.utime(folder, ns=(0, 10**9))
    assert files.look() == ([], [])
    looked.clear()
    assert (files.look(), looked) == (([], []), [])
    written(others, STATE, b"")
    others.remove(SIBLING)
    assert files.look() == ([STATE], [SIBLING])
    assert sorted(looked) == sorted({name.key.hex()[:2] for name in (STATE, SIBLING)})


def test_a_file_that_cannot_be_deleted_is_found_again(files, monkeypatch):
    """Else it takes room for ever, and nobody knows."""
    written(files)
    os.utime(files.path(PAGE).parent, ns=(0, 10**9))
    assert files.look() == ([PAGE], [])
    with monkeypatch.context() as refused:
        refused.setattr(type(files.path(PAGE)), "unlink", refuse_all)
        files.remove(PAGE)
    assert files.look() == ([PAGE], [])


def test_a_file_that_cannot_be_read_is_deleted(files, monkeypatch):
    written(files)
    with monkeypatch.context() as refused:
        refused.setattr(type(files.path(PAGE)), "open", refuse_all)
        assert not files.read(PAGE, empty())
    assert not files.path(PAGE).exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_file_that_a_shortage_hides_is_kept_and_found_again(files, number, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    written(files)
    os.utime(files.path(PAGE).parent, ns=(0, 10**9))
    assert files.look() == ([PAGE], [])
    with monkeypatch.context() as short:
        short.setattr(type(files.path(PAGE)), "open", refuse)
        assert not files.read(PAGE, empty())
    assert files.look() == ([PAGE], [])
    found = empty()
    assert files.read(PAGE, found)


def test_what_is_no_file_is_no_item(files):
    """Whoever opens a pipe waits for its other end."""
    files.path(PAGE).parent.mkdir(parents=True)
    os.mkfifo(files.path(PAGE))
    files.path(SIBLING).mkdir()
    assert files.look() == ([], [])


def test_a_part_of_the_folders_is_looked_through_at_a_time(files):
    written(files)
    written(files, STATE, b"")
    found = [files.look(NUM_FOLDERS // 4)[0] for _ in range(4)]
    assert sorted(map(len, found)) == [0, 0, 1, 1]
