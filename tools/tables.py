"""Tables of the documentation that are made from the code.

    python tools/tables.py              writes them into the pages
    python tools/tables.py --check      fails if a page has an older one

A table's place is between `<!-- made by tools/tables.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from milepost.cli.flags import SHORT, field_docs
from milepost.config import EngineConfig
from milepost.engine.metrics import TEXTS, Metric
from milepost.kernels.attention import ATTENTION
from milepost.kernels.attention.tiles import UNIT
from milepost.kernels.platform.tables import KernelTable
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.forms.quantised import Fp4, Fp8, Int4, Int8
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.kernels.products.table import PRODUCTS
from milepost.server.config import ServerConfig
from milepost.server.metrics import RequestMetrics
from milepost.server.vllm_metrics import NAMES, OURS

ROOT = Path(__file__).parent.parent
PLACE = r"(<!-- made by tools/tables\.py: {} -->\n).*?\n?(<!-- end -->)"


@functools.cache
def memory() -> dict[str, str]:
    """Returns the tables of `memory_table.py`, which pretends to have a GPU: its process has one of
    its own, and kernels that are compiled rather than interpreted."""
    path = Path(__file__).with_name("memory_table.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    tables: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return tables


def rows(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


_CUBLAS = "cuBLAS; 64 seq on sm_90 from 65 rows, up to 4096 inputs"


def products(table: KernelTable[Any], forms: Iterable[type] | None = None) -> str:
    """Returns the rows of a table of products with one of these forms."""
    kernels = [
        each for each in table.kernels if forms is None or not set(each.forms).isdisjoint(forms)
    ]
    head = ["kernel", "forms", "rows", "needs", "epilogues", "order of sums", "in `kernels/`"]
    body = [
        [
            each.name,
            ", ".join(form.__name__.lower() for form in each.forms),
            str(each.rows),
            each.needs or "any chip",
            ", ".join(epilogue.value for epilogue in each.epilogues),
            each.order.replace("{tiles.tiles.block_k}", "128").replace("{tiles.order}", _CUBLAS),
            _module(each.module),
        ]
        for each in kernels
    ]
    if not any(each.epilogues for each in kernels):
        for cells in (head, *body):
            del cells[4]
    return rows(head, body)


def _module(name: str) -> str:
    return f"`{name.replace('.', '/')}.py`"


def attention() -> str:
    """Returns the table of attention kernels."""
    return rows(
        ("kernel", "tiles", "needs", "order within a split", "splits of the KV", "in `kernels/`"),
        (
            (
                kernel.name,
                TAKES[kernel.name],
                kernel.needs or "any chip",
                kernel.order.replace("{tiles.block}", "16 to 128"),
                f"at multiples of {UNIT}, by load",
                _module(kernel.module),
            )
            for kernel in ATTENTION.kernels
        ),
    )


TAKES = {
    "wide, Hopper": "128 rows, heads of 128 or 256, 16-bit pages of at least 64",
    "fp8 narrow, Hopper": "up to 16 rows, heads of 256, FP8 pages",
    "tiles": "any heads and pages",
    "latents": "latents",
}
"""Tiles that each kernel of attention takes."""


def flags(config: type) -> str:
    """Returns a configuration's flags, with the docstrings that are their help."""
    docs = field_docs(config)
    return rows(
        ("flag", "default", ""),
        (
            (_flag(field.name), _default(field.default), _cell(docs[field.name]))
            for field in fields(config)
        ),
    )


def _flag(name: str) -> str:
    short = f", `{SHORT[name]}`" if name in SHORT else ""
    return f"`--{name.replace('_', '-')}`{short}"


def _default(value: Any) -> str:
    match value:
        case None | False | () | "":
            return ""
        case True:
            return "on"
        case _:
            return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def metrics() -> str:
    """Returns the metrics of a server whose engine has tiers, drafts and other engines."""
    metric = [Metric(name=f"milepost:{name}", value=0, **LABELLED.get(name, {})) for name in TEXTS]
    registry = RequestMetrics(
        "m",
        cache_config=dict,
        is_asleep=lambda: False,
        engine_pid=lambda: None,
        build={"version": "0"},
    )
    families = text_string_to_metric_families(registry.expose(metric).decode())
    ours = {family.name.partition(":")[2]: family for family in families if OURS in family.name}
    return rows(
        ("metric", "", "", "vLLM's name"),
        (_metric(name, family) for name, family in sorted(ours.items())),
    )


def _metric(name: str, family: Family) -> tuple[str, ...]:
    ending = "_total" if family.type == "counter" else ""
    theirs = f"`vllm:{NAMES[name]}{ending}`" if name in NAMES else ""
    return (f"`milepost:{name}{ending}`", family.type, _cell(family.documentation), theirs)


LABELLED: dict[str, dict[str, Any]] = {
    "iteration_tokens_total": {"kind": "histogram", "buckets": {"+Inf": 0}},
    **{
        name: {"kind": "gauge"}
        for name in TEXTS
        if name.endswith("_perc") or name.startswith("num_requests_") or name == "tier_items"
    },
}
"""What sets a metric of the engine apart from a plain counter."""

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"memory": lambda: memory()["summary"]},
    "docs/deployment.md": {"memory": lambda: memory()["table"]},
    "docs/flags.md": {
        "server": lambda: flags(ServerConfig),
        "engine": lambda: flags(EngineConfig),
    },
    "docs/gpus.md": {
        "products": lambda: products(PRODUCTS),
        "experts": lambda: products(EXPERTS),
        "attention": attention,
    },
    "docs/metrics.md": {"metrics": metrics},
    "docs/quantization.md": {
        "quantised products": lambda: products(PRODUCTS, (Fp8, Int8, Int4, Fp4, W4A4)),
        "quantised experts": lambda: products(EXPERTS, (Fp8, Int8, Int4, Fp4, W4A4)),
    },
}


def _around(table: str, place: re.Match[str]) -> str:
    return f"{place[1]}{table}\n{place[2]}"


def filled(page: str) -> str:
    """Returns a page as it should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in TABLES[page].items():
        place = re.compile(PLACE.format(re.escape(name)), re.DOTALL)
        table = make()
        text, count = place.subn(partial(_around, table), text)
        assert count == 1, f"{page} has {count} places for {name}"
    return text


def main(arguments: list[str]) -> int:
    stale = [page for page in TABLES if filled(page) != (ROOT / page).read_text(encoding="utf-8")]
    if "--check" in arguments:
        print(*(f"{page} has older tables: run python tools/tables.py" for page in stale), sep="\n")
        return bool(stale)
    for page in stale:
        (ROOT / page).write_text(filled(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
