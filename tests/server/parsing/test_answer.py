"""Every answer is parsed in one piece, by single characters, and in random pieces: the same."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.server.parsing import lark
from milepost.server.parsing.answer import AnswerFormat, TextParser, find_format
from milepost.server.parsing.events import CallArguments, CallStart
from milepost.server.parsing.formats import CALLS_OF, TOOL_CALLS
from milepost.server.parsing.json_calls import JsonCalls
from tests.server.parsing.written import (
    Grammar,
    hermes,
    kimi,
    lfm2,
    olmo3,
    parsed,
    tool,
    xml,
)

HERMES = AnswerFormat(reasoning="qwen3", calls="hermes")
XML = AnswerFormat(reasoning="qwen3", calls="qwen3_xml")
PLAIN = AnswerFormat(reasoning="none", calls="none")
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


def cuts(text):
    yield [text]
    yield list(text)
    for seed in range(20):
        pick = random.Random(seed)
        places = sorted(pick.sample(range(len(text) + 1), min(len(text), pick.randint(1, 6))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def agreed(form, text, **options):
    options = {"tools": TOOLS, **options}
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
    assert parser.feed('"a": 12') == [CallArguments('"a": ')]
    assert parser.feed(', "s": "x') == [CallArguments('12, "s": "x')]
    assert parser.feed("y") == [CallArguments("y")]
    parser = XML.parser(tools=TOOLS, is_open=False)
    assert parser.feed("<tool_call>\n<function=f>\n<param") == []
    assert parser.feed("eter=s>\nx") == [CallStart("f"), CallArguments('{"s": "x')]
    assert parser.feed("y") == [CallArguments("y")]


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
    _, _, calls = agreed(HERMES, CALL[:-30], is_cut=True)
    assert calls[0][0] == "f"
    assert CALL[:-30].endswith(calls[0][1])
    _, _, calls = agreed(XML, XML_CALL[:60], is_cut=True)
    assert calls == [["f", '{"a": 1']]
    _, _, calls = agreed(XML, XML_CALL[:60])
    assert calls == [["f", '{"a": 1}']]


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


def test_reasoning_that_no_tag_opens():
    form = AnswerFormat(calls="none", reasoning="deepseek_r1")
    assert form.is_open("<|im_start|>assistant\n")
    for text in ("<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"):
        for pieces in ([text], list(text)):
            assert parsed(form, pieces, None, is_open=True) == ("hm", "yes", [])


def test_a_list_of_calls():
    form = AnswerFormat(calls="nemotron_json", reasoning="none")
    assert find_format("<TOOLCALL></think>") == AnswerFormat(
        calls="nemotron_json", reasoning="qwen3"
    )
    tools = [tool({"type": "object"}, name) for name in "fg"]
    calls = [{"name": name, "arguments": {"a": [1, "</TOOLCALL>"]}} for name in "fg"]
    text = f"<TOOLCALL>{json.dumps(calls)}</TOOLCALL>"
    assert Grammar("nemotron_json", tools, is_single=False).accepts(text)
    assert not Grammar("nemotron_json", tools).accepts(text)
    arguments = json.dumps(calls[0]["arguments"])
    for pieces in ([f"a {text}"], ["a ", *text]):
        assert parsed(form, pieces, tools) == ("", "a", [["f", arguments], ["g", arguments]])


def test_open_reasoning_is_seen():
    assert HERMES.is_open("<|im_start|>assistant\n<think>\n")
    assert not HERMES.is_open("<think>\n\n</think>\n\n")
    assert not HERMES.is_open("<think> a")


@pytest.mark.parametrize(
    ("begun", "is_open"),
    [
        ("<think>\nhm", True),
        ("<think>\nhm\n</think>\n\nye", False),
        ("<think>a</think><think>b", True),
        ("ye", None),
    ],
)
def test_an_answer_that_is_begun_says_whether_its_reasoning_is_open(begun, is_open):
    always = AnswerFormat(calls="none", reasoning="deepseek_r1")
    prompt = f"<|im_start|>assistant\n{begun}"
    assert HERMES.is_open(prompt, begun) == bool(is_open)
    assert always.is_open(prompt, begun) == (is_open is not False)


# --- what models do besides -----------------------------------------------------------------------

TAGS = '</tool_call> "}} <tool_call> </parameter> x </function> <parameter=q> </parameter>'


@pytest.mark.parametrize(("form", "write"), [(HERMES, hermes), (XML, xml)])
def test_tags_inside_a_string_belong_to_it(form, write):
    text = write("f", {"s": TAGS, "a": 1}) + "\nand more"
    _, content, [[_, arguments]] = agreed(form, text)
    assert (json.loads(arguments), content) == ({"s": TAGS, "a": 1}, "and more")


def test_tags_inside_json_of_the_tagged_form():
    value = ["</parameter>\n</function>\n</tool_call>", {"k": "</parameter><parameter=a>"}]
    _, _, [[_, arguments]] = agreed(XML, xml("f", {"l": value, "a": 1}))
    assert json.loads(arguments) == {"l": value, "a": 1}


@pytest.mark.parametrize(("form", "call"), [(HERMES, CALL), (XML, XML_CALL)])
def test_content_behind_a_call_keeps_its_spaces(form, call):
    text = f"one two\n{call}\nthree  four\n\nfive {call} "
    _, content, calls = agreed(form, text)
    assert (content, len(calls)) == ("one twothree  four\n\nfive", 2)


def test_a_string_that_is_never_closed_ends_with_its_call():
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"s": "x}}}}\n</tool_call>\n{CALL}'
    _, content, calls = agreed(HERMES, text)
    assert [arguments for _, arguments in calls] == ['{"s": "x}}"}', '{"a": 1, "s": "}\\"{"}']
    assert content == ""


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"id": 1, "name": "f", "arguments": "{}"}{"name": "g", "arguments": null}',
    ],
)
def test_json_calls_run_together(text):
    assert agreed(HERMES, text) == ("", "", [["f", "{}"], ["g", "{}"]])


def test_tagged_calls_run_together_and_without_their_first_tag():
    call = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    text = f"so\n{call}\n</tool_call>\n<tool_call>{call}<tool_call>{call} end"
    assert agreed(XML, text) == ("", "soend", [["f", '{"a": 1}']] * 3)
    assert agreed(XML, "see <function=g>") == ("", "see <function=g>", [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call> so',
        '<tool_call>{"name": 7, "arguments": {}} </tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call> <function=>\n</function>",
        '<tool_call>{"name": "' + "x" * 300,
        "<tool_call><function=" + "x" * 3000 + ">",
    ],
)
@pytest.mark.parametrize("form", [HERMES, XML])
def test_what_has_no_name_is_content(form, text):
    assert agreed(form, text) == ("", text, [])


@pytest.mark.parametrize(
    ("calls", "whole", "later"),
    [
        ("hermes", CALL, CALL),
        ("qwen3_xml", XML_CALL, XML_CALL),
        ("kimi_k2", kimi("f", {"a": 1}), kimi("f", {"a": 1})),
        ("lfm2", lfm2("f", {"a": 1}), lfm2("f", {"a": 1})),
        ("olmo3", olmo3("f", {"a": 1}), olmo3("f", {"a": 1})),
    ],
)
def test_a_further_call_that_is_cut_off_is_not_content(calls, whole, later):
    """Wherever the answer is cut off: tags are nothing that a person should read."""
    form = AnswerFormat(reasoning="none", calls=calls)
    for length in range(2, len(later)):
        _, content, found = agreed_in_two(form, f"Well. {whole}\n{later[:length]}", is_cut=True)
        assert content == "Well."
        assert found[0][0] == "f"
        assert len(found) in (1, 2)
    _, content, _ = agreed_in_two(form, f"{whole}\nSo much for a < b.")
    assert content == "So much for a < b."


def test_what_begins_like_a_further_call_and_is_none_is_content():
    """If the model ended the answer there by itself."""
    for text in ("<function=w", "<tool_call> so <"):
        assert agreed(XML, f"{XML_CALL}{text}")[1] == text


def agreed_in_two(form, text, **options):
    found = [parsed(form, pieces, tools=TOOLS, **options) for pieces in ([text], list(text))]
    assert found[0] == found[1]
    return found[0]


def test_junk_inside_and_behind_a_call_is_content():
    text = CALL.replace("}\n</tool", "} oops\n</tool").replace('"{"}}', '"{"} no }')
    assert agreed(HERMES, text)[1] == "no } oops"
    text = XML_CALL.replace("<parameter=s>", "well <parameter=s>")
    text = text.replace("</function>", "</function> ok")
    _, content, [[_, arguments]] = agreed(XML, text)
    assert content.split() == ["well", "ok"]
    assert json.loads(arguments) == {"a": 1, "s": "x\n\ny", "b": True}


def test_a_parameter_that_is_not_closed_ends_with_its_call():
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\nso"
    assert agreed(XML, text) == ("", "so", [["f", '{"a": 1}']])
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>"
    assert agreed(XML, text) == ("", "", [["f", '{"a": 1}']])


def test_an_unknown_function_is_the_clients_to_judge():
    assert agreed(XML, xml("g", {"a": 1}))[2] == [["g", '{"a": "1"}']]
    assert agreed(HERMES, hermes("g", {"a": 1}))[2] == [["g", '{"a": 1}']]


@pytest.mark.parametrize(("form", "call"), [(HERMES, CALL), (XML, XML_CALL)])
def test_a_call_ends_reasoning_that_is_not_closed(form, call):
    reasoning, content, calls = agreed(form, f"I use <tool_call> now\n{call}", is_open=True)
    assert (reasoning, content, len(calls)) == ("I use <tool_call> now", "", 1)
    assert agreed(form, f"hm\n{call}", is_open=True, tools=None)[0] == f"hm\n{call}"
    assert agreed(form, "<think>\nhm\n</think>\nyes", is_open=True) == ("hm", "yes", [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "123", "123"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1e5", "1e5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "12.5", "12.5"),
        ({"type": ["string", "integer"], "maximum": 9}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", 1, None]}, "1", 1),
        ({"const": 2.5}, "2.5", 2.5),
        ({"type": "boolean"}, "False", False),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": ["array", "string"]}, "[1]", [1]),
        ({"type": ["array", "string"]}, "[1", "[1"),
        ({"$ref": "#/$defs/N"}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"$ref": "#/nowhere"}, "7", "7"),
        ({"allOf": [{"$ref": "#/$defs/N"}], "description": "n"}, "7", 7),
        ({"oneOf": [{"$ref": "#/$defs/N"}, {"type": "string"}]}, "x", "x"),
        ({}, "7", "7"),
        (True, "7", "7"),
        ({"properties": {}}, "{}", {}),
    ],
)
def test_values_follow_the_schema(schema, text, value):
    definitions = {"N": {"type": "integer"}}
    definitions["Loop"] = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/N"}]}
    tools = [tool({"properties": {"v": schema}, "$defs": definitions})]
    text = f"<tool_call><function=f><parameter=v>\n{text}\n</parameter></function></tool_call>"
    _, _, [[_, arguments]] = agreed(XML, text, tools=tools)
    assert json.loads(arguments) == {"v": value}


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=s>"),
    *("<parameter=a>", "</parameter>", "</think>", "<think>", "\n", " ", "<", "</", "{", "}", '"'),
    *('{"name": "f", "arguments": {', '{"arguments": {"a": 1}, ', '"s": "', "}}", "[", ",", "\\"),
]
WORDS = [f"w{number}." for number in range(5)]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(FRAGMENTS + WORDS), max_size=14), st.booleans(), st.booleans())
def test_no_text_is_lost(fragments, is_xml, is_open):
    text = "".join(fragments)
    reasoning, content, calls = agreed(XML if is_xml else HERMES, text, is_open=is_open)
    found = " ".join([reasoning, content, *(part for call in calls for part in call)])
    for word in WORDS:
        assert found.count(word) == text.count(word)


def test_formats_are_found_by_name_and_described_by_data():
    assert {"hermes", "qwen3_coder", "qwen3_xml"} <= set(TOOL_CALLS)
    listed = JsonCalls(open="<TOOLS>", close="</TOOLS>", is_list=True, layout=("", ""))
    tools = [tool({"type": "object"}), tool({"type": "object"}, "g")]
    text = '<TOOLS>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLS>'
    rules = listed.grammar(tools, lark.text, is_single=False)
    assert Grammar.of(["start: calls", *rules]).accepts(text)
    parser = TextParser(None, listed.reader(tools), is_open=False)
    events = [event for character in text for event in parser.feed(character)] + parser.finish()
    assert [event.name for event in events if isinstance(event, CallStart)] == ["f", "g"]


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}"
LING = "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
KIMI_ENDS = "<|tool_call_end|><|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("calls", "text", "content", "found"),
    [
        ("ling3", LING.format("a", "1") + "</tool_call>", "", [["f", '{"a": 1}']]),
        ("ling3", LING.format("s", "\n</arg_value> <a>\n"), "",
         [["f", '{"s": "\\n</arg_value> <a>\\n"}']]),
        ("ling3", LING.format("s", "x</tool_call>y") + "</tool_call>", "",
         [["f", '{"s": "x</tool_call>y"}']]),
        ("ling3", LING.format("l", '["</arg_value>"]') + "</tool_call>", "",
         [["f", '{"l": ["</arg_value>"]}']]),
        ("ling3", "Hm. <tool_call>f</tool_call>", "Hm.", [["f", "{}"]]),
        ("ling3", LING.format("a", "1") + "</tool_call>\n<tool_call>g", "<tool_call>g",
         [["f", '{"a": 1}']]),
        ("ling3", LING.format("s", "x").removesuffix("</arg_value>\n"), "", [["f", '{"s": "x"}']]),
        ("ling3", LING.format("s", "x").replace("</arg_value>\n", "</tool_call>"), "",
         [["f", '{"s": "x"}']]),
        ("ling3", "<tool_call>no\nmore", "<tool_call>no\nmore", []),
        ("ling3", '<tool_call>f\n{"a": 1}\n</tool_call>', "", [["f", '{"a": 1}']]),
        ("ling3", "<tool_call>f\n<arg_key>a\n</tool_call>", "<arg_key>a", [["f", "{}"]]),
        ("kimi_k2", KIMI.format("functions.f:3", '{"a": 1}') + KIMI_ENDS, "", [["f", '{"a": 1}']]),
        ("kimi_k2", "Hm. " + KIMI.format(" f:0 ", " ") + KIMI_ENDS, "Hm.", [["f", "{}"]]),
        ("kimi_k2", KIMI.format("f", '{"a": [1'), "", [["f", '{"a": [1]}']]),
        ("kimi_k2", "<|tool_calls_section_begin|>no", "<|tool_calls_section_begin|>no", []),
        ("kimi_k2", "<|tool_call_begin|>f:0<|", "<|tool_call_begin|>f:0<|", []),
        ("lfm2", "<|tool_call_start|>[f(s='a\n\\'b', a=-1)]<|tool_call_end|>Done", "Done",
         [["f", '{"s": "a\\n\'b", "a": -1}']]),
        ("lfm2", "<|tool_call_start|>[f(l=[1, {'k': None}], b=true)]<|tool_call_end|>", "",
         [["f", '{"l": [1, {"k": null}], "b": true}']]),
        ("lfm2", "<|tool_call_start|>[f(s=open('x'), a=07)]<|tool_call_end|>", "",
         [["f", '{"s": "open(\'x\')", "a": "07"}']]),
        ("lfm2", "<|tool_call_start|>[f(s='a", "", [["f", '{"s": "a"}']]),
        ("lfm2", "<|tool_call_start|>hello", "<|tool_call_start|>hello", []),
        ("olmo3", "Well.\n<function_calls>\nf(from=1)\n</function_calls>", "Well.",
         [["f", '{"from": 1}']]),
        ("granite4", CALL, "", [["f", '{"a": 1, "s": "}\\"{"}']]),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]', "",
         [["f", '{"a": 1}'], ["f", "{}"]]),
        ("granite", 'Hm. <tool_call> [{"arguments": {"s": "]"}, "name": "f"}]\n', "Hm.",
         [["f", '{"s": "]"}']]),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "x', "", [["f", '{"s": "x"}']]),
        ("granite", "<|tool_call|>no call", "<|tool_call|>no call", []),
    ],
)  # fmt: skip
def test_other_families(calls, text, content, found):
    form = AnswerFormat(reasoning="none", calls=calls)
    assert agreed(form, text) == ("", content, found)


def test_a_call_keeps_the_id_that_the_model_wrote():
    parser = AnswerFormat(reasoning="none", calls="kimi_k2").parser(tools=TOOLS, is_open=False)
    events = parser.feed(KIMI.format("functions.f:3", "{}") + KIMI_ENDS)
    assert [event.id for event in events if isinstance(event, CallStart)] == ["functions.f:3"]
    assert parser.has_ended_call


@pytest.mark.parametrize("name", ["kimi_k2", "lfm2", "olmo3", "granite"])
def test_templates_of_other_families_are_found(name):
    assert find_format("... " + TOOL_CALLS[name].open).calls == name


def test_the_form_of_keys_and_values_is_told_from_the_others_with_its_tag():
    assert find_format(LING.format("{{ key }}", "{{ value }}")).calls == "ling3"


@pytest.mark.parametrize("model_type", CALLS_OF)
def test_a_family_writes_calls_that_its_template_does_not_show(model_type):
    """LFM2's lists the tools, and wraps their results; of calls it says nothing."""
    silent = "{%- if tools %}List of tools: <|tool_list_start|>[{{ tools }}]{% endif %}"
    assert CALLS_OF[model_type] in TOOL_CALLS
    assert find_format(silent, model_type=model_type).calls == CALLS_OF[model_type]
    assert find_format(silent).calls == "none"
    assert find_format("{{ messages }}", model_type=model_type).calls == "none"
    assert find_format(silent, calls="none", model_type=model_type).calls == "none"
    assert find_format(silent + "<TOOLCALL>", model_type=model_type).calls == "nemotron_json"


def test_reasoning_between_two_sentences():
    form = AnswerFormat(calls="granite", reasoning="granite")
    template = "'Here is my thought process:' ... 'Here is my response:' ... <|tool_call|>"
    assert find_format(template) == form
    for verb in ("Here is", "Here's"):
        text = f"{verb} my thought process:\nhm\n\n{verb} my response:\n\nyes"
        assert agreed(form, text) == ("hm", "yes", [])
        calls = '<|tool_call|>[{"name": "f", "arguments": {}}]'
        assert agreed(form, text + calls) == ("hm", "yes", [["f", "{}"]])
    assert agreed(form, "Here is my dog.") == ("", "Here is my dog.", [])


def test_demanded_calls_of_a_list_that_the_answer_ends():
    tools = [tool({"type": "object"}, name) for name in "fg"]
    calls = [{"name": name, "arguments": {"a": [1]}} for name in "fg"]
    text = f"<|tool_call|>{json.dumps(calls)}"
    assert Grammar("granite", tools, is_single=False).accepts(text)
    assert not Grammar("granite", tools).accepts(text)
    assert Grammar("granite", tools).accepts(f"<|tool_call|>{json.dumps(calls[:1])}")
