"""What is recorded beside an engine never ends it, and can be read however it ends."""

import errno
import os

import pytest

from milepost import LLM, SamplingParams
from milepost.errors import ConfigError
from milepost.runner.recording import GrowingFile, read_records


def full_after(num_bytes, monkeypatch):
    """From now on a file takes so many bytes of what is written, then nothing."""
    left, write = [num_bytes], os.write

    def written(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), left[0])
        left[0] -= taken
        return write(file, data[:taken])

    monkeypatch.setattr(os, "write", written)


def test_on_a_full_disk_whole_pieces_are_left_and_the_log_says_so_once(
    tmp_path, monkeypatch, caplog
):
    file = GrowingFile("record_it", str(tmp_path / "file"), mode=0o600)
    file.write(b"first\n")
    full_after(4, monkeypatch)
    for _ in range(3):
        file.write(b"second\n")
    assert file.is_full
    assert (tmp_path / "file").read_bytes() == b"first\n"
    assert caplog.text.count("record_it: No space left") == 1


def test_one_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="record_it="):
        GrowingFile("record_it", str(tmp_path / "none" / "file"), mode=0o600)


def test_an_engine_whose_plans_find_no_room_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "plans"
    llm = LLM(device="cpu", record_plans=str(path), num_pages=64, num_slots=8)
    full_after(400, monkeypatch)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5] * 20}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert list(read_records(path))
