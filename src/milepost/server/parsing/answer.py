"""Parses one answer from left to right: reasoning first, then content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milepost.sampling_params import ReasoningTokens
from milepost.server.parsing import lark
from milepost.server.parsing.events import CallReader, CallSite, Content, Event, FoundEvents
from milepost.server.parsing.formats import CALLS_OF, REASONING, TOOL_CALLS, ToolCalls, told_by
from milepost.server.parsing.reasoning import ThinkTags, lines
from milepost.server.parsing.tape import Reading, Tape


class TextParser:
    """Turns the text of an answer into events."""

    def __init__(
        self, reasoning: ThinkTags | None, calls: CallReader | None, *, is_open: bool
    ) -> None:
        self._tape = Tape()
        self._found = FoundEvents()
        self._is_plain = False
        """Whether everything that follows is content, passed on as it comes."""
        self._reading = self._read(reasoning, calls, is_open)
        next(self._reading)

    @property
    def work(self) -> int:
        """Number of characters looked at or moved so far."""
        return self._tape.work

    @property
    def has_ended_call(self) -> bool:
        return self._found.has_ended_call

    def feed(self, text: str) -> list[Event]:
        if self._is_plain:
            self._tape.work += len(text)
            return [Content(text)] if text else []
        if text:
            self._tape.put(text)
            self._reading.send(None)
        return self._found.take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Returns the events that were still held. Nothing may be fed afterwards.

        Unfinished arguments are closed, so that they are an object. With `is_cut` (the answer was
        cut off rather than ended by the model) they stay as they are.
        """
        self._tape.is_over = True
        self._tape.is_cut = self._found.is_cut = is_cut
        for _ in self._reading:
            raise AssertionError("a parser waits for text that cannot come")
        return self._found.take()

    def _read(
        self, reasoning: ThinkTags | None, calls: CallReader | None, is_open: bool
    ) -> Reading[None]:
        tape, found = self._tape, self._found
        yield
        late: tuple[str, ...] = ()
        if reasoning is not None and (
            yield from reasoning.read(tape, found, calls, is_open=is_open)
        ):
            late = reasoning.closes
        if calls is not None:
            yield from _read_calls(tape, found, calls, late)
        else:
            found.plain(tape.rest())
            if not tape.is_over:
                self._is_plain = True
                yield
        found.end()


def _read_calls(
    tape: Tape, found: FoundEvents, calls: CallReader, late: tuple[str, ...]
) -> Reading[None]:
    """Reads content and calls. `late` holds the closing tags of a reasoning that a call ended: one
    of them may still come."""
    is_call = bool(late)
    while True:
        closes = (calls.close,) if is_call and calls.close else ()
        tag = yield from tape.until(found.content, *calls.starts, *closes, *late)
        if not tag:
            return
        if tag in calls.starts:
            is_call = yield from calls.read(tag, CallSite(tape, found, found.content))
        elif tag in late:
            late = ()
            yield from lines(tape)
        else:
            found.end_call()
            is_call = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Names the formats of reasoning and calls that a model writes; each may be "none"."""

    reasoning: str
    calls: str

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning != "none"

    @property
    def thinking(self) -> ThinkTags | None:
        return REASONING.get(self.reasoning)

    @property
    def tool_calls(self) -> ToolCalls | None:
        return TOOL_CALLS.get(self.calls)

    def is_open(self, prompt: str, begun: str = "") -> bool:
        """Returns whether the reasoning is open at the end of a prompt, or in what has `begun` of
        the answer there."""
        return self.thinking is not None and self.thinking.is_open_in(prompt, begun)

    def parser(self, *, tools: lark.Tools | None, is_open: bool) -> TextParser:
        """Returns the parser for one answer. Without `tools`, calls stay text."""
        return self.parsers(1, tools=tools, is_open=is_open)[0]

    def parsers(self, num: int, *, tools: lark.Tools | None, is_open: bool) -> list[TextParser]:
        """Returns the parsers for several answers, which share what is known of the tools."""
        form = self.tool_calls
        calls = form.reader(tools) if form is not None and tools else None
        return [TextParser(self.thinking, calls, is_open=is_open) for _ in range(num)]


def find_format(
    template: object, *, calls: str = "auto", reasoning: str = "auto", model_type: str = ""
) -> AnswerFormat:
    """Replaces `auto` by the formats that the chat template itself writes. If a template accepts
    tools but shows no format of calls, the model's type decides."""
    text = template if isinstance(template, str) else ""
    if calls == "auto":
        calls = told_by(text, TOOL_CALLS)
        if calls == "none" and "tools" in text:
            calls = CALLS_OF.get(model_type, "none")
    return AnswerFormat(
        calls=calls,
        reasoning=told_by(text, REASONING) if reasoning == "auto" else reasoning,
    )


def special_tags(format_: AnswerFormat, tokenizer: Any) -> set[str]:
    """Returns "calls" and "reasoning" for those formats that have a tag which the tokenizer leaves
    out of text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special}
    calls, thinking = format_.tool_calls, format_.thinking
    tags_of = {
        "calls": () if calls is None else (calls.open, calls.close),
        "reasoning": () if thinking is None else (thinking.open, thinking.close),
    }
    return {kind for kind, its in tags_of.items() if special.intersection(its)}


def reasoning_tokens(format_: AnswerFormat, tokenizer: Any) -> ReasoningTokens | None:
    """Returns the tokens around the reasoning, or None unless it ends with exactly one token."""
    if format_.thinking is None or tokenizer is None:
        return None
    added = tokenizer.get_added_vocab()
    closes = added.get(format_.thinking.close)
    if closes is None:
        return None
    return ReasoningTokens(closes=closes, opens=added.get(format_.thinking.open))
