"""Shows answers and cache reports to a person.

Answers go to standard output as they come, and nothing else does, so that they can be piped.
Headings, reports and errors go to standard error. The clock is injected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from milepost.cache import CacheReport
from milepost.cli.answers import CONTROLS, AnswerWriter, MarkdownSink, PlainSink
from milepost.engine.outputs import CompletionOutput, RequestOutput
from milepost.sampling_params import SamplingParams

_BAR_WIDTH = 24
_SNIPPET_LEN = 48
_OTHER_COLUMNS_WIDTH = 54
"""Width of the summary's columns besides the prompt, with the space between them."""
_LEAST_PROMPT_WIDTH = 12


def text_of(answer: CompletionOutput) -> str:
    """Returns the text to show for an answer with text."""
    return answer.text


def ids_of(answer: CompletionOutput) -> str:
    """Returns the token ids to show for an answer without text."""
    return "".join(f"{token_id} " for token_id in answer.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A request whose answers were shown."""

    label: str
    output: RequestOutput
    first_token_s: float
    total_s: float


@dataclass(slots=True, kw_only=True)
class Screen:
    """Shows answers and reports."""

    answers: TextIO
    reports: Console
    clock: Callable[[], float]
    is_markdown: bool = False
    """Whether answers are markdown that is rendered; else they are written as they are."""

    @contextmanager
    def waiting(self, message: str) -> Iterator[Callable[[], None]]:
        """Shows a spinner while something runs, on a terminal only. Call the result to end it
        early."""
        if not self.reports.is_terminal:
            yield lambda: None
            return
        with self.reports.status(Text(message, style="dim")) as status:
            yield status.stop

    def loading(self, model: str | None) -> None:
        """Says on a terminal which model is being loaded; progress bars follow below."""
        if self.reports.is_terminal:
            self.note(f"loading {model or 'the embedded model'}")

    def heading(self, number: int, total: int, label: str) -> None:
        """Announces one request of several."""
        title = Text.assemble((f"{number} of {total}", "bold"), f"  {snippet(label)}")
        self.reports.print()
        self.reports.rule(title, align="left", style="dim", characters="─")

    def show(
        self,
        label: str,
        updates: Iterable[RequestOutput],
        params: SamplingParams,
        visible: Callable[[CompletionOutput], str] = text_of,
    ) -> Shown:
        """Writes the answers of one request as they come, then its report.

        `visible` returns the shown text of an answer; it may only grow at the end.
        """
        start = self.clock()
        first_token_s: float | None = None
        final: RequestOutput | None = None
        writer = self._writer(visible)
        try:
            with self.waiting("waiting for the first token") as stop_waiting:
                for final in updates:
                    if first_token_s is None and any(answer.token_ids for answer in final.outputs):
                        first_token_s = self.clock() - start
                        stop_waiting()
                    writer.write(final)
        finally:
            writer.end()
        assert final is not None, "a request has one terminal output"
        total_s = self.clock() - start
        first_s = total_s if first_token_s is None else first_token_s
        shown = Shown(label=label, output=final, first_token_s=first_s, total_s=total_s)
        self._report(shown, params)
        return shown

    def _writer(self, visible: Callable[[CompletionOutput], str]) -> AnswerWriter:
        sink = MarkdownSink if self.is_markdown else PlainSink
        return AnswerWriter(
            lambda: sink(self.answers),
            visible,
            lambda number: self.reports.print(Text(f"answer {number}", style="dim")),
        )

    def summary(self, requests: list[Shown]) -> None:
        """Shows a table of several requests, and the cache's share of all prompt tokens."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
        bar_width = _BAR_WIDTH // 2
        table.add_column("#", justify="right", min_width=2)
        room = max(_LEAST_PROMPT_WIDTH, self.reports.width - _OTHER_COLUMNS_WIDTH)
        table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=room)
        for name, width in (
            ("tokens", 6),
            ("from cache", 10),
            ("", bar_width),
            ("first token", 11),
        ):
            table.add_column(name, justify="right" if name else "left", min_width=width)
        for number, shown in enumerate(requests, start=1):
            cached, tokens = _counts(shown)
            table.add_row(
                str(number),
                Text(snippet(shown.label)),
                f"{tokens}",
                f"{cached}",
                _bar(cached, tokens, bar_width),
                seconds(shown.first_token_s),
            )
        self.reports.print()
        self.reports.print(table)
        cached = sum(_counts(shown)[0] for shown in requests)
        tokens = sum(_counts(shown)[1] for shown in requests)
        share = f" ({cached / tokens:.0%})" if tokens else ""
        loaded = Counter[str]()
        for shown in requests:
            report = shown.output.cache_report
            loaded.update(report.loaded if report is not None else {})
        from_where = f", {CacheReport.origins(loaded)}" if loaded else ""
        line = f"{cached} of {tokens} prompt tokens{share} came from the cache{from_where}"
        self._line(Text(line))

    def hint(self, requests: list[Shown], page_size: int) -> None:
        """Explains once why prompts under one page got nothing from the cache."""
        reports = [shown.output.cache_report for shown in requests]
        hints = [report.hint(page_size) for report in reports if report is not None]
        for hint in list(filter(None, hints))[:1]:
            self.note(hint)

    def note(self, message: str) -> None:
        """Shows a message that is not part of an answer."""
        self._line(Text(message, style="dim"))

    def error(self, message: str) -> None:
        """Shows an error in one line."""
        self._line(Text.assemble(("milepost: ", "bold"), ("error: ", "bold red"), message))

    def _report(self, shown: Shown, params: SamplingParams) -> None:
        for answer in shown.output.outputs:
            if answer.logprobs:
                self.reports.print(_logprob_table(answer))
        num_tokens = sum(len(answer.token_ids) for answer in shown.output.outputs)
        ends = dict.fromkeys(ending(answer, params) for answer in shown.output.outputs)
        facts = [
            f"{num_tokens} token{'s' * (num_tokens != 1)} in {seconds(shown.total_s)}",
            f"the first after {seconds(shown.first_token_s)}",
            *ends,
        ]
        self._line(Text(" · ".join(facts), style="dim"))
        if shown.output.cache_report is not None:
            self._line(_cache_line(shown.output.cache_report))
        drafts = sum(answer.num_draft_tokens for answer in shown.output.outputs)
        if drafts:
            accepted = sum(answer.num_accepted_tokens for answer in shown.output.outputs)
            self._line(
                Text(f"{accepted} of {drafts} drafted tokens accepted ({accepted / drafts:.0%})")
            )

    def _line(self, text: Text) -> None:
        self.reports.print(text, soft_wrap=not self.reports.is_terminal)


