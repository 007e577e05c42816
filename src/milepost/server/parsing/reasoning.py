"""Reasoning between <think> and </think>, as the Qwen family writes it.

Where the template's generation prompt opens the reasoning, the answer has only the closing tag.
Line breaks beside the tags belong to neither side.
"""

from __future__ import annotations

from milepost.server.parsing.events import Content, Event, Reasoning, held_back

OPEN, CLOSE = "<think>", "</think>"


class ThinkTags:
    """Splits one answer; `is_open` if the prompt ended inside the reasoning."""

    def __init__(self, *, is_open: bool) -> None:
        self._state = self._reason if is_open else self._begin
        self._buffer = ""
        self._has_text = False

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while True:
            state = self._state
            events += state(is_end=False)
            if self._state == state:
                return events

    def finish(self) -> list[Event]:
        return self._state(is_end=True)

    def _begin(self, *, is_end: bool) -> list[Event]:
        """Before anything but white space: reasoning may open here, and nowhere else."""
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._buffer = start[len(OPEN) :]
            self._state = self._reason
        elif is_end or not OPEN.startswith(start):
            self._state = self._pass
            return self._pass(is_end=is_end)
        return []

    def _reason(self, *, is_end: bool) -> list[Event]:
        end = self._buffer.find(CLOSE)
        if end >= 0:
            text, self._buffer = self._buffer[:end], self._buffer[end + len(CLOSE) :]
            self._state = self._after
            return self._reasoning(text.rstrip("\n"))
        if not self._has_text:
            self._buffer = self._buffer.lstrip("\n")
        num_held = 0 if is_end else held_back(self._buffer, (CLOSE,))
        cut = len(self._buffer) - num_held
        cut = len(self._buffer[:cut].rstrip("\n")) if not is_end else cut
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return self._reasoning(text)

    def _after(self, *, is_end: bool) -> list[Event]:
        """Line breaks between the reasoning and the content."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer or is_end:
            self._state = self._pass
            return self._pass(is_end=is_end)
        return []

    def _pass(self, *, is_end: bool) -> list[Event]:  # noqa: ARG002 - as the other states
        text, self._buffer = self._buffer, ""
        return [Content(text)] if text else []

    def _reasoning(self, text: str) -> list[Event]:
        if not self._has_text:
            text = text.lstrip("\n")
        self._has_text = self._has_text or bool(text)
        return [Reasoning(text)] if text else []


class NoReasoning:
    """All of an answer is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
