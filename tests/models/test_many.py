"""Which models add up the few rows after a cache hit as they do many, by the tables of kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from milepost.kernels.platform import device
from milepost.kernels.platform.device import CHIPS
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.forms import Epilogue, Matrix
from milepost.kernels.products.forms.quantised import Fp8
from milepost.kernels.products.table import PRODUCTS, Product
from milepost.layers.linear import Linear
from milepost.models import many
from milepost.models.folder import find_folder
from milepost.models.loading import LoadOptions, outline
from tests.kernels.choices import forget

MODELS = Path(__file__).parents[2] / "bench/models"
H200, L4 = CHIPS["sm_90"][1], CHIPS["sm_89"][1]
FOLLOW = [
    ("hybrid-35b-a3b", None),
    ("hybrid-35b-a3b", "fp8"),
    ("hybrid-80b-8-layers", None),
    ("hybrid-80b-a3b-fp8", None),
    ("hybrid-9b", None),
    ("hybrid-27b", None),
]
EXCEPTIONS = {
    ("hybrid-35b-a3b-awq", None): "projection int4",
    ("hybrid-35b-a3b-nvfp4", None): "projection fp4",
    ("hybrid-9b", "fp8"): "down fp8",
    ("hybrid-9b-w8a8", None): "down int8",
    ("hybrid-27b-fp8", None): "projection fp8",
    ("kimi-linear-48b-a3b", None): "KDA",
    ("alice-ai-80b-a3b-fp8", None): "KDA",
    ("nemotron-3-nano", None): "Mamba2",
    ("bamba-9b", None): "Mamba2",
    ("lfm3-1.7b", None): "ShortConv",
    ("ling-3.0-tiny", None): "KDA",
    ("qwen3.8-flash-next-8-layers", None): "HyperBlock",
}
"""The first reason of each."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As with a Triton whose Gluon is known, whatever is installed here."""
    monkeypatch.setattr(device, "triton_version", lambda: (3, 6))
    forget()
    yield
    forget()


def model_of(name: str, quantization: str | None):
    folder = find_folder(str(MODELS / name), revision=None, with_weights=False)
    return outline(folder, LoadOptions(quantization=quantization))[0]


@pytest.mark.parametrize(("name", "quantization"), FOLLOW)
def test_all_products_of_a_prefill_have_the_order_of_many_rows(name, quantization, monkeypatch):
    model = model_of(name, quantization)
    monkeypatch.setattr(many, "FEW", range(1, 513))
    assert list(many.exceptions(model, H200)) == []
    assert many.follows_many(model, H200, has_float8_kv=False)
    assert not many.follows_many(model, H200, has_float8_kv=True)
    assert not many.follows_many(model, L4, has_float8_kv=False)


@pytest.mark.parametrize(("name", "quantization"), EXCEPTIONS, ids=str)
def test_exceptions(name, quantization):
    reasons = list(many.exceptions(model_of(name, quantization), H200))
    assert reasons[0].startswith(EXCEPTIONS[name, quantization])


def test_a_cut_sum_is_found(monkeypatch):
    """As if LIKE_MANY changed nothing."""
    plain = SimpleNamespace(of=lambda weight, _=None: Matrix.of(weight))
    monkeypatch.setattr(many, "Matrix", plain)
    reasons = " ".join(many.exceptions(model_of("hybrid-35b-a3b", "fp8"), H200))
    assert "8 parts, 128 seq for 1 rows, 128 seq for 2048" in reasons
    monkeypatch.setattr(many, "FEW", (17,))
    reasons = " ".join(many.exceptions(model_of("hybrid-35b-a3b", "fp8"), H200))
    assert "router raw" in reasons
    assert "out fp8" in reasons
    assert "split 8 for 17 rows, 128 seq for 2048" in reasons


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_decodes_still_cut_sums(num_rows):
    """The order that decodes had, by the kernels that they had."""
    model = model_of("hybrid-35b-a3b", "fp8")
    outs = [
        Matrix.of(module.weights[0].form)
        for path, module in model.named_modules()
        if isinstance(module, Linear) and path.endswith(".out")
    ]
    product = Product(weight=outs[0], num_rows=num_rows, epilogue=Epilogue.PARTIALS)
    order = PRODUCTS.choose(product, H200).order
    assert order == ("8 parts, 128 seq" if num_rows == 1 else "128 seq, split 8")


def test_a_product_says_whether_it_is_like_many():
    weight = Matrix.of(model_of("hybrid-35b-a3b", None).layers[0].blocks[0].parts[0].out.form)

    def is_whole(order, **sizes):
        return Product(weight=weight._replace(order=order, **sizes), num_rows=64).is_whole

    assert [is_whole(order) for order in SumOrder] == [False, True, True]
    assert [is_whole(order, num_inputs=12288) for order in SumOrder] == [False, True, True]
    quantised = {"num_inputs": 12288, "form": Fp8}
    assert [is_whole(order, **quantised) for order in SumOrder] == [False, False, True]
