"""Granite: up to 3.3 a list of calls that the end of the answer closes, and reasoning between two
sentences; from 4 on calls as Qwen3 writes them, under a name of their own."""

from __future__ import annotations

from milepost.server.parsing.json_calls import JsonCalls
from milepost.server.parsing.reasoning import ThinkTags

_THOUGHTS, _RESPONSE = "Here is my thought process:", "Here is my response:"

CALLS_OF = {"granitemoehybrid": "granite4"}
TOOL_CALLS = {
    "granite": JsonCalls(
        open="<|tool_call|>",
        close="",
        others=("<tool_call>",),
        is_list=True,
        layout=("", ""),
        signs=("<|tool_call|>",),
    ),
    "granite4": JsonCalls(signs=()),
}
REASONING = {
    "granite": ThinkTags(
        open=_THOUGHTS,
        close=_RESPONSE,
        others=(("Here's my thought process:", "Here's my response:"),),
        signs=(_THOUGHTS, _RESPONSE),
    )
}
