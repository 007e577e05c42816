"""What was asked of an engine is written down without a word of it."""

from __future__ import annotations

import errno
import json
import os

import pytest

from milepost import LLM, SamplingParams
from milepost.cache.tree import Chain
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.engine.loop.trace_recording import TraceRecorder
from milepost.engine.prompts import Prompt
from milepost.engine.text.detokenizer import NoText
from milepost.errors import ConfigError
from milepost.pictures import Picture
from milepost.scheduler.request import Request


def job(number, tokens, num_answer_tokens=3):
    """A request that has come this far."""
    request = Request(id=str(number), chain=Chain(tokens, 16), max_tokens=num_answer_tokens)
    request.extend(range(num_answer_tokens))
    completion = Completion(index=0, request=request, text=NoText(), seed=0)
    return RequestGroup(
        number=number,
        prompt=Prompt(token_ids=tokens),
        params=SamplingParams(),
        completions=[completion],
    )


def test_lines_stand_in_order_of_arrival_however_requests_end(tmp_path):
    path, now = tmp_path / "trace", iter([5.0, 5.5, 6.0, 7.25])
    recorder = TraceRecorder(str(path), now=lambda: next(now))
    jobs = [job(number, [number] * 40, number + 1) for number in range(3)]
    for each in jobs:
        recorder.begin(each)
    recorder.end(jobs[1])
    assert not path.read_bytes(), "the first one is not over"
    recorder.end(jobs[0])
    recorder.end(jobs[0])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["timestamp_ms"] for row in rows] == [500, 1000]
    assert [row["output_length"] for row in rows] == [1, 2]
    recorder.close()
    assert len(path.read_text().splitlines()) == 2
    assert path.stat().st_mode & 0o077 == 0


def test_the_same_page_has_another_hash_in_another_recording(tmp_path):
    ids = []
    for name in ("one", "two"):
        recorder = TraceRecorder(str(tmp_path / name))
        asked = job(0, [7] * 40)
        recorder.begin(asked)
        recorder.end(asked)
        ids.append(json.loads((tmp_path / name).read_text())["hash_ids"])
        recorder.close()
    assert len(ids[0]) == len(ids[1]) == 2
    assert not set(ids[0]) & set(ids[1])


def test_pictures_are_recorded_by_place_and_hash(tmp_path):
    shown = Picture(identity=bytes(16), offset=3, num_tokens=20, grid=(1, 2, 40), num_positions=20)
    recorder = TraceRecorder(str(tmp_path / "one"))
    for number in range(2):
        asked = job(number, [7] * 40)
        asked.completions[0].request.chain.pictures = (shown,)
        recorder.begin(asked)
        recorder.end(asked)
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert rows[0]["images"] == rows[1]["images"]
    ((offset, num_tokens, id_),) = rows[0]["images"]
    assert (offset, num_tokens) == (3, 20)
    assert id_ != 0, "the identity itself could be looked up"


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="record_trace="):
        TraceRecorder(str(tmp_path / "none" / "trace"))


def test_a_disk_that_is_full_ends_the_recording_and_no_answer(tmp_path, monkeypatch, caplog):
    path = tmp_path / "trace"
    llm = LLM(device="cpu", record_trace=str(path), page_size=16, num_pages=64, num_slots=8)
    wishes = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def answered(number):
        prompt = {"prompt_token_ids": [number] * 20}
        (output,) = llm.generate([prompt], wishes, use_tqdm=False)
        return len(output.outputs[0].token_ids)

    assert answered(5) == 4
    whole, write = path.read_bytes(), os.write

    def torn(file, data):
        """Takes a part of a line, and then nothing."""
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) - 5])

    with monkeypatch.context() as context:
        context.setattr(os, "write", torn)
        assert answered(6) == 4
    assert answered(7) == 4
    assert path.read_bytes() == whole
    assert caplog.text.count("No space left") == 1
