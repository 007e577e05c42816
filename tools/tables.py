"""Tables of the documentation that are made from the code.

    python tools/tables.py              writes them into the pages
    python tools/tables.py --check      fails if a page has an older one

A table's place is between `<!-- made by tools/tables.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from milepost.cli.flags import SHORT, field_docs
from milepost.config import EngineConfig
from milepost.kernels.attention import describe as attention
from milepost.kernels.products import describe
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.table import PRODUCTS
from milepost.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
PLACE = r"(<!-- made by tools/tables\.py: {} -->\n).*?\n?(<!-- end -->)"


@functools.cache
def memory() -> ModuleType:
    """Returns `memory_table.py`, whose figures take seconds."""
    path = Path(__file__).with_name("memory_table.py")
    spec = importlib.util.spec_from_file_location("memory_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


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


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"memory": lambda: str(memory().summary())},
    "docs/deployment.md": {"memory": lambda: str(memory().table())},
    "docs/flags.md": {
        "server": lambda: flags(ServerConfig),
        "engine": lambda: flags(EngineConfig),
    },
    "docs/gpus.md": {
        "products": lambda: describe.to_markdown(PRODUCTS),
        "experts": lambda: describe.to_markdown(EXPERTS),
        "attention": attention.to_markdown,
    },
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
