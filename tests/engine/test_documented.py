"""The README's first example, as it is printed there."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_prints_what_the_readme_says(capsys):
    text = README.read_text()
    example, printed = re.findall(
        r"^```python\n(.*?)^```\n\nIt prints\n\n```\n(.*?)^```", text, re.S | re.M
    )[0]
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    for line, said in zip(lines, printed.splitlines(), strict=True):
        assert line.startswith(said.removesuffix(" ..."))
        assert said.endswith("...") or line == said
