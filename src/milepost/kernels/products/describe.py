"""The tables of kernels for people: in Markdown for the pages, and what serves one weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.expert_table import (
    EXPERT_KERNELS,
    Mixture,
    choose_experts,
    expert_refusals,
)
from milepost.kernels.products.forms.quantised import Fp4, Fp8, Int4
from milepost.kernels.products.table import KERNELS, Product, choose, refusals

QUANTISED = (Fp8, Int4, Fp4)
_PROBED = (*range(1, 130), 160, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens that are asked about."""
_HEAD = ("kernel", "forms", "rows", "needs", "epilogues", "order of sums", "in `kernels/`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens that one kernel serves."""

    first: int
    last: int
    kernel: str
    order: str
    refused: str
    """Why the kernel ahead of it in the table does not serve them."""

    @property
    def tokens(self) -> str:
        if self.last == _PROBED[-1]:
            return f"from {self.first}"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


def dense_table(forms: Sequence[type[Any]] | None = None) -> str:
    """The rows of `table.KERNELS` with one of these forms, in Markdown."""
    rows = [
        (
            each.name,
            _forms(each.forms),
            each.rows,
            each.needs or "any chip",
            ", ".join(epilogue.value for epilogue in each.epilogues),
            each.order.replace("{tiles.tiles.block_k}", "128"),
            _place(each.module),
        )
        for each in KERNELS
        if _has_one(each.forms, forms)
    ]
    return _markdown(_HEAD, rows)


def expert_table(forms: Sequence[type[Any]] | None = None) -> str:
    """The rows of `expert_table.EXPERT_KERNELS` with one of these forms, in Markdown."""
    rows = [
        (
            each.name,
            _forms(each.forms),
            each.rows,
            each.needs or "any chip",
            each.order,
            _place(each.module),
        )
        for each in EXPERT_KERNELS
        if _has_one(each.forms, forms)
    ]
    return _markdown((*_HEAD[:4], *_HEAD[5:]), rows)


def dense_spans(make: Callable[[int], Product], chip: Chip) -> list[Span]:
    """Which kernels serve a weight, by the number of tokens."""

    def one(num_tokens: int) -> tuple[str, str, str]:
        product = make(num_tokens)
        choice = choose(product, chip)
        if choice is None:
            return "two launches", "", "no kernel has the epilogue"
        return choice.kernel.name, choice.order, _last(refusals(product, chip))

    return list(_spans(one))


def expert_spans(make: Callable[[int], Mixture], chip: Chip) -> list[Span]:
    """Which kernels serve a mixture, by the number of tokens."""

    def one(num_tokens: int) -> tuple[str, str, str]:
        mixture = make(num_tokens)
        kernel = choose_experts(mixture, chip)
        return kernel.name, kernel.order, _last(expert_refusals(mixture, chip))

    return list(_spans(one))


def _spans(one: Callable[[int], tuple[str, str, str]]) -> Iterator[Span]:
    first, held = _PROBED[0], one(_PROBED[0])
    for before, num_tokens in pairwise(_PROBED):
        found = one(num_tokens)
        if found[:2] != held[:2]:
            change = _change(before, num_tokens, lambda num: one(num)[:2])
            yield _span(first, change - 1, held)
            first, held = change, one(change)
    yield _span(first, _PROBED[-1], held)


def _change(before: int, behind: int, one: Callable[[int], tuple[str, str]]) -> int:
    """The first number that is served as the one behind is."""
    while behind - before > 1:
        middle = (before + behind) // 2
        if one(middle) == one(behind):
            behind = middle
        else:
            before = middle
    return behind


def _span(first: int, last: int, held: tuple[str, str, str]) -> Span:
    return Span(first=first, last=last, kernel=held[0], order=held[1], refused=held[2])


def _last(refused: Iterator[tuple[Any, str]]) -> str:
    """The nearest row ahead, and why it does not serve."""
    found = list(refused)
    return f"{found[-1][0].name}: {found[-1][1]}" if found else ""


def _forms(forms: Sequence[type[Any]]) -> str:
    return ", ".join(form.__name__.lower() for form in forms)


def _has_one(own: Sequence[type[Any]], wanted: Sequence[type[Any]] | None) -> bool:
    return wanted is None or not set(own).isdisjoint(wanted)


def _place(module: str) -> str:
    return f"`{module.replace('.', '/')}.py`" if module else "torch"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
