"""Markdown on a terminal: words wrap, blocks are printed once, nothing controls the terminal."""

import io
import re

import pytest
from rich.console import Console

from milepost.cli.answers import MarkdownSink, blocks, rendered


class Terminal(io.StringIO):
    def isatty(self):
        return True


SAMPLE = """# Title

A paragraph that is long enough that it has to wrap on a terminal of forty columns.
Its second line.

- one
- two

```python
def f():
    return 1
```

| a | b |
|---|---|
| 1 | 2 |

The end.
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")


def screen(text):
    """The lines that stay on a terminal, without colours. A live region takes its own back."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b") and piece != "\r":
            lines[row] += piece
    return "\n".join(line.rstrip() for line in lines).rstrip()


def written(*pieces):
    terminal = Terminal()
    sink = MarkdownSink(terminal)
    for piece in pieces:
        sink.put(piece)
    sink.end()
    return screen(terminal.getvalue())


def whole(text):
    console = Console(file=io.StringIO(), width=38, force_terminal=True)
    console.print(rendered(text))
    return screen(console.file.getvalue())


def test_an_answer_that_grows_ends_as_one_that_came_at_once():
    assert written(*SAMPLE) == written(SAMPLE)
    squeezed = [line for line in written(*SAMPLE).splitlines() if line]
    assert squeezed == [line for line in whole(SAMPLE).splitlines() if line]


def test_words_wrap_and_lines_break_where_the_model_breaks_them():
    lines = written(SAMPLE).splitlines()
    assert lines[0] == "Title"
    assert "A paragraph that is long enough that" in lines
    assert "Its second line." in lines
    assert all(len(line) <= 38 for line in lines)
    assert "    return 1" in written(SAMPLE)


def test_only_the_block_that_grows_can_change():
    assert blocks("one\n\ntwo") == ["one\n\n", "two"]
    assert blocks("one\ntwo") == ["one\ntwo"]
    assert blocks("\n- a\n\n- b\n") == ["\n- a\n\n- b\n"]
    assert blocks("x\n\n```\na\n\nb\n") == ["x\n\n", "```\na\n\nb\n"]
    assert blocks("") == blocks("\n") == []
    assert "".join(blocks(SAMPLE)) == SAMPLE


def test_html_is_text_and_no_control_character_arrives():
    said = written("a List<int> and <script>x</script>\n\n<div>b</div>\x1b[2J\x07")
    assert "List<int> and <script>x</script>" in said
    assert "<div>b</div>\ufffd[2J\ufffd" in said


@pytest.mark.parametrize("pieces", [["<think>\nhm\n\nso\n</think>\n\n**Yes**"], None])
def test_reasoning_is_plain_and_dimmed(pieces):
    pieces = pieces or list("<think>\nhm\n\nso\n</think>\n\n**Yes**")
    terminal = Terminal()
    sink = MarkdownSink(terminal)
    for piece in pieces:
        sink.put(piece)
    sink.end()
    assert screen(terminal.getvalue()) == "hm\n\nso\n\nYes"
    assert "\x1b[2mhm" in terminal.getvalue()


def test_a_block_taller_than_the_terminal_is_whole_in_the_end():
    code = "```\n" + "".join(f"line {n}\n" for n in range(50)) + "```\n"
    said = written(*code.splitlines(keepends=True))
    assert [line.strip() for line in said.splitlines() if line.strip()] == [
        f"line {n}" for n in range(50)
    ]


def test_nothing_is_written_for_nothing():
    assert written("", "\n") == ""
