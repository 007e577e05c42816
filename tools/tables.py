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
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from milepost.cli.flags import SHORT, field_docs
from milepost.config import EngineConfig
from milepost.engine.metrics import TEXTS, Metric
from milepost.kernels.attention import describe as attention
from milepost.kernels.products import describe
from milepost.kernels.products.expert_table import EXPERTS
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
        "products": lambda: describe.to_markdown(PRODUCTS),
        "experts": lambda: describe.to_markdown(EXPERTS),
        "attention": attention.to_markdown,
    },
    "docs/metrics.md": {"metrics": metrics},
    "docs/quantization.md": {
        "quantised products": lambda: describe.to_markdown(PRODUCTS, describe.QUANTISED),
        "quantised experts": lambda: describe.to_markdown(EXPERTS, describe.QUANTISED),
    },
}


def filled(page: str) -> str:
    """Returns a page as it should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in TABLES[page].items():
        place = re.compile(PLACE.format(re.escape(name)), re.DOTALL)
        table = make()
        text, count = place.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
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
