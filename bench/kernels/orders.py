"""Which kernels of the table give the same bits, among those that state one order of sums.

    PYTHONPATH=src:. python bench/kernels/orders.py [--out FILE]

A row of JSON for each pair with one order says whether all bits are equal (`tests.kernels.orders`;
tests/gpu/test_orders.py demands that they are).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import rows as provenance
from tests.kernels.orders import NUM_ROWS, SHAPES, compare, forms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = provenance.ROOT / "out" / "orders.jsonl"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    found = []
    for shape in SHAPES:
        for name, weight in forms(*shape):
            for num_rows in NUM_ROWS:
                for row in compare(weight, num_rows):
                    row = {"form": name, "shape": shape, "rows": num_rows, **row}
                    print(json.dumps(row), flush=True)
                    found.append(provenance.provenance() | row)
    provenance.write(arguments.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
