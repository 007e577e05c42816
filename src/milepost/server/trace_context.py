"""W3C Trace Context: the trace that a request belongs to (https://www.w3.org/TR/trace-context).

Both headers come from outside: what is not exactly as specified is ignored, as the specification
has it, and then the request begins a trace of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
MAX_CHARS = 256
"""Longest traceparent: later versions may append to it."""
MAX_STATE_CHARS = 512
"""Longest tracestate: as much as everybody must pass on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A span of somebody else, in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the header, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parsed(traceparent: str, state: str = "") -> TraceContext | None:
    """Returns the context in a header's value; None for one that is not valid."""
    match = _PARENT.fullmatch(traceparent) if len(traceparent) <= MAX_CHARS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    is_known = version == "00" and rest is None
    is_later = version not in ("00", "ff")
    if not (is_known or is_later) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & 1, state=state)


def read(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """Returns the context of a request's headers; None without a valid one."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    states = b",".join(value for name, value in headers if name == b"tracestate")
    state = states.decode("latin-1") if len(states) <= MAX_STATE_CHARS else ""
    return parsed(parents[0].decode("latin-1"), state)
