"""Runs the steps of a file that `--record-plans` wrote again, on a runner of its own.

    python tools/replay_plans.py FILE [--device cpu] [--each-step]

Says how many steps there were, which of them had other results than when they were recorded, and
the digest of what the pools hold at the end: the same plans leave the same in any process. With
`--each-step`, a line for every step, so that two machines can be compared where they part.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from milepost.engine.assembly.setup import build
from milepost.runner.recording import Heading, read_records
from milepost.runner.replay import digest, replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--device", help="another one than the recorded steps ran on")
    parser.add_argument("--each-step", action="store_true")
    arguments = parser.parse_args()
    records = read_records(arguments.file)
    heading = next(records)
    assert isinstance(heading, Heading), "a file begins with its configuration"
    config = replace(heading.config, record_plans=None)
    if arguments.device:
        config = replace(config, device=arguments.device)
    runner, num_steps, others = build(config).runner, 0, []
    for step, (recorded, found) in enumerate(replay(records, runner)):
        num_steps += 1
        if (found.tokens, found.written) != (recorded.tokens, recorded.written):
            others.append(step)
        if arguments.each_step:
            row = {"step": step, "tokens": found.tokens, "digest": digest(runner.pools)}
            print(json.dumps(row))
    print(json.dumps({"steps": num_steps, "others": others, "digest": digest(runner.pools)}))
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
