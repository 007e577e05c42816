"""Rows with the experts that they were routed to, as kernels' `run` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from milepost.kernels.layout.emit import as_activations
from milepost.kernels.products import mix
from milepost.kernels.products.forms import Form, Raw
from milepost.kernels.products.run import RoutedRows


def as_routed(
    hidden: Tensor, weights: Tensor, experts: Tensor, up: Form | Tensor, down: Form | Tensor
) -> RoutedRows:
    """A tensor stands for raw weights."""
    up, down = (Raw(values=each) if isinstance(each, Tensor) else each for each in (up, down))
    return RoutedRows(as_activations(hidden), weights, experts.int(), up, down)


def partials(hidden: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The parts of each token's mix of raw experts."""
    return mix(hidden, weights, experts, Raw(values=up), Raw(values=down))


def apply(hidden: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each token's mix of raw experts."""
    return partials(hidden, weights, experts, up, down).sum(1)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Inside, partials are full of NaN before a kernel fills them."""
    new_output = RoutedRows.new_output

    def poison(routed: RoutedRows, num_partials: int) -> Tensor:
        return new_output(routed, num_partials).fill_(torch.nan)

    with mock.patch.object(RoutedRows, "new_output", poison):
        yield
