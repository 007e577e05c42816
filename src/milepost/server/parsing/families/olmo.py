"""Olmo 3 and OLMo-Hybrid: calls in the manner of Python, one in a line; reasoning in <think>."""

from __future__ import annotations

from milepost.server.parsing.pythonic_calls import PythonicCalls
from milepost.server.parsing.reasoning import ThinkTags

CALLS_OF = {"olmo_hybrid": "olmo3"}
TOOL_CALLS = {
    "olmo3": PythonicCalls(
        open="<function_calls>",
        close="</function_calls>",
        layout=("\n", "\n", "\n"),
        signs=("<function_calls>",),
    )
}
REASONING = {"olmo3": ThinkTags(signs=())}
