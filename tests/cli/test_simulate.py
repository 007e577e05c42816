import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.simulator.traces import DATA

from milepost.cli import simulate_settings
from milepost.cli.display import Screen
from milepost.cli.main import main
from milepost.simulator import policies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "simulator.md"
TRACE = str(DATA / "conversation-excerpt.jsonl.gz")
AGENTS = str(DATA / "agent-excerpt.jsonl.gz")


def simulate(*arguments):
    answers, reports = io.StringIO(), io.StringIO()
    screen = Screen(answers=answers, reports=Console(file=reports, width=120), clock=lambda: 0.0)
    status = main(["simulate", *arguments], screen=screen)
    return status, answers.getvalue(), reports.getvalue()


def test_a_table_has_a_row_for_each_policy_and_size():
    memory = ("--gib", "2", "4", "--limit", "20")
    status, table, _ = simulate(TRACE, *memory, "--policy", "auto", "sglang")
    rows = [line.split()[:2] for line in table.splitlines()[1:5]]
    names = [[policy, gib] for gib in ("2.0", "4.0") for policy in ("auto", "sglang")]
    assert (status, rows) == (0, names)
    assert "20 requests, bound" in table


def test_without_flags_the_peers_stand_beside_auto_in_an_h200s_memory():
    status, table, _ = simulate(TRACE, "--limit", "4")
    rows = [line.split()[:2] for line in table.splitlines()[1:4]]
    assert (status, rows) == (0, [[name, "64.0"] for name in ("vllm", "sglang", "auto")])


def test_json_rows_add_up(tmp_path):
    path = tmp_path / "rows.json"
    memory = ("--gib", "8", "--limit", "30", "--json", str(path))
    status, table, _ = simulate(AGENTS, *memory, "--policy", "auto", "none")
    rows = json.loads(path.read_text())
    assert status == 0
    assert "ttft p50" in table
    assert [row["policy"] for row in rows] == ["auto", "none"]
    for row in rows:
        assert row["hits"] + sum(row["lost"].values()) == row["queries"]
        assert row["ttft_p90_s"] > 0
    ours, nothing = rows
    assert nothing["gpu_hours_saved"] == 0 < ours["gpu_hours_saved"]
    computed = nothing["gpu_hours"] - ours["gpu_hours"]
    assert ours["gpu_hours_saved"] == pytest.approx(computed, rel=0.2)


def test_a_fleet_has_a_row_for_each_routing(tmp_path):
    path = tmp_path / "rows.json"
    options = ("--fleet", "2", "4", "--gib", "4", "--limit", "12", "--json", str(path))
    status, table, _ = simulate(TRACE, *options, "--prefill-engines", "1", "--seeds", "2")
    rows = [line.split()[:2] for line in table.splitlines()[1:7]]
    routings = ["round-robin", "session", "events"]
    assert status == 0
    assert rows == [[routing, pools] for pools in ("1+1", "1+3") for routing in routings]
    assert max(map(len, table.splitlines())) <= 80
    assert len(json.loads(path.read_text())) == 12


