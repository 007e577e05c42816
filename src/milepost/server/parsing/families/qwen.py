"""Qwen: JSON in tags up to Qwen3 (and in the many models that follow Hermes), a tag for each
parameter from Qwen3-Coder on, reasoning in <think>."""

from __future__ import annotations

from milepost.server.parsing.json_calls import JsonCalls
from milepost.server.parsing.reasoning import ThinkTags
from milepost.server.parsing.tagged_calls import TaggedCalls

CALLS_OF = {"falcon_h1": "hermes"}
"""Falcon's models write what Hermes' do."""
TOOL_CALLS = {
    "hermes": JsonCalls(),
    "qwen3_xml": TaggedCalls(),
    "qwen3_coder": TaggedCalls(),
}
REASONING = {"qwen3": ThinkTags()}
