"""The parsers of one answer, chained: reasoning first, then tool calls in what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from milepost.server.config import ReasoningParser, ToolParser
from milepost.server.parsing.calls import Calls, HermesBody, NoCalls, XmlBody
from milepost.server.parsing.events import Content, Event
from milepost.server.parsing.reasoning import NoReasoning, ThinkTags


class Parser(Protocol):
    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class AnswerParser:
    """Text in, events out."""

    def __init__(self, reasoning: Parser, calls: Parser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Event]:
        return self._through_calls(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        return [*self._through_calls(self._reasoning.finish()), *self._calls.finish()]

    def _through_calls(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a model writes reasoning and calls."""

    has_reasoning: bool
    calls: ToolParser
    """Never `auto`."""

    def parser(self, *, tools: Sequence[Mapping[str, Any]] | None, is_open: bool) -> AnswerParser:
        """For one answer; without `tools`, calls stay text."""
        reasoning = ThinkTags(is_open=is_open) if self.has_reasoning else NoReasoning()
        return AnswerParser(reasoning, self._calls(tools))

    def _calls(self, tools: Sequence[Mapping[str, Any]] | None) -> Parser:
        if not tools or self.calls == "none":
            return NoCalls()
        if self.calls == "hermes":
            return Calls(HermesBody)
        schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}
        return Calls(lambda: XmlBody(schemas))


def find_format(
    template: str | None, *, calls: ToolParser = "auto", reasoning: ReasoningParser = "auto"
) -> Format:
    """Settle what is `auto` by what the chat template writes itself."""
    text = template if isinstance(template, str) else ""
    if calls == "auto":
        has_calls = "<tool_call>" in text
        calls = ("qwen3_xml" if "<function=" in text else "hermes") if has_calls else "none"
    has_reasoning = reasoning == "qwen3" or (reasoning == "auto" and "</think>" in text)
    return Format(has_reasoning=has_reasoning, calls=calls)


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt has opened the reasoning at its end."""
    return prompt.rstrip().endswith("<think>")


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
