"""Every answer is parsed in one piece, by single characters, and in random pieces: the same."""

import json
import random

import pytest

from milepost.server.parsing.answer import Format, ends_in_reasoning, find_format
from milepost.server.parsing.events import CallArguments, CallStart, Content, Reasoning

HERMES = Format(has_reasoning=True, calls="hermes")
XML = Format(has_reasoning=True, calls="qwen3_xml")
PLAIN = Format(has_reasoning=False, calls="none")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "s": {"type": "string"},
                    "l": {"type": "array"},
                    "b": {"type": "boolean"},
                },
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}\\"{"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx\n\ny\n"
    "</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>"
)


def parsed(form, pieces, *, is_open=False, tools=TOOLS):
    """(reasoning, content, [(name, arguments)])"""
    parser = form.parser(tools=tools, is_open=is_open)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
    return reasoning, content, calls


def cuts(text):
    yield [text]
    yield list(text)
    for seed in range(20):
        pick = random.Random(seed)
        places = sorted(pick.sample(range(len(text) + 1), min(len(text), pick.randint(1, 6))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def agreed(form, text, **options):
    found = [parsed(form, pieces, **options) for pieces in cuts(text)]
    assert all(other == found[0] for other in found), found
    return found[0]


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("plain text", False, "", "plain text"),
        ("<think>\nhm\n\nso\n</think>\n\nyes", False, "hm\n\nso", "yes"),
        ("\n<think>hm</think>yes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("hm, cut", True, "hm, cut", ""),
        ("</think>\n\nyes", True, "", "yes"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<thin", False, "", "<thin"),
        ("hm </thin", True, "hm </thin", ""),
        ("", False, "", ""),
        ("  indented", False, "", "  indented"),
    ],
)
def test_reasoning(text, is_open, reasoning, content):
    assert agreed(HERMES, text, is_open=is_open) == (reasoning, content, [])


def test_one_call():
    assert agreed(HERMES, CALL) == ("", "", [["f", '{"a": 1, "s": "}\\"{"}']])
    reasoning, content, calls = agreed(XML, XML_CALL)
    assert (reasoning, content, calls[0][0]) == ("", "", "f")
    assert json.loads(calls[0][1]) == {"a": 1, "s": "x\n\ny", "b": True}


@pytest.mark.parametrize(("form", "call"), [(HERMES, CALL), (XML, XML_CALL)])
def test_reasoning_content_and_two_calls(form, call):
    text = f"<think>\nhm\n</think>\n\nlet me see\n\n{call}\n{call}\n"
    reasoning, content, calls = agreed(form, text)
    assert (reasoning, content) == ("hm", "let me see")
    assert [name for name, _ in calls] == ["f", "f"]
    assert calls[0] == calls[1]
    json.loads(calls[0][1])


def test_arguments_stream_before_the_call_is_whole():
    parser = HERMES.parser(tools=TOOLS, is_open=False)
    parser.feed('<tool_call>\n{"name": "f", "arguments": {')
    assert parser.feed('"a": 12') == [CallArguments('"a": 12')]
    parser = XML.parser(tools=TOOLS, is_open=False)
    assert parser.feed("<tool_call>\n<function=f>\n<param") == [CallStart("f")]


def test_arguments_before_the_name():
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert agreed(HERMES, text) == ("", "", [["f", '{"a": 1}']])


def test_a_call_without_arguments():
    assert agreed(HERMES, '<tool_call>{"name": "f"}</tool_call>')[2] == [["f", "{}"]]
    text = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    assert agreed(XML, text)[2] == [["f", "{}"]]


@pytest.mark.parametrize("form", [HERMES, XML])
@pytest.mark.parametrize("text", ["<tool_call>nonsense</tool_call>", "<tool_call>non"])
def test_what_is_no_call_stays_content(form, text):
    assert agreed(form, text) == ("", text, [])


def test_a_call_that_is_cut_off_keeps_what_came():
    _, _, calls = agreed(HERMES, CALL[:-30])
    assert calls[0][0] == "f"
    assert CALL[:-30].endswith(calls[0][1])
    _, _, calls = agreed(XML, XML_CALL[:60])
    assert calls == [["f", '{"a": 1']] or calls == [["f", ""]]


def test_without_tools_calls_stay_text():
    assert agreed(HERMES, CALL, tools=None) == ("", CALL, [])
    assert agreed(PLAIN, CALL) == ("", CALL, [])


def test_xml_values_follow_the_schema():
    text = XML_CALL.replace("\n1\n", "\nnot a number\n")
    assert json.loads(agreed(XML, text)[2][0][1])["a"] == "not a number"
    text = XML_CALL.replace("=a>\n1", "=l>\n[1, 2]")
    assert json.loads(agreed(XML, text)[2][0][1])["l"] == [1, 2]
    text = XML_CALL.replace("x\n\ny", "17")
    assert json.loads(agreed(XML, text)[2][0][1])["s"] == "17"


def test_format_is_read_off_the_template():
    assert find_format(None) == PLAIN
    assert find_format("<tool_call> </think>") == HERMES
    assert find_format("<tool_call><function= </think>") == XML
    assert find_format("<tool_call></think>", calls="none", reasoning="none") == PLAIN


def test_open_reasoning_is_seen():
    assert ends_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not ends_in_reasoning("<think>\n\n</think>\n\n")
    assert not ends_in_reasoning("<think> a")
