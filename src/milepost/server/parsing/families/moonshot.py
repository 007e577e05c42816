"""Moonshot's Kimi K2 and Kimi Linear: calls in a section of their own, reasoning in <think>."""

from __future__ import annotations

from milepost.server.parsing.named_calls import NamedCalls
from milepost.server.parsing.reasoning import ThinkTags

CALLS_OF = {"kimi_linear": "kimi_k2"}
TOOL_CALLS = {
    "kimi_k2": NamedCalls(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        arguments="<|tool_call_argument_begin|>",
        prefix="functions.",
        signs=("<|tool_calls_section_begin|>",),
    )
}
REASONING = {"kimi_k2": ThinkTags(signs=())}
