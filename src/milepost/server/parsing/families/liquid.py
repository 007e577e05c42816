"""Liquid's LFM2: a list of calls in the manner of Python. Its templates show how tools are listed
and results given, and leave out how they are called."""

from __future__ import annotations

from milepost.server.parsing.pythonic_calls import PythonicCalls

CALLS_OF = dict.fromkeys(("lfm2", "lfm2_moe"), "lfm2")
TOOL_CALLS = {
    "lfm2": PythonicCalls(
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        layout=("[", ", ", "]"),
        signs=("<|tool_call_start|>",),
    )
}
