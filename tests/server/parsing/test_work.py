"""Reading costs the same for each character, however long the text and small the pieces."""

import pytest

from milepost.server.parsing.answer import AnswerFormat
from tests.server.parsing.written import tool

KINDS = {"s": "string", "l": "array", "n": ["string", "null"]}
TOOLS = [tool({"properties": {name: {"type": kind} for name, kind in KINDS.items()}})]
HEAD = "<tool_call>\n<function=f>\n<parameter="
TEXTS = {
    "content": ("", "a b\n"),
    "white space": ("", " "),
    "beginnings of tags": ("", "<tool_cal"),
    "empty calls": ("", "<tool_call>"),
    "reasoning": ("<think>", "hm\n"),
    "lines in reasoning": ("<think>", "\n"),
    "beginnings of its end": ("<think>", "</"),
    "a string": (f"{HEAD}s>\n", "line\n"),
    "a string's tags": (f"{HEAD}s>\n", "</parameter>\n"),
    "a string's spaces": (f"{HEAD}s>\nx</parameter>", " "),
    "a list": (f"{HEAD}l>\n[", '"a\\"", '),
    "an optional string": (f"{HEAD}n>\n", "\n"),
    "a function's name": ("<tool_call><function=", "x"),
    "a parameter's name": (HEAD, "x"),
    "between parameters": ("<tool_call><function=f>", "\n<"),
    "arguments": ('<tool_call>{"name": "f", "arguments": {"s": "', "x\\n"),
    "depth": ('<tool_call>{"name": "f", "arguments": ', "{["),
    "a name": ('<tool_call>{"name": "', "x"),
    "a key": ('<tool_call>{"', "x"),
    "a section": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "an id": ("<|tool_call_begin|>", "x"),
    "its arguments": (
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "',
        "x\\n",
    ),
    "calls": ("<|tool_call_start|>[", "f(), "),
    "a keyword's string": ("<|tool_call_start|>[f(s='", "x\\' "),
    "a keyword's list": ("<|tool_call_start|>[f(s=", "['',"),
    "keywords": ("<|tool_call_start|>[f(", "a=1, "),
    "scalars": ('<tool_call>{"name": "f", "arguments": {"l": [', "1 "),
    "brackets that do not fit": ('<tool_call>{"name": "f", "arguments": {"l": [', "[}"),
    "keys in keys": ('<tool_call>{"name": "f", "arguments": {"l": ', "{(1, 2): "),
    "tags in an argument": ('<tool_call>{"name": "f", "arguments": {"l": [', "<"),
    "parameters that are not closed": (f"{HEAD}s>\nx", "\n<parameter=l>\n"),
    "calls that are not closed": ("", "<tool_call><function=f><parameter=s>\nx"),
    "values without keywords": ("<|tool_call_start|>[f(", "'a', "),
    "strings in a row": ("<|tool_call_start|>[f(s=", "'a' "),
    "calls in reasoning": ("<think>", '<tool_call>{"name": "h"'),
    "tokens in reasoning": ("<think>", "<|tool_call_begin|>"),
    "arguments before the name": ('<tool_call>{"arguments": {"s": "', "x "),
}


def work(form, head, piece, length):
    text = head + piece * (length // len(piece))
    parser = form.parser(tools=TOOLS, is_open=False)
    for character in text:
        parser.feed(character)
    parser.finish()
    return parser.work / len(text)


@pytest.mark.parametrize("calls", ["hermes", "qwen3_xml", "ling3", "kimi_k2", "lfm2"])
@pytest.mark.parametrize("name", TEXTS)
def test_work_is_linear(calls, name):
    form = AnswerFormat(reasoning="qwen3", calls=calls)
    short, long = (work(form, *TEXTS[name], length) for length in (300, 3000))
    assert long < 80
    assert long < 1.5 * short
