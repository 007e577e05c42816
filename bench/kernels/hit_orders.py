"""Whether products of the few rows after a cache hit have the bits of the cold run's many rows, and
what kernels that do cost.

    PYTHONPATH=src:. python bench/kernels/hit_orders.py [--shapes 35B] [--out FILE]

A row of JSON for each shape, form and number of rows: the kernel that serves a decode, its time,
and the share of rows with the bits that they have among 1,024, 2,048 and 8,192; then the same for
the kernel that serves a prefill of a model that follows many rows (`models.many`), and for that
which serves both with `batch_invariant`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import rows as provenance
from bench.kernels.timing import time_us
from tests.kernels.invariance import make_weight
from tests.kernels.quantised_cases import make_rows
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.forms import Epilogue, Form
from milepost.kernels.products.run import Multiplication
from milepost.kernels.products.table import PRODUCTS

SHAPES = {
    "35B Gated DeltaNet in": (12352, 2048),
    "35B attention in": (9216, 2048),
    "35B out": (2048, 4096),
    "35B router": (264, 2048),
    "35B gates": (64, 2048),
    "9B Gated DeltaNet in": (12352, 4096),
    "9B up": (24576, 4096),
    "9B down": (4096, 12288),
    "9B out": (4096, 4096),
}
MANY = (1024, 2048, 8192)
FEW = (17, 32, 64, 72, 96, 128, 200, 256, 512)
LEAST_BYTES = 256 << 20
"""Weights of a graph together: they outgrow the L2 cache."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = provenance.ROOT / "out" / "hit-orders.jsonl"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--forms", nargs="*", choices=("raw", "fp8"), default=("raw", "fp8"))
    parser.add_argument("--shapes", default="", help="beginning of the names")
    arguments = parser.parse_args()
    found = []
    for form in arguments.forms:
        for name, shape in SHAPES.items():
            if not name.startswith(arguments.shapes) or (form == "fp8" and shape[0] % 128):
                continue
            for row in survey(form, shape):
                row = {"shape": name, "form": form} | row
                print(json.dumps(row), flush=True)
                found.append(provenance.provenance() | row)
    provenance.write(arguments.out, found)
    return 0


def survey(form: str, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of few rows."""
    free = make_weight(form, *shape, order=SumOrder.FREE)
    fixed = replace(free, order=SumOrder.FIXED)
    hidden = make_rows(max(MANY), shape[1]).cuda().bfloat16()
    whole = {num: _multiply(hidden[:num], free) for num in MANY}
    ours = _multiply(hidden, fixed)
    yield {"rows": "many", "kernels": [_name(hidden[:num], free) for num in MANY]} | {
        "as 8192": [_equal(whole[num], whole[8192]) for num in MANY],
        "as invariant": [_equal(whole[num], ours) for num in MANY],
        "us": [_time(hidden[:num], free) for num in MANY],
        "invariant us": [_time(hidden[:num], fixed) for num in MANY],
    }
    for num in FEW:
        own = hidden[:num].contiguous()
        row: dict[str, Any] = {"rows": num}
        ways = {
            "decode": (free, SumOrder.FREE),
            "prefill": (free, SumOrder.LIKE_MANY),
            "invariant": (fixed, SumOrder.FREE),
        }
        for way, (weight, order) in ways.items():
            product = _multiply(own, weight, order=order)
            row[way] = {
                "kernel": _name(own, weight, order=order),
                "us": _time(own, weight, order=order),
                "as many": [_equal(product, whole[many]) for many in MANY],
            }
        yield row


def _multiply(rows: Tensor, weight: Form, *, order: SumOrder = SumOrder.FREE) -> Tensor:
    """As an output projection: partials are added up by the next norm."""
    product = products.multiply(rows, weight, epilogue=Epilogue.PARTIALS, order=order)
    assert isinstance(product, Tensor)
    return product if product.dim() == 2 else product.sum(1).to(rows.dtype)


def _name(rows: Tensor, weight: Form, *, order: SumOrder = SumOrder.FREE) -> str:
    given = Multiplication(as_activations(rows), weight, epilogue=Epilogue.PARTIALS, order=order)
    choice = PRODUCTS.choose(given.product, probe(rows.device))
    return "none" if choice is None else f"{choice.kernel.name}: {choice.order}"


def _equal(found: Tensor, expected: Tensor) -> float:
    """The share of rows with equal bits."""
    same = (found == expected[: len(found)]).all(1)
    return round(float(same.float().mean()), 4)


def _time(rows: Tensor, weight: Form, *, order: SumOrder = SumOrder.FREE) -> float:
    copies = max(2, min(24, LEAST_BYTES // (weight.num_outputs * weight.num_inputs)))
    calls = [
        partial(products.multiply, rows, each, epilogue=Epilogue.PARTIALS, order=order)
        for each in (deepcopy(weight) for _ in range(copies))
    ]
    return round(time_us(calls), 2)


if __name__ == "__main__":
    sys.exit(main())
