"""Lists of modules that keep the type of their items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from torch import nn

T = TypeVar("T")


def module_list(modules: Iterable[T]) -> Sequence[T]:
    """Returns an `nn.ModuleList`, typed by the protocol that the modules follow: torch knows its
    items as modules only."""
    return cast("Sequence[T]", nn.ModuleList(cast("Any", modules)))
