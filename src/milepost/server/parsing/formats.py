"""The formats in which models write tool calls and reasoning, family by family.

To add a family, add its entries to the tables: an opening and closing tag, and the `signs` that its
chat templates contain, by which `auto` finds the format. Keys become values of --tool-call-parser
and --reasoning-parser: use vLLM's names. A layout that no class describes needs a class of its own
with the methods of `ToolCalls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from milepost.server.parsing import lark
from milepost.server.parsing.events import CallReader
from milepost.server.parsing.json_calls import JsonCalls
from milepost.server.parsing.named_calls import NamedCalls
from milepost.server.parsing.pythonic_calls import PythonicCalls
from milepost.server.parsing.reasoning import ThinkTags
from milepost.server.parsing.tagged_calls import TaggedCalls


class ToolCalls(Protocol):
    """A format of tool calls."""

    @property
    def open(self) -> str: ...
    @property
    def close(self) -> str: ...
    @property
    def signs(self) -> Sequence[str]: ...

    def reader(self, tools: lark.Tools) -> CallReader: ...

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> Sequence[str]:
        """Returns Lark rules; the rule `calls` matches one call of these tools, or several."""


_THOUGHTS, _RESPONSE = "Here is my thought process:", "Here is my response:"

TOOL_CALLS: Mapping[str, ToolCalls] = {
    # Granite up to 3.3: a list that the end of the answer closes. From 4 on it writes Qwen3's form.
    "granite": JsonCalls(
        open="<|tool_call|>",
        close="",
        others=("<tool_call>",),
        is_list=True,
        layout=("", ""),
        signs=("<|tool_call|>",),
    ),
    "granite4": JsonCalls(signs=()),
    # Liquid's templates show how tools are listed and results returned, but not the calls.
    "lfm2": PythonicCalls(
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        layout=("[", ", ", "]"),
        signs=("<|tool_call_start|>",),
    ),
    # Moonshot's Kimi K2 and Kimi Linear.
    "kimi_k2": NamedCalls(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        arguments="<|tool_call_argument_begin|>",
        prefix="functions.",
        signs=("<|tool_calls_section_begin|>",),
    ),
    # Ling 3.0, which writes calls as GLM-4.5 and its successors do.
    "ling3": TaggedCalls(
        function=("", "", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        names=(r"[^<\n{]*", r"[^<]*"),
        line="",
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    ),
    # Nemotron Nano. From Nemotron 3 on it writes Qwen3-Coder's form.
    "nemotron_json": JsonCalls(
        open="<TOOLCALL>",
        close="</TOOLCALL>",
        is_list=True,
        layout=("", ""),
        signs=("<TOOLCALL>",),
    ),
    # Olmo 3 and OLMo-Hybrid: one call per line.
    "olmo3": PythonicCalls(
        open="<function_calls>",
        close="</function_calls>",
        layout=("\n", "\n", "\n"),
        signs=("<function_calls>",),
    ),
    # Qwen up to Qwen3, and the many models that follow Hermes; then Qwen3-Coder and its successors.
    "hermes": JsonCalls(),
    "qwen3_xml": TaggedCalls(),
    "qwen3_coder": TaggedCalls(),
}

REASONING: Mapping[str, ThinkTags] = {
    # DeepSeek-R1 and models trained on its answers: the opening tag stands in the prompt, in the
    # answer, or nowhere.
    "deepseek_r1": ThinkTags(is_always_open=True, signs=()),
    "granite": ThinkTags(
        open=_THOUGHTS,
        close=_RESPONSE,
        others=(("Here's my thought process:", "Here's my response:"),),
        signs=(_THOUGHTS, _RESPONSE),
    ),
    "kimi_k2": ThinkTags(signs=()),
    "ling3": ThinkTags(signs=()),
    "nemotron_v3": ThinkTags(signs=()),
    "olmo3": ThinkTags(signs=()),
    "qwen3": ThinkTags(),
}

CALLS_OF: Mapping[str, str] = {
    "granitemoehybrid": "granite4",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "kimi_linear": "kimi_k2",
    "olmo_hybrid": "olmo3",
    "falcon_h1": "hermes",
}
"""Maps a `model_type` to its format, for models whose templates accept tools but show no format."""


class _Signed(Protocol):
    @property
    def signs(self) -> Sequence[str]: ...


S = TypeVar("S", bound=_Signed)


def told_by(template: str, formats: Mapping[str, S]) -> str:
    """Returns the format whose signs are all in a chat template; of several, the one with the
    longest signs, and "none" if there is none. Formats without signs have to be named."""
    signed = [
        name
        for name, its in formats.items()
        if its.signs and all(sign in template for sign in its.signs)
    ]
    return max(signed, key=lambda name: len("".join(formats[name].signs)), default="none")
