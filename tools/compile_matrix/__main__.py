"""Compiles every kernel that an engine would launch, for every chip of the table; needs no GPU.

    python tools/compile_matrix                    # what CI does: one of each kind, known ones kept
    python tools/compile_matrix --all              # every case and size
    python tools/compile_matrix --all --fresh      # nightly: nothing is taken from a record
    python tools/compile_matrix --keep             # write the record that CI starts from
    python tools/compile_matrix --code FOLDER      # each kernel's PTX or AMDGCN, for diff -r

A fresh run that was stopped goes on where it was when it is started again.

Exits with 1 if a kernel does not compile or asks for more shared memory than its chip has. A
process for each chip, for kernels ask for it as they are imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chips import CHIPS, Chip, num_cores, pretend
from compiling import Result, Results, compile_launch
from record import CASES, CI_CASES, Launch, one_of_each_kind, record

KNOWN = Path(__file__).parent / "known"
"""What was compiled when it was last written, kept with the code."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    chips = options.chips.split(",")
    if len(chips) == 1:
        return _run(CHIPS[chips[0]], options)

    def run_alone(chip: str) -> int:
        command = [sys.executable, __file__, *arguments, f"--chips={chip}"]
        return subprocess.run(command, check=False).returncode

    with ThreadPoolExecutor(num_cores()) as pool:
        return max(pool.map(run_alone, chips))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compile_matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chips", default=",".join(CHIPS), help="as --chips=sm_80,sm_90")
    parser.add_argument("--all", action="store_true", help="every case and size")
    parser.add_argument("--fresh", action="store_true", help="compile what is known, too")
    parser.add_argument("--keep", action="store_true", help="write what CI starts from")
    parser.add_argument("--kernels", default="", help="only those whose names contain this")
    parser.add_argument("--code", type=Path, help="write each kernel's code to this folder")
    parser.add_argument("--spilling", action="store_true", help="list what spills registers")
    parser.add_argument("--cache", type=Path, default=Path(".cache/compile_matrix"))
    return parser.parse_args(arguments)


def _run(chip: Chip, options: argparse.Namespace) -> int:
    begun = time.perf_counter()
    known = KNOWN / f"{chip.arch}.jsonl"
    kind = "fresh" if options.fresh else "new"
    new = options.cache / f"{chip.arch}-{kind}.jsonl"
    results = Results([new] if options.fresh else [known, new], new=new)
    with pretend(chip):
        launches = record(CASES if options.all else CI_CASES)
        if not options.all:
            launches = one_of_each_kind(launches)
        launches = [launch for launch in launches if options.kernels in launch.name]
        recorded = time.perf_counter() - begun
        found: list[tuple[Launch, Result]] = []
        num_new = 0
        for launch in launches:
            key = launch.key(chip.target)
            code = options.code and options.code / chip.arch / launch.code_name
            result = None if code and not code.exists() else results.find(key)
            if result is None:
                num_new += 1
                result = compile_launch(launch, chip, code)
                results.add(key, result)
            found.append((launch, result))
        if options.keep:
            keys = [launch.key(chip.target) for launch, _ in found]
            results.write(known, keys)
        if options.fresh and not options.kernels:
            new.unlink(missing_ok=True)
    complaints = [(launch, result.complaint(chip)) for launch, result in found]
    complaints = [(launch, complaint) for launch, complaint in complaints if complaint]
    for launch, complaint in complaints:
        print(f"{chip.arch}: {json.dumps(launch.describe(), default=str)}: {complaint}")
    if options.spilling:
        for launch, result in sorted(found, key=lambda pair: -pair[1].spilled_bytes):
            if result.spilled_bytes:
                print(f"{chip.arch}: {result.spilled_bytes} bytes spilled: {launch.describe()}")
    most = max((result.shared_bytes for _, result in found), default=0)
    spilling = sum(result.spilled_bytes > 0 for _, result in found)
    print(
        f"{chip.arch} ({chip.example}): {len(found)} kernels, {num_new} compiled now, "
        f"{len(complaints)} that do not run there; at most {most >> 10} of "
        f"{chip.shared_bytes >> 10} KiB shared memory, {spilling} spill registers; "
        f"{time.perf_counter() - begun:.0f} s, {recorded:.0f} of them to find the launches",
        flush=True,
    )
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
