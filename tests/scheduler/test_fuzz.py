"""As many of the fuzz's runs as there is time for; all of them: `make fuzz`."""

import re

import pytest

from tests.scheduler import fuzz

RUNS_EACH = 10


@pytest.mark.parametrize("first", range(60, 90, RUNS_EACH))
def test_runs(first):
    for seed in range(first, first + RUNS_EACH):
        fuzz.run(seed)


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