def test_json_to_standard_output_is_nothing_else():
    _, text, _ = simulate(TRACE, "--limit", "4", "--policy", "auto", "--json", "-")
    assert json.loads(text)[0]["gib"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: No such file"),
        ((TRACE, "--routing", "events"), "give --fleet"),
        ((TRACE, "--fleet", "4", "--gib", "4", "--prefill-engines", "4"), "leave some to decode"),
        ((TRACE, "--fleet", "4", "--gib", "4", "--routing", "luck"), "--routing luck: use round"),
        ((TRACE, "--fleet", "4", "--gib", "4", "--policy", "vllm"), "--policy vllm: its events"),
        ((TRACE, "--policy", "magic"), "--policy magic: use auto"),
        ((TRACE, "--limit", "0"), "--limit 0: use 1 or more"),
        ((TRACE, "--block-size", "0"), "--block-size 0: use 1 or more"),
        ((TRACE, "--max-num-batched-tokens", "0"), "--max-num-batched-tokens 0: use 1 or more"),
        ((TRACE, "--seeds", "0"), "--seeds 0: use 1 or more"),
        ((TRACE, "--gib"), "--gib requires at least 1 element"),
        ((TRACE, "--gib", "1e12"), "--gib [1000000000000.0]: use more than 0, up to 131072"),
        ((TRACE, "--gib", "4", "--host-gib", "1e30"), "--host-gib 1e+30: use 0 to 131072"),
        ((TRACE, "--gib", "0"), "--gib"),
        ((TRACE, "--gib", "nan"), "--gib [nan]: use more than 0"),
        ((TRACE, "--gib", "4", "inf"), "--gib [4.0, inf]: use more than 0"),
        ((TRACE, "--gib", "4", "--host-gib", "nan"), "--host-gib nan: use 0 to"),
        ((TRACE, "--gib", "4", "--fleet", "2", "--transfer-gb-s", "0"), "--transfer-gb-s 0: use"),
        ((TRACE, "--gib", "4", "--disk-gib", "8"), "--disk-gib: give --host-gib"),
        ((TRACE, "--gib", "4", "--host-gb-s", "0"), "--host-gb-s 0: use more than 0"),
        ((TRACE, "--gib", "4", "--host-gib", "8", "--policy", "vllm"), "tiers are not modelled"),
        ((TRACE, "--gib", "4", "--target-hit-rate", "80"), "use one of them"),
        ((TRACE, "--target-hit-rate", "100"), "--target-hit-rate 100: use per cent"),
        ((TRACE, "--cost", "abacus"), "cost model 'abacus'"),
        ((TRACE, "--cost", "/dev/zero"), "cost model /dev/zero: more than 262144 bytes"),
        ((TRACE, "--gib", "4", "--fleet", "100000"), "--fleet [100000]: use 1 to 4096"),
        ((TRACE, "--client-retries", "9999"), "--client-retries 9999: use 0 to 1000"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    status, _, reports = simulate(*arguments)
    assert (status, reports.count("\n")) == (2, 1)
    assert message in reports


@pytest.mark.parametrize("path", ["nowhere/rows.json", "."])
def test_rows_that_cannot_be_written_are_refused_before_the_replay(monkeypatch, tmp_path, path):
    monkeypatch.setattr("milepost.cli.simulate.read_trace", None)
    status, table, reports = simulate(TRACE, "--json", str(tmp_path / path))
    assert (status, table, reports.count("\n")) == (2, "", 1)
    assert "name a file in an existing folder" in reports


@pytest.mark.parametrize("line", ["[" * 100_000, '{"input_length": ' + "9" * 5000 + "}"])
def test_a_line_that_no_reader_takes_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text(line + "\n")
    status, _, reports = simulate(str(tmp_path / "t.jsonl"))
    assert status == 2
    assert "t.jsonl:1: not JSON" in reports.replace("\n", "")


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    assert simulate(TRACE, "--gib", "4", "8", "--limit", "20", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    fleet = ("--fleet", "1", "2", "--routing", "session", "--gib", "4", "--limit", "8")
    assert simulate(TRACE, *fleet, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("has_matplotlib", "message"),
    [
        (False, "--plot needs matplotlib: install it with `pip install '.[plot]'`"),
        (True, "there is no folder"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_replay(
    monkeypatch, tmp_path, has_matplotlib, message
):
    found = object() if has_matplotlib else None
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: found)
    path = tmp_path / "nowhere" / "rates.png"
    status, table, reports = simulate(TRACE, "--limit", "9", "--plot", str(path))
    assert (status, table) == (2, "")
    assert message in reports


def test_seeds_are_rows_of_their_own_and_one_line_of_the_table(tmp_path):
    path = tmp_path / "rows.json"
    memory = ("--gib", "8", "--limit", "60")
    _, table, _ = simulate(TRACE, *memory, "--policy", "auto", "--seeds", "3", "--json", str(path))
    rows = json.loads(path.read_text())
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert len({row["ttft_p90_s"] for row in rows}) == 3
    assert table.count("auto") == 2, "a line of each table"


def test_memory_in_gib_is_shared_out_by_each_policy_and_what_it_cannot_hold_is_counted(tmp_path):
    """In lines that fit a terminal. A refused request's tokens are among those that were lost."""
    path = tmp_path / "rows.json"
    memory = ("--gib", "1", "2", "--limit", "24", "--json", str(path))
    _, table, _ = simulate(TRACE, *memory, "--policy", "auto", "vllm", "sglang")
    rows = json.loads(path.read_text())
    assert max(map(len, table.splitlines())) <= 80
    names = [(row["policy"], row["gib"]) for row in rows]
    assert names == [(policy, gib) for gib in (1, 2) for policy in ("auto", "vllm", "sglang")]
    assert any(row["refused"] for row in rows)
    for row in rows:
        assert bool(row["refused"]) == ("refused" in row["lost"])
        assert row["hits"] + sum(row["lost"].values()) == row["queries"] == rows[0]["queries"]
        assert row["hit_rate"] == row["hits"] / row["queries"]


def test_the_least_memory_for_a_hit_rate_is_found(tmp_path):
    path = tmp_path / "rows.json"
    target = ("--target-hit-rate", "55", "--limit", "16", "--json", str(path))
    assert simulate(AGENTS, *target, "--policy", "auto")[0] == 0
    (row,) = json.loads(path.read_text())
    assert row["hit_rate"] >= 0.55
    assert 1 < row["gib"] < 2, "neither the first size nor the next, twice as large"


def test_the_documented_policy_of_ones_own_runs_as_printed(monkeypatch, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    (line,) = re.findall(r"^    python shallow_first.py (.*)", PAGE.read_text(), re.M)
    monkeypatch.setattr(policies, "POLICIES", dict(policies.POLICIES))
    monkeypatch.setattr(simulate_settings, "POLICIES", policies.POLICIES)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["shallow_first.py", *line.split()])
    with pytest.raises(SystemExit) as ended:
        exec(example, {})
    assert ended.value.code == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:7]]
    assert [row[:2] for row in rows[2::3]] == [["shallow-first", "2.0"], ["shallow-first", "4.0"]]
    assert float(rows[2][2]) not in (0.0, float(rows[1][2]))
