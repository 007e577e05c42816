"""Run by test_families_compile in a process of its own, for kernels to be compiled rather than
interpreted: prints which kernels of a family's engine a chip's compiler refuses.

    python families.py FAMILY CHIP DTYPE [part of a kernel's name]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "tools" / "compile_matrix"))

from chips import CHIPS, pretend
from compiling import compile_launch
from record import Case, record

from tests.engines import save_tiny
from tests.gpu.test_families import COMMON, FAMILIES


def main(family: str, arch: str, dtype: str, part: str = "") -> None:
    chip = CHIPS[arch]
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), family, getattr(torch, dtype), **(COMMON | FAMILIES[family]))
        with pretend(chip):
            launches = record([Case(model=folder, dtype=dtype, is_whole=True, max_num_seqs=8)])
            chosen = [launch for launch in launches if part in launch.name]
            problems = [(each.name, compile_launch(each, chip).complaint(chip)) for each in chosen]
    refused = {name: problem for name, problem in problems if problem}
    kernels = sorted({name for name, _ in problems})
    print(json.dumps({"kernels": kernels, "refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
