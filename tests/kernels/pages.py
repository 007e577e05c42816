"""The tables of kernels in the pages. `python -m tests.kernels.pages` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from milepost.kernels.attention import describe as attention
from milepost.kernels.products import describe
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.table import PRODUCTS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "gpus.md": {
        "products": describe.to_markdown(PRODUCTS),
        "experts": describe.to_markdown(EXPERTS),
        "attention": attention.to_markdown(),
    },
    "quantization.md": {
        "quantised products": describe.to_markdown(PRODUCTS, describe.QUANTISED),
        "quantised experts": describe.to_markdown(EXPERTS, describe.QUANTISED),
    },
}


def filled(page: str) -> str:
    """The page as it should be."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, table in PAGES[page].items():
        place = rf"(<!-- {name} -->\n).*?\n?(<!-- end -->)"
        text, count = re.subn(place, rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL)
        assert count == 1, f"{page} has {count} places for {name}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(filled(page), encoding="utf-8")
