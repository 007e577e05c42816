"""Which kernels of a form give a row the same bits whatever the number of rows.

    PYTHONPATH=src:. python bench/kernels/invariance.py [--out FILE]

A row of JSON for each kernel that may serve weights with one order (`batch_invariant`) says how
many rows have other bits than the last kernel of the table gives them among many rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import rows as provenance
from tests.kernels.invariance import FORMS, SHAPES, survey_experts, survey_products


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = provenance.ROOT / "out" / "invariance.jsonl"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    arguments = parser.parse_args()
    found = []
    for form in arguments.forms:
        surveys = [*(survey_products(form, shape) for shape in SHAPES), survey_experts(form)]
        for row in (row for survey in surveys for row in survey):
            print(json.dumps({"form": form, **row}), flush=True)
            found.append(provenance.provenance() | {"form": form, **row})
    provenance.write(arguments.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