@contextmanager
def counting_requests(
    reports: Console, total: int | None = None
) -> Iterator[Callable[[bool], None]]:
    """Shows on a terminal how many requests are finished, of `total` if given. Call the result once
    per request, with whether it was answered."""
    done = "{task.completed}" if total is None else "{task.completed} of {task.total}"
    bar = Progress(
        SpinnerColumn(),
        TextColumn(f"{done} requests, {{task.fields[failed]}} failed"),
        TimeElapsedColumn(),
        console=reports,
        transient=True,
        disable=not reports.is_terminal,
    )
    with bar:
        task, failed = bar.add_task("requests", total=total, failed=0), 0

        def advance(is_answered: bool) -> None:
            nonlocal failed
            failed += not is_answered
            bar.update(task, advance=1, failed=failed)

        yield advance


def snippet(text: str) -> str:
    """Returns the beginning of a text, on one line."""
    line = " ".join(text[: 4 * _SNIPPET_LEN].split()).translate(CONTROLS)
    return line if len(line) <= _SNIPPET_LEN else line[: _SNIPPET_LEN - 1] + "…"


def seconds(duration: float) -> str:
    """Formats a duration with as many digits as are meaningful."""
    if duration < 0.9995:
        return f"{duration * 1000:.0f} ms"
    return f"{duration:.1f} s" if duration < 100 else f"{duration:.0f} s"


def ending(answer: CompletionOutput, params: SamplingParams) -> str:
    """Says why an answer ended, and which flag changes that."""
    if answer.finish_reason == "length":
        if params.max_tokens is not None and len(answer.token_ids) >= params.max_tokens:
            return f"cut off by --max-tokens {params.max_tokens}"
        return "cut off by --max-model-len"
    if answer.finish_reason == "stop":
        if isinstance(answer.stop_reason, str):
            return f"ended by the stop string {answer.stop_reason!r}"
        return "complete" if answer.stop_reason is None else f"ended by token {answer.stop_reason}"
    return "aborted"


def _counts(shown: Shown) -> tuple[int, int]:
    """Returns the numbers of cached and of all prompt tokens."""
    report = shown.output.cache_report
    if report is not None:
        return report.reused, report.prompt_tokens
    return shown.output.num_cached_tokens, len(shown.output.prompt_token_ids)


def _cache_line(report: CacheReport) -> Text:
    line = _bar(report.reused, report.prompt_tokens)
    style = "green" if report.reused else "yellow"
    line.append(f" {report.head()}", style)
    if report.computed:
        line.append(f"; computed {report.computed}: {', '.join(report.reasons())}")
    return line


def _bar(part: int, whole: int, width: int = _BAR_WIDTH) -> Text:
    """Draws a bar that is full only for the whole, and empty only for nothing."""
    num_full = max(1, width * part // whole) if part else 0
    return Text.assemble(("━" * num_full, "green"), ("─" * (width - num_full), "dim"))


def _logprob_table(answer: CompletionOutput) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("token", "logprob", "rank", "likeliest"):
        table.add_column(name, justify="right" if name in ("logprob", "rank") else "left")
    for token_id, entry in zip(answer.token_ids, answer.logprobs or (), strict=False):
        chosen = entry[token_id]
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)
        others = "  ".join(
            f"{_token(i, logprob.decoded_token)} {logprob.logprob:.2f}" for i, logprob in best
        )
        shown = Text(_token(token_id, chosen.decoded_token))
        table.add_row(
            shown, f"{chosen.logprob:.3f}", str(chosen.rank or ""), Text(others, style="dim")
        )
    return table


def _token(token_id: int, text: str | None) -> str:
    return f"#{token_id}" if text is None else repr(text)
