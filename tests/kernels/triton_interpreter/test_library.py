"""torch's own GEMMs, as the table of products calls them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels.layout.emit import as_activations
from milepost.kernels.products import library
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.run import Multiplication

SETTINGS = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]


def settings() -> list[tuple[bool, bool]]:
    found = torch.backends.cuda.matmul
    return [(getattr(found, name), getattr(found, f"{name}_split_k")) for name in SETTINGS]


@pytest.mark.parametrize("before", [(True, True), (False, True)])
@pytest.mark.parametrize("fails", [False, True])
def test_sums_are_whole_for_one_call(
    before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Whatever torch's settings are, also if the call fails, they are the same after it."""
    libraries, seen = ["default"], []

    def prefer(name: str | None = None) -> str:
        if name is not None:
            libraries.append(name)
        return libraries[-1]

    def multiply(*_: Tensor, out: Tensor) -> Tensor:
        seen.append((libraries[-1], settings()))
        if fails:
            raise RuntimeError("no memory")
        return out

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(torch, "mm", multiply)
    kept = settings()
    for name in SETTINGS:
        setattr(torch.backends.cuda.matmul, name, before)
    try:
        given = Multiplication(as_activations(torch.ones(80, 64)), Raw(values=torch.ones(16, 64)))
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                library.run_whole(given, None)
        else:
            library.run_whole(given, None)
        assert seen == [("cublaslt", [(False, False)] * 2)]
        assert libraries[-1] == "default"
        assert settings() == [before] * 2
    finally:
        for name, value in zip(SETTINGS, kept, strict=True):
            setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.parametrize("shift", [0, 4])
def test_whole_sums_are_written_where_they_belong(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cuBLAS cannot write aligned are new, for the caller to copy."""
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda _=None: None)
    hidden, weight = torch.randn(80, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    whole = torch.zeros(80, 48, dtype=torch.bfloat16)
    into = whole[:, 16 + shift : 32 + shift]
    given = Multiplication(as_activations(hidden), Raw(values=weight), into=into)
    product = library.run_whole(given, None)
    assert (product.data_ptr() == into.data_ptr()) == (shift == 0)
    torch.testing.assert_close(product, hidden @ weight.T)
    assert not whole[:, :16].any()
