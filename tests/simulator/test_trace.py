import gzip
import json
import math

import pytest

from milepost import LLM, SamplingParams
from milepost.errors import TraceError
from milepost.simulator import read_trace
from milepost.simulator.chain import TraceChain
from milepost.simulator.trace import MAX_TOKENS
from tests.simulator.traces import DATA


def line(**changes):
    row = {"timestamp": 0, "input_length": 130, "output_length": 5, "hash_ids": [7, 8]} | changes
    return json.dumps({key: value for key, value in row.items() if value is not None}) + "\n"


def write(path, *lines):
    path.write_text("".join(lines))
    return path


def test_both_recorded_formats_are_read():
    agents = read_trace(DATA / "agent-excerpt.jsonl.gz")
    assert (agents.page_size, len(agents.requests)) == (64, 53)
    assert len({r.session for r in agents.requests}) == 3
    chats = read_trace(DATA / "conversation-excerpt.jsonl.gz")
    assert (chats.page_size, len(chats.requests)) == (512, 300)
    assert all(len(r.page_ids) == r.input_length // 512 for r in chats.requests)


def test_pictures_of_one_id_are_the_same(tmp_path):
    text = line(images=[[3, 20, 5], [30, 20, 6]]) + line(timestamp=1, images=[[3, 20, 5]])
    first, second = read_trace(write(tmp_path / "a.jsonl", text), block_size=64).requests
    assert [(each.offset, each.num_tokens) for each in first.pictures] == [(3, 20), (30, 20)]
    assert first.pictures[:1] == second.pictures
    assert first.pictures[0].identity != first.pictures[1].identity


def test_plain_and_gzip_read_alike(tmp_path):
    text = line() + line(timestamp=9, input_length=200, hash_ids=[7, 8, 9])
    plain = read_trace(write(tmp_path / "a.jsonl", text))
    (tmp_path / "b").write_bytes(gzip.compress(text.encode()))
    packed = read_trace(tmp_path / "b")
    assert plain.requests[1].page_ids == packed.requests[1].page_ids
    assert plain.requests[1].arrival_s == 0.009


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (line(timestamp=None), "timestamp=None"),
        (line(input_length=0), "input_length=0"),
        (line(output_length=-1), "output_length=-1"),
        (line(output_length=True), "output_length=True"),
        (line(hash_ids=None), "hash_ids is not a list"),
        (line(hash_ids=[7, [8]]), "not an id"),
        (line(think_time="long"), "think_time='long'"),
        (line(timestamp=-1), "back in time"),
        (line(timestamp=math.inf), "timestamp=inf is not a number"),
        (line(timestamp=math.nan), "timestamp=nan is not a number"),
        (line(timestamp=10**400), "timestamp=1000"),
        (line(hash_ids=list(range(100, 199))), "99 hash_ids do not fit 130 tokens"),
        (line(output_length=10**13), "output_length=10000000000000 is not a count"),
        (line(hash_ids=[5, 8]), "8 follows another id than the first time"),
        (line(hash_ids=[7, 7]), "7 follows another id than the first time"),
        (line(hash_ids=[8, 5]), "8 follows another id than the first time"),
        (line(images=7), "images=7"),
        (line(images=[[1, 2]]), "images="),
        (line(images=[[1, 0, 7]]), "images="),
        (line(images=[["1", 2, 7]]), "images="),
        (line(images=[[100, 30, 7]]), "tokens 100 to 130 of a prompt of 130"),
        (line(images=[[9, 9, 7], [5, 2, 7]]), "images="),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, message):
    path = write(tmp_path / "t.jsonl", line(), bad.rstrip("\n") + "\n")
    with pytest.raises(TraceError, match="t.jsonl:2: .*" + message):
        read_trace(path)


def test_a_trace_is_bounded(tmp_path, monkeypatch):
    lines = [line(output_length=MAX_TOKENS, hash_ids=[])] * 3
    monkeypatch.setattr("milepost.simulator.trace.MAX_PAGE_IDS", 2 * MAX_TOKENS // 256)
    path = write(tmp_path / "t.jsonl", *lines)
    assert len(read_trace(path, block_size=256, limit=1).requests) == 1
    with pytest.raises(TraceError, match="read fewer requests"):
        read_trace(path, block_size=256)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**20))
    monkeypatch.setattr("milepost.small_files.MAX_LINE", 2**10)
    with pytest.raises(TraceError, match="a line of 1024 characters or more"):
        read_trace(bomb)


def test_an_empty_file_a_missing_one_and_an_open_block_size_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path / "e", "\n"))
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="64 or 128"):
        read_trace(write(tmp_path / "o", line(input_length=100, hash_ids=[7])))
    assert read_trace(write(tmp_path / "o", line()), block_size=64).page_size == 64


def test_an_answer_has_the_ids_of_the_prompt_that_continues_it(tmp_path):
    trace = read_trace(
        write(
            tmp_path / "t",
            line(output_length=100),
            line(timestamp=1, input_length=280, hash_ids=[7, 8, 9, 10]),
            line(timestamp=2, input_length=280, hash_ids=[7, 8, 11, 12]),
        )
    )
    trace.link_answers()
    first, second, third = trace.requests
    digests = trace.digests()
    chain = TraceChain(first, 64, digests)
    for _ in range(100):
        chain.extend((0,))
    follower = TraceChain(second, 64, digests)
    assert chain.full_digests() == follower.full_digests()[:3]
    assert follower.token_bytes(0, 230) == chain.token_bytes(0, 230)
    assert TraceChain(third, 64, digests).full_digests()[2] != chain.full_digests()[2]
    assert not third.answer_ids


def test_an_answer_that_no_prompt_has_room_for_keeps_ids_of_its_own(tmp_path):
    trace = read_trace(
        write(
            tmp_path / "t",
            line(output_length=500),
            line(timestamp=1, input_length=280, hash_ids=[7, 8, 9, 10]),
        )
    )
    trace.link_answers()
    assert not trace.requests[0].answer_ids


def test_bytes_of_a_chain_agree_with_its_pages():
    trace = read_trace(DATA / "agent-excerpt.jsonl.gz", limit=2)
    chain = TraceChain(trace.requests[0], 64, trace.digests())
    whole = chain.token_bytes(0, len(chain))
    assert len(whole) == 4 * len(chain)
    assert chain.token_bytes(100, 333) == whole[400:1332]
    assert b"".join(chain.page_contents(1, 4)) == whole[256:1024]
    assert chain.token_bytes(len(chain), len(chain) + 9) == b""


def test_what_an_engine_served_can_be_replayed(tmp_path):
    path = tmp_path / "trace"
    options = {"page_size": 16, "num_pages": 64, "num_slots": 8, "max_num_seqs": 4}
    llm = LLM(device="cpu", record_trace=str(path), **options)
    prompts = [[5] * 40 + [number] * 9 for number in (1, 2)]
    wishes = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        llm.generate([{"prompt_token_ids": prompt}], wishes, use_tqdm=False)
    trace = read_trace(path, block_size=16)
    assert [request.input_length for request in trace.requests] == [49, 49]
    assert [request.output_length for request in trace.requests] == [4, 4]
    first, second = (list(request.page_ids) for request in trace.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
