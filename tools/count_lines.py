"""Counts lines of code: no blank lines, comments, docstrings and other strings that stand alone.

    python tools/count_lines.py src/milepost/cache

A line for each file, and the sum. A statement over several lines counts each of them.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path

NO_CODE = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def num_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
    counts = {path: num_lines(path) for path in paths}
    for path, count in counts.items():
        print(f"{count:6} {path}")
    print(f"{sum(counts.values()):6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
