import gzip
import json
from math import nan

import pytest

from milepost.errors import ConfigError
from milepost.load.workloads import WorkloadConfig, sessions


def texts(load):
    return [[message["content"] for turn in s.turns for message in turn.messages] for s in load]


@pytest.mark.parametrize("workload", ["shared-prefix", "multi-turn", "agent"])
def test_shapes(workload):
    config = WorkloadConfig(workload=workload, num_sessions=6, num_groups=2, num_turns=3)
    load = sessions(config)
    assert len(load) == 6
    assert {len(session.turns) for session in load} == {1 if workload == "shared-prefix" else 3}
    systems = [session.turns[0].messages[0] for session in load]
    assert [message["role"] for message in systems] == ["system"] * 6
    assert len({message["content"] for message in systems}) == 2
    assert len({message["content"].count(" ") for message in systems}) == 1
    assert texts(load) == texts(sessions(config))
    other = WorkloadConfig(workload=workload, num_sessions=6, num_groups=2, workload_seed=1)
    assert texts(load) != texts(sessions(other))


def test_labels_share_all_but_a_word_or_two():
    load = sessions(WorkloadConfig(workload="labels", num_sessions=200, num_groups=4))
    (system,) = {session.turns[0].messages[0]["content"] for session in load}
    assert len(system.split()) == 200
    own = [session.turns[0].messages[1]["content"] for session in load]
    assert {len(text.split()) for text in own} == {1, 2}
    assert len(set(own)) > 150
    assert {turn.max_tokens for session in load for turn in session.turns} == {10}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_shares_what_its_ids_share(tmp_path, name):
    rows = [
        {"timestamp_ms": 0, "input_length": 30, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp_ms": 500, "input_length": 30, "output_length": 9, "hash_ids": [0, 1, 3]},
    ]
    path = tmp_path / name
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    config = WorkloadConfig(workload="trace", trace=str(path), trace_speed=2)
    first, second = sessions(config)
    a, b = (session.turns[0].messages[0]["content"].split() for session in (first, second))
    assert len(a) == len(b) == 30
    assert a[:20] == b[:20]
    assert a[20:] != b[20:]
    assert (first.arrival_s, second.arrival_s) == (0, 0.25)
    assert second.turns[0].max_tokens == 9


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="trace"):
        WorkloadConfig(workload="trace")
    with pytest.raises(ConfigError, match="num_turns=0"):
        WorkloadConfig(num_turns=0)
    with pytest.raises(ConfigError, match="missing"):
        sessions(WorkloadConfig(workload="trace", trace=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="trace_speed=0: use more than 0"):
        WorkloadConfig(trace_speed=0)
    with pytest.raises(ConfigError, match="trace_scale=nan: use more than 0"):
        WorkloadConfig(trace_scale=nan)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: Expecting"),
        (b"[]", "line 2: list"),
        (b'{"input_length": 5, "output_length": 1}', "line 2: no 'hash_ids'"),
        (b'{"input_length": "5", "output_length": 1, "hash_ids": [1]}', "line 2: "),
        (b'{"input_length": 5, "output_length": 1, "hash_ids": 1}', "line 2: "),
        (b'{"input_length": 5, "output_length": 1, "hash_ids": [1], "timestamp": 1e400}', "inf"),
        (b'{"input_length": 1e30, "output_length": 1, "hash_ids": [1]}', "length=1e.30: use 0"),
        (b'{"input_length": -5, "output_length": 1, "hash_ids": [1]}', "input_length=-5: use 0 to"),
        (b'{"input_length": 5, "output_length": 1e9, "hash_ids": [1]}', "output_length=1000000000"),
        (b'{"input_length": 5, "output_length": 1, "hash_ids": [1], "timestamp": -1}', "back in"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"trace.jsonl.*{message}"):
        sessions(WorkloadConfig(workload="trace", trace=str(path)))


def test_times_of_a_trace_have_either_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 5, "output_length": 1, "hash_ids": [1]}
    rows = [row | {"timestamp": 500}, row | {"timestamp_ms": 750}]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = sessions(WorkloadConfig(workload="trace", trace=str(path)))
    assert [session.arrival_s for session in found] == [0, 0.25]


def test_times_of_a_trace_count_from_its_first(tmp_path):
    """Some files have the time of the day; lines that are blank say nothing."""
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 5, "output_length": 1, "hash_ids": [1]}
    rows = [row | {"timestamp_ms": 1.7e12 + ms} for ms in (0, 500)]
    path.write_text("\n".join(["", *map(json.dumps, rows), "", ""]))
    found = sessions(WorkloadConfig(workload="trace", trace=str(path), trace_speed=2))
    assert [session.arrival_s for session in found] == [0, 0.25]


def test_a_trace_without_requests_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"trace.jsonl.: no requests are in it"):
        sessions(WorkloadConfig(workload="trace", trace=str(path)))
