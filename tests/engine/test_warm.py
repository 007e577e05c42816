"""`milepost warm`: kernels are compiled by several processes, each once, and found at a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milepost.cli.main import main
from tests import forked

TINY = str(Path(__file__).parents[2] / "src" / "milepost" / "tiny")


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more


def test_shares_together_are_all_kernels_and_none_is_in_two():
    pytest.importorskip("triton", reason="kernels are compiled by the package triton")
    program = Path(__file__).with_name("warm_program.py")
    said = json.loads(forked.run_script(program, compiles=True).splitlines()[-1])
    found = {name: set(keys) for name, keys in said.items()}
    first, second = found["0 of 2"], found["1 of 2"]
    assert len(found["0 of 1"]) > 20
    assert first | second == found["0 of 1"]
    assert not first & second
    assert abs(len(first) - len(second)) <= 1


@pytest.mark.nightly
def test_kernels_are_left_in_tritons_cache_for_the_next_time(tmp_path):
    pytest.importorskip("triton", reason="kernels are compiled by the package triton")
    command = [sys.executable, "-m", "milepost", "warm", TINY, "--chip", "sm_89", "--processes=2"]
    folder = tmp_path / "triton"
    made = []
    for _ in range(2):
        done = subprocess.run(
            command,
            env=environment(TRITON_CACHE_DIR=str(folder)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "kernels for sm_89 are compiled" in done.stderr
        made.append(sorted(path.name for path in folder.rglob("*.cubin")))
    assert len(made[0]) > 20
    assert made[0] == made[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_chip_has_to_be_named(capsys):
    pytest.importorskip("triton", reason="kernels are compiled by the package triton")
    assert main(["warm", TINY]) == 2
    assert "there is no GPU here: name one, as --chip sm_80" in capsys.readouterr().err


def test_a_chip_that_nobody_knows_is_refused(capsys):
    pytest.importorskip("triton", reason="kernels are compiled by the package triton")
    assert main(["warm", TINY, "--chip", "gfx900"]) == 2
    assert "--chip gfx900: this is none of sm_80" in capsys.readouterr().err
