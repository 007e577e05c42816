"""`milepost bench` against the real server."""

import io
import json

import pytest
from rich.console import Console

from milepost.cli.display import Screen
from milepost.cli.main import main


def bench(capsys, *arguments):
    reports = Console(file=io.StringIO(), width=200)
    screen = Screen(answers=io.StringIO(), reports=reports, clock=lambda: 0.0)
    status = main(["bench", *arguments], screen=screen)
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None, reports.file.getvalue()


SMALL = ("--num-sessions", "6", "--shared-words", "40", "--own-words", "8", "--output-tokens", "4")


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency", "3"),
        ("--request-rate", "50"),
        ("--workload", "multi-turn", "--num-turns", "2", "--concurrency", "3"),
        ("--workload", "agent", "--num-turns", "2", "--ignore-eos"),
    ],
)
def test_workloads(server, capsys, tmp_path, flags):
    out = tmp_path / "rows.jsonl"
    status, row, table = bench(capsys, "--base-url", server.url, "--out", str(out), *SMALL, *flags)
    assert status == 0, table
    turns = 2 if "--num-turns" in flags else 1
    assert (row["requests"], row["failed"]) == (6 * turns, 0)
    assert 0 < row["hit_rate"] < 1
    assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
    assert json.loads(out.read_text()) == row
    assert "prompt tokens from the cache" in table


def test_failures_are_counted_and_shown(server, capsys):
    long = ("--num-sessions", "2", "--shared-words", "9000", "--num-warmups", "0")
    status, row, table = bench(capsys, "--base-url", server.url, *long)
    assert (status, row["failed"]) == (1, 2)
    assert "max_model_len" in table


@pytest.mark.parametrize("flags", [(), ("--served-model", "m")])
def test_no_server(capsys, flags):
    status, _, table = bench(capsys, "--base-url", "http://127.0.0.1:1", *SMALL, *flags)
    assert status == 2
    assert "nobody listens on 127.0.0.1:1: start a server, as with `milepost serve`" in table


@pytest.mark.parametrize("address", ["http://", "http://127.0.0.1:99999", "http://[::1"])
def test_no_address(capsys, address):
    status, _, table = bench(capsys, "--base-url", address, *SMALL)
    assert status == 2
    assert f"base_url='{address}': this is no server's address" in table


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--request-rate", "0"), "request_rate=0.0: use more than 0"),
        (("--request-rate", "-1"), "request_rate=-1.0: use more than 0"),
        (("--request-rate", "nan"), "request_rate=nan: use more than 0"),
        (("--concurrency", "0"), "concurrency=0: use 1 or more"),
        (("--num-sessions", "0"), "num_sessions=0: use 1 or more"),
        (("--num-warmups", "-1"), "num_warmups=-1: use 0 or more"),
        (("--temperature", "nan"), "temperature=nan: use 0 for greedy, or more"),
        (("--temperature", "-1"), "temperature=-1.0: use 0 for greedy, or more"),
        (("--timeout-s", "0"), "timeout_s=0.0: use more than 0"),
        (("--timeout-s", "nan"), "timeout_s=nan: use more than 0"),
        (("--own-words", "0"), "own_words=0: use 1 or more"),
        (("--shared-words", "-1"), "shared_words=-1: use 0 or more"),
        (("--api-key", "a\nb"), "api_key: use one line of text"),
        (("--out", "/nowhere/rows"), "--out /nowhere/rows: No such file or directory"),
        (("--out", "/"), "--out /: Is a directory"),
        (("--workload", "trace", "--trace", "/nowhere/t"), "trace='/nowhere/t': No such file"),
    ],
)
def test_what_cannot_be_is_refused_before_the_server_is_asked(capsys, flags, words):
    status, _, table = bench(capsys, "--base-url", "http://127.0.0.1:1", *flags)
    assert (status, table.count("\n")) == (2, 1)
    assert words in table
