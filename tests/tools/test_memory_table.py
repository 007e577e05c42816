"""The table of docs/deployment.md is what the tool prints."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "tools" / "memory_table.py"


def test_rows_of_the_documentation_are_those_of_the_tool():
    """Two of them: each takes a second."""
    spec = importlib.util.spec_from_file_location("memory_table", PATH)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.CONFIGS = {name: tool.CONFIGS[name] for name in ("Bamba-9B",)}
    text = (ROOT / "docs" / "deployment.md").read_text()
    rows = tool.table()
    assert len(rows) == 4
    assert all(f"{row}\n" in text for row in rows)
