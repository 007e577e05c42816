"""A kernel is added as docs/kernels.md says: a module and a row, and nothing else calls it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from milepost.kernels.platform.device import CHIPS, probe
from milepost.kernels.platform.tables import RowRange, row
from milepost.kernels.products import Epilogue
from milepost.kernels.products.forms.quantised import Fp8, multiply
from milepost.kernels.products.run import Multiplication
from milepost.kernels.products.table import PRODUCTS, Product
from milepost.models import kernel_list
from tests.kernels.choices import forget, multiplication, run_kernel
from tests.kernels.quantised_cases import make_fp8, make_rows
from tests.tools.test_tables import tables

CALLS: list[tuple[int, int]] = []


def split(product: Product, chip: object) -> int:
    """Parts along the inputs, as the tiles of a kernel that cuts nothing else."""
    return 2 if product.epilogue is Epilogue.PARTIALS else 1


def run(given: Multiplication, tiles: int) -> Tensor:
    CALLS.append((len(given.rows), tiles))
    product = multiply(given.values, given.weight, given.bias)
    output = given.output(tiles)
    if tiles == 1:
        return output.copy_(product)
    output[0], output[1] = product / 4, product * 3 / 4
    return output.transpose(0, 1)


@pytest.fixture
def added(monkeypatch):
    """The module and the row."""
    module = ModuleType("milepost.kernels.products.portable.added")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel = row(
        "added",
        "products.portable.added",
        (Fp8,),
        "all at once",
        ("scales are not of whole blocks", lambda product, _: product.weight.is_blocked),
        rows=RowRange(above=2, most=7),
        epilogues=(Epilogue.NONE, Epilogue.PARTIALS),
        cut=split,
    )
    monkeypatch.setattr(PRODUCTS, "kernels", [kernel, *PRODUCTS.kernels])
    forget()
    CALLS.clear()
    yield kernel
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("has_place", [False, True])
def test_a_module_and_a_row_are_enough(added, has_place: bool) -> None:
    weight, hidden, bias = make_fp8(200, 256), make_rows(5, 256), torch.randn(200).half()
    expected = multiply(hidden, weight, bias)
    into = hidden.new_full((5, 208), torch.nan)[:, :200] if has_place else None
    output = run_kernel(hidden, weight, bias, into=into)
    assert [(5, 1 if has_place else 2)] == CALLS
    summed = output.sum(1) if output.dim() == 3 else output
    torch.testing.assert_close(summed.float(), expected.float(), rtol=1e-2, atol=1e-2)
    assert (output is into) == has_place


def test_the_row_says_which_products_are_others(added) -> None:
    chip = probe(torch.device("cpu"))
    others = [
        (make_rows(2, 256), make_fp8(200, 256), "rows: 3 to 7"),
        (make_rows(5, 256), make_fp8(200, 256, rows=1), "scales are not of whole blocks"),
    ]
    for hidden, weight, reason in others:
        product = multiplication(hidden, weight).product
        assert PRODUCTS.choose(product, chip).kernel is not added
        assert next(PRODUCTS.refusals(product, chip)) == (added, reason)


def test_the_pages_and_the_command_show_it(added) -> None:
    line = "| added | fp8 | 3 to 7 | any chip | none, partials | all at once |"
    assert line in tables.products(PRODUCTS)
    weight = multiplication(make_rows(1, 256), make_fp8(200, 256)).product.weight
    spans = kernel_list.spans(
        PRODUCTS, lambda num: Product(weight=weight, num_rows=num), CHIPS["sm_80"][1]
    )
    assert [(each.first, each.last) for each in spans if each.kernel == "added"] == [(3, 7)]
