"""Writes answers as they grow: raw, or as markdown on a terminal.

Markdown is written block by block. A block that is complete is printed once and scrolls away with
the rest; the block that grows is drawn again in place, no taller than the terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TextIO

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.text import Text

from milepost.engine.outputs import CompletionOutput, RequestOutput

CONTROLS = {code: "\ufffd" for code in range(32) if chr(code) not in "\n\t"} | {127: "\ufffd"}
"""Control characters, replaced so that an answer cannot control the terminal."""
FRAMES_PER_S = 8
CODE_THEME = "ansi_dark"
"""Uses the terminal's own colours and no background."""
_MARGIN = 2
"""Columns left free at the right: a terminal writes `^C` there, which must not begin a line."""
OPENING, CLOSING = "<think>", "</think>"

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class Sink(Protocol):
    """Takes the text of one answer piece by piece."""

    def put(self, text: str) -> None:
        """Writes more text."""

    def end(self) -> None:
        """Writes what is left, and moves the cursor to the beginning of a line."""


class PlainSink:
    """Writes text as it is; on a terminal without control characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_terminal = file.isatty()
        self._last = "\n"

    def put(self, text: str) -> None:
        if text:
            self._write(text.translate(CONTROLS) if self._is_terminal else text)

    def end(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
        self._last = text[-1]


class MarkdownSink:
    """Writes markdown to a terminal; reasoning is dimmed and not rendered."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file, highlight=False)
        self._open = ""
        self._has_printed = False
        self._is_thinking = False
        self._live: Live | None = None

    def put(self, text: str) -> None:
        text = text.translate(CONTROLS)
        self._open = self._open + text if self._open or self._has_printed else text.lstrip()
        if not self._has_printed and self._open.startswith(OPENING):
            self._open = self._open.removeprefix(OPENING).lstrip()
            self._is_thinking = True
        if self._is_thinking and CLOSING in self._open:
            thought, _, rest = self._open.partition(CLOSING)
            self._is_thinking = False
            self._open = rest.lstrip()
            if thought.strip():
                self._print(_dim(thought.strip()), left=self._open)
        if "\n" in text and not self._is_thinking:
            *whole, last = blocks(self._open) or [""]
            for block in whole:
                self._print(rendered(block), left=last)
        if self._live is None and self._open.strip():
            self._live = Live(
                _Growing(self._tail),
                console=self._console,
                refresh_per_second=FRAMES_PER_S,
                transient=True,
            )
            self._live.start()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._is_thinking:
            self._print(_dim(self._open.strip()), left="")
        for block in blocks(self._open):
            self._print(rendered(block), left="")

    def _print(self, block: RenderableType, *, left: str) -> None:
        """Prints a block for good; `left` is what comes after it so far."""
        block = self._spaced(_Trimmed(block))
        self._open, self._has_printed = left, True
        self._console.print(block)

    def _spaced(self, block: RenderableType) -> RenderableType:
        return Group("", block) if self._has_printed else block

    def _body(self) -> RenderableType:
        return _dim(self._open.strip()) if self._is_thinking else rendered(self._open)

    def _tail(self) -> RenderableType:
        most = max(1, self._console.height - 2)
        return self._spaced(_Trimmed(self._body(), max_lines=most))


class _Growing:
    """Draws what `tail` returns at the time, so that a block just printed is not drawn again."""

    def __init__(self, tail: Callable[[], RenderableType]) -> None:
        self._tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield self._tail()


class _Trimmed:
    """Removes empty lines around a renderable and, with `max_lines`, all but its last lines."""

    def __init__(self, body: RenderableType, max_lines: int | None = None) -> None:
        self._body = body
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - _MARGIN)
        lines = console.render_lines(self._body, options.update(width=width, height=None))
        full = [place for place, line in enumerate(lines) if any(s.text.strip() for s in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        for line in lines[-self._max_lines :] if self._max_lines else lines:
            yield from line
            yield Segment.line()


class _PlainHeading(Heading):
    """A heading at the left, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        self.text.justify = "left"
        self.text.stylize("bold")
        yield self.text


class _Answer(Markdown):
    """Markdown whose HTML is text and whose lines break where the model breaks them."""

    elements = {**Markdown.elements, "heading_open": _PlainHeading}  # noqa: RUF012 - rich's own way

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = tokens


def rendered(text: str) -> RenderableType:
    """Returns markdown as a terminal shows it."""
    tokens = _PARSER.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return _Answer(tokens)


def blocks(text: str) -> list[str]:
    """Splits markdown into its blocks, such as a paragraph or a list. More text changes the last
    one alone."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    if not starts:
        return []
    lines = text.split("\n")
    starts = [0, *starts[1:]]
    ends = [*starts[1:], len(lines)]
    parts = ["\n".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [*(f"{part}\n" for part in parts[:-1]), parts[-1]]


def _dim(text: str) -> Text:
    return Text(text, style="dim")


class AnswerWriter:
    """Writes the cumulative answers of one request, one after the other, each as it grows."""

    def __init__(
        self,
        make_sink: Callable[[], Sink],
        visible: Callable[[CompletionOutput], str],
        announce: Callable[[int], None],
    ) -> None:
        self._make_sink = make_sink
        self._sink = make_sink()
        self._visible = visible
        self._announce = announce
        self._index = 0
        self._num_written = 0

    def write(self, output: RequestOutput) -> None:
        """Writes what has come since the last call."""
        while self._index < len(output.outputs):
            answer = output.outputs[self._index]
            text = self._visible(answer)
            self._sink.put(text[self._num_written :])
            self._num_written = len(text)
            if not answer.finished or self._index == len(output.outputs) - 1:
                return
            self.end()
            self._index += 1
            self._num_written = 0
            self._announce(self._index + 1)
            self._sink = self._make_sink()

    def end(self) -> None:
        """Ends the answer that is being written."""
        self._sink.end()
