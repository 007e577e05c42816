"""Run by test_families_compile in a process of its own, for kernels to be compiled rather than
interpreted: prints which kernels of families' engines a chip's compiler refuses.

    python families.py CHIP DTYPE FAMILY[:part of a kernel's name] ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "tools" / "compile_matrix"))

from chips import CHIPS, Chip, pretend
from compiling import compile_launch
from record import Case, record

from tests.engines import save_tiny
from tests.gpu.test_families import COMMON, FAMILIES


def compiled(family: str, chip: Chip, dtype: str, part: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), family, getattr(torch, dtype), **(COMMON | FAMILIES[family]))
        with pretend(chip):
            launches = record([Case(model=folder, dtype=dtype, is_whole=True, max_num_seqs=8)])
            chosen = [launch for launch in launches if part in launch.name]
            problems = [(each.name, compile_launch(each, chip).complaint(chip)) for each in chosen]
    refused = {name: problem for name, problem in problems if problem}
    kernels = sorted({name for name, _ in problems})
    return {"kernels": kernels, "refused": refused}


def main(arch: str, dtype: str, *asked: str) -> None:
    found = {}
    for each in asked:
        family, _, part = each.partition(":")
        found[family] = compiled(family, CHIPS[arch], dtype, part)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
