"""As many of the fuzz's runs as there is time for; all of them: `make fuzz`."""

import re
from multiprocessing.pool import ThreadPool

import pytest

from tests.scheduler import fuzz

RUNS_EACH = 10


@pytest.mark.parametrize("first", range(250, 270, RUNS_EACH))
def test_runs(first):
    for seed in range(first, first + RUNS_EACH):
        fuzz.run(seed)


def test_a_branch_point_that_a_verifying_step_passes_is_not_exported():
    """A preempted request's last prompt token came with drafts, in a step that writes no state."""
    fuzz.run(931362)


def test_pages_that_moved_beside_a_step_that_is_cut_short_are_forgotten():
    """Nobody knows whether a plan of copies alone, made behind that step, has been run."""
    fuzz.run(91240, 60)


def test_a_failure_says_how_to_repeat_it(monkeypatch):
    """A runner that copies no pages is found out."""
    monkeypatch.setattr(fuzz.WatchfulRunner, "_copy_page", lambda *_: None)
    found = next(failure for seed in range(40) if (failure := failure_of(seed)))
    seed = re.match(r"seed (\d+), operation \d+ \(\d+ pages", found).group(1)
    assert failure_of(int(seed)) == found


def failure_of(seed):
    try:
        fuzz.run(seed)
    except fuzz.RunError as error:
        return str(error)
    return None


def test_all_runs_of_a_range_are_made_and_counted(monkeypatch, capsys):
    """In processes of their own; one that fails ends none of the others."""
    assert fuzz.main(["--seed", "5", "--runs", "3", "--operations", "10", "--jobs", "2"]) == 0
    assert "3 of 3 runs, 0 failed\nseeds 5 to 7, 10 operations each: all right" in (
        capsys.readouterr().out
    )
    wrong = {6: "seed 6, operation 1"}
    monkeypatch.setattr(fuzz, "attempt", lambda seed, **_: wrong.get(seed, ""))
    monkeypatch.setattr(fuzz.multiprocessing, "Pool", ThreadPool)  # a lambda cannot be sent
    assert fuzz.main(["--seed", "5", "--runs", "3"]) == 1
    assert "seed 6, operation 1\n" in capsys.readouterr().out
