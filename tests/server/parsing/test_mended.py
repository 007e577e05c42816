"""Calls that models write badly: what is meant is read, and no text depends on how it was cut."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.events import CallArguments, CallStart
from milepost.server.parsing.formats import TOOL_CALLS
from milepost.server.parsing.literals import MAX_DEPTH
from milepost.server.parsing.scanning import literal, object_of
from tests.server.parsing.written import Grammar, cut, parsed, tool

KINDS = {"a": "integer", "s": "string", "l": "array", "b": "boolean", "o": "object"}
PARAMETERS = {"type": "object", "properties": {name: {"type": k} for name, k in KINDS.items()}}
TOOLS = [tool(PARAMETERS), tool({"type": "object"}, "g")]


def read(calls, text, *, is_open=False, is_cut=False, tools=TOOLS):
    """As `parsed`, the same however the text is cut."""
    form = AnswerFormat(reasoning="qwen3", calls=calls)
    pieces = [[text], list(text), *(cut(text, random.Random(seed)) for seed in range(3))]
    found = [parsed(form, each, tools, is_open=is_open, is_cut=is_cut) for each in pieces]
    assert all(other == found[0] for other in found), found
    return found[0]


def called(calls, text, **options):
    """[(name, arguments)]"""
    _, content, found = read(calls, text, **options)
    assert content == ""
    return [(name, json.loads(arguments)) for name, arguments in found]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "is_exact"),
    [
        ("['a']", ["a"], True),
        ("{'k': True, 'n': None}", {"k": True, "n": None}, True),
        ("(1,2)", [1, 2], True),
        ("(1)", 1, True),
        ("()", [], True),
        ("{1, 'a'}", [1, "a"], True),
        ("{1: 'x', None: 2, (1, 2): 3}", {"1": "x", "null": 2, "[1, 2]": 3}, True),
        ("[{'a': (1,)}, {2}]", [{"a": [1]}, [2]], True),
        ("'''a\n\"b'''", 'a\n"b', True),
        ('"""it\'s"""', "it's", True),
        ("'it\\'s \\x41\\101 \\U0001F642'", "it's AA 🙂", True),
        (r"r'\d\'x'", r"\d\'x", True),
        ("[1, 2,]", [1, 2], True),
        ("TRUE", True, False),
        ("[None, FALSE]", [None, False], False),
        ("+7", 7, False),
        ("1_000", 1000, False),
        ("-.5e3", -500.0, False),
        ("0x1F", 31, False),
        ("[1 2]", [1, 2], False),
        ("[1, 2}]", [1, 2], False),
        ("{a: 1, b: x}", {"a": 1, "b": "x"}, False),
        ("{'a': 1, 'b'}", {"a": 1, "b": None}, False),
        ("{'a' 1}", ["a", 1], False),
        ("{'a': 1 'b'}", {"a": 1, "b": None}, False),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}, False),
        ('"\\d \\u12"', "\\d \\u12", False),
        ('{"a": NaN}', {"a": "NaN"}, False),
        ('{"a": [1', {"a": [1]}, False),
        ('{"a": "x', {"a": "x"}, False),
        ("007", "007", False),
    ],
)
def test_literals(text, value, is_exact):
    found = literal(text)
    assert found is not None
    assert json.loads(found.json) == value
    assert found.is_exact == is_exact


@pytest.mark.parametrize(
    "text", ["", " ", "open('x')", "hello world", "1 2", "[1] + [2]", ",", "]"]
)
def test_what_is_no_literal(text):
    assert literal(text) is None


def test_literals_of_python_alone():
    for text, value in {"'a' 'b'": "ab", "+7": 7, '"\\d"': "\\d", "'a\nb'": "a\nb"}.items():
        found = literal(text, is_python=True)
        assert (json.loads(found.json), found.is_exact) == (value, True)


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False).filter(lambda x: abs(x) != float("inf")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80)
@given(LITERALS)
def test_any_literal_of_python_or_json_is_read(value):
    plain = json.loads(json.dumps(value))
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        for is_python in (False, True):
            found = literal(text, is_python=is_python)
            assert found.is_exact
            assert json.loads(found.json) == plain
    assert literal(json.dumps(value)).json == json.dumps(value)


@settings(max_examples=150)
@given(st.text(alphabet="{}[]()\"',:\\ \nab1+-.eurx<", max_size=24))
def test_any_text_becomes_an_object_or_nothing(text):
    assert isinstance(json.loads(object_of("{" + text) or "{}"), dict)
    found = literal(text)
    if found is not None:
        json.loads(found.json)


def test_brackets_have_a_limit():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert literal(deep).is_exact
    assert literal(f"[{deep}]") is None
    nested = "{" * 60 + ":1}" * 60
    assert len(literal(nested).json) < 4 * len(nested)


# --- tags that are missing ------------------------------------------------------------------------


def parameter(name, text, end="</parameter>\n"):
    return f"<parameter={name}>\n{text}\n{end}"


HEAD, END = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"


@pytest.mark.parametrize("name", ["s", "a", "l"])
@pytest.mark.parametrize("following", ["s", "a", "l"])
def test_a_parameter_that_is_not_closed_ends_with_the_next(name, following):
    values = {"s": ("x\ny", "x\ny"), "a": ("1", 1), "l": ("[1]", [1])}
    if name == following:
        return
    text = HEAD + parameter(name, values[name][0], "") + parameter(following, values[following][0])
    expected = {n: values[n][1] for n in (name, following)}
    assert called("qwen3_xml", text + END) == [("f", expected)]
    unlisted = text.replace("=f>", "=h>")
    assert [list(given) for _, given in called("qwen3_xml", unlisted + END)] == [[name, following]]


def test_a_parameter_inside_a_string_belongs_to_it():
    for inner in ("a <parameter=a> b", "<parameter=a>", "x\n<parameter=zz>\n1", "x\n<parameter=s>"):
        assert called("qwen3_xml", HEAD + parameter("s", inner) + END) == [("f", {"s": inner})]
    given = HEAD + parameter("a", 1) + parameter("s", "x\n<parameter=a>\n2") + END
    assert called("qwen3_xml", given) == [("f", {"a": 1, "s": "x\n<parameter=a>\n2"})]


@pytest.mark.parametrize("between", ["</function>\n", "</tool_call>\n", "", END + "\n"])
@pytest.mark.parametrize("last", ["</parameter>\n", ""])
def test_a_call_that_is_not_closed_ends_with_the_next(between, last):
    for name, text, value in (("a", "1", 1), ("s", "x", "x"), ("l", "[1]", [1])):
        if not last and (not between or between == "</function>\n") and name != "s":
            continue
        if not last and not between:
            continue  # a string that says <tool_call>
        whole = HEAD + parameter(name, text, last) + between + G
        assert called("qwen3_xml", whole) == [("f", {name: value}), ("g", {})], whole


@pytest.mark.parametrize(
    "inner",
    [
        *("x\n<parameter=a>\n2", "x\n</tool_call>\n<tool_call>", "x</function><function=f>"),
        *("x</parameter><tool_call>", "x\n</tool_call>\n<function=g>"),
    ],
)
def test_a_demanded_string_has_nothing_that_would_end_it(inner):
    demanded = Grammar("qwen3_xml", [tool(PARAMETERS)])
    assert not demanded.accepts(HEAD + parameter("s", inner) + END)
    assert demanded.accepts(HEAD + parameter("s", "x </tool_call> <parameter=a>") + END)


def test_the_end_of_the_answer_ends_a_call():
    for end in (END, "</function>", "</tool_call>", "</tool_call>\n", ""):
        assert called("qwen3_xml", HEAD + parameter("s", "x", "") + end) == [("f", {"s": "x"})]
    assert called("qwen3_xml", HEAD + parameter("s", "x")) == [("f", {"s": "x"})]
    for inside in ("a\n</tool_call>\nb", "a </tool_call><tool_call> b", "</tool_call>"):
        assert called("qwen3_xml", HEAD + parameter("s", inside) + END) == [("f", {"s": inside})]


def test_values_of_tagged_calls_follow_the_schema():
    given = {"l": "['a']", "o": "{'k': True}", "b": "TRUE", "a": "+7", "s": "['a']"}
    text = HEAD + "".join(parameter(*each) for each in given.items()) + END
    expected = {"l": ["a"], "o": {"k": True}, "b": True, "a": 7, "s": "['a']"}
    assert called("qwen3_xml", text) == [("f", expected)]
    assert called("qwen3_xml", HEAD + parameter("l", "(1,2)") + END) == [("f", {"l": [1, 2]})]
    assert called("qwen3_xml", HEAD + parameter("l", "open('x')") + END)[0][1] == {"l": "open('x')"}
    union = [tool({"properties": {"u": {"type": ["string", "array", "integer"]}}})]
    for text, value in {"['a']": ["a"], "+41": "+41", "TRUE": "TRUE", "7": 7, "[1": "[1"}.items():
        call = HEAD + parameter("u", text) + END
        assert called("qwen3_xml", call, tools=union) == [("f", {"u": value})]


def test_tagged_arguments_may_be_one_object():
    assert called("qwen3_xml", HEAD + '{"a": 1, \'s\': "x"}\n' + END) == [("f", {"a": 1, "s": "x"})]


SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def kimi(name, arguments, end="<|tool_call_end|>", number=0):
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return head + arguments + end


@pytest.mark.parametrize(
    ("first", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', {"a": 1}),
        ('{"s": "x', {"s": "x"}),
        ("{'b': True}", {"b": True}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ("", {}),
    ],
)
def test_a_named_call_that_is_not_closed_ends_with_the_next(first, arguments):
    expected = [("f", arguments), ("g", {})]
    for end in ("<|tool_call_end|>", ""):
        text = SECTION.format(kimi("f", first, end) + kimi("g", "{}", number=1))
        assert called("kimi_k2", text) == expected
        text = SECTION.format(kimi("f", first, end)) + SECTION.format(kimi("g", "{}", number=1))
        assert called("kimi_k2", text) == expected


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("1, 'x', [2]", {"a": 1, "s": "x", "l": [2]}),
        ("s='x', 1", {"s": "x", "a": 1}),
        ("**{}", {}),
        ("**{'a': 1}, s='x'", {"a": 1, "s": "x"}),
        ("a=1, **{'s': 'x', }", {"a": 1, "s": "x"}),
        ("{'a': 1, 's': 'x'}", {"a": 1, "s": "x"}),
        ("s='''x\n\"y'''", {"s": 'x\n"y'}),
        ("a=+7, l={1, 2}", {"a": 7, "l": [1, 2]}),
        ("s='a' 'b', b=TRUE", {"s": "ab", "b": True}),
        ("s=TRUE", {"s": "TRUE"}),
        ("s=a b", {"s": "a b"}),
        ("s='a", {"s": "a"}),
        ("a=1, s='x]), g()", {"a": 1, "s": "x]), g()"}),
    ],
)
def test_pythonic_calls(written, arguments):
    text = f"<|tool_call_start|>[f({written}"
    is_closed = written.count("'") % 2 == 0
    text += ")]<|tool_call_end|>" if is_closed else "<|tool_call_end|>"
    assert read("lfm2", f"Well. {text}Done")[1] == "Well.Done"
    assert [json.loads(given) for _, given in read("lfm2", text)[2]] == [arguments]


def test_values_without_keywords_are_not_lost():
    text = "<|tool_call_start|>[g(7, 'x'), f(1, 'x', [], True, {}, 6)]<|tool_call_end|>"
    first, second = called("lfm2", text)
    assert first == ("g", {"arg1": 7, "arg2": "x"})
    assert second == ("f", {"a": 1, "s": "x", "l": [], "b": True, "o": {}, "arg6": 6})


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "arguments": {\'a\': True,}}', {"a": True}),
        ("{'name': 'f', 'arguments': {'s': 'x\"y'}}", {"s": 'x"y'}),
        ('{"name": "f", "arguments": {"s": "x\ny"}}', {"s": "x\ny"}),
        ('{"name": "f", "arguments": {"a": [1, 2}}}', {"a": [1, 2]}),
        ('{"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1 "b": 2}}', {"a": 1, "b": 2}),
        ('{"name": "f", "arguments": {1, 2}}', {"1": None, "2": None}),
        ('{"name": "f", "arguments": "{\'a\': 1"}', {"a": 1}),
        ('{"arguments": {"s": \'x\'}, "name": "f"}', {"s": "x"}),
    ],
)
def test_json_calls(written, arguments):
    assert called("hermes", f"<tool_call>{written}</tool_call>") == [("f", arguments)]
    two = f"<tool_call>\n{written}\n<tool_call>\n" + '{"name": "g"}'
    assert called("hermes", two) == [("f", arguments), ("g", {})]


@pytest.mark.parametrize("calls", ["lfm2", "olmo3"])
def test_pythonic_tags_may_hold_json(calls):
    objects = '{"name": "f", "arguments": {"s": "x)]"}}, {"name": "g"}'
    form = TOOL_CALLS[calls]
    for text in (f"[{objects}]", f"\n[\n{objects}\n]\n", objects):
        found = called(calls, form.open + text + form.close)
        assert found == [("f", {"s": "x)]"}), ("g", {})]


@pytest.mark.parametrize("given", ["[1]", '"x"', "7", '"[1]"', "true"])
def test_arguments_that_are_no_object_make_no_call(given):
    text = f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'
    assert read("hermes", text) == ("", text, [])
    text = SECTION.format(kimi("f", given))
    assert read("kimi_k2", text) == ("", text, [])


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("qwen3_xml", "<tool_call><function=f>"),
        ("qwen3_xml", "<tool_call><function=f> is how one calls."),
        ("lfm2", "<|tool_call_start|>[f("),
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
    ],
)
def test_a_call_is_announced_once_it_is_one(calls, text):
    assert read(calls, text) == ("", text, [])
    form = AnswerFormat(reasoning="none", calls=calls)
    events = form.parser(tools=TOOLS, is_open=False).feed(text)
    assert not any(isinstance(event, CallStart) for event in events)


# --- calls in reasoning ---------------------------------------------------------------------------

CALLS = {
    "qwen3_xml": HEAD + parameter("a", 1) + END,
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "kimi_k2": SECTION.format(kimi("f", '{"a": 1}')),
    "lfm2": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    "olmo3": "<function_calls>\nf(a=1)\n</function_calls>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
    "nemotron_json": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("before", ["hm\n", "hm, "])
@pytest.mark.parametrize("late", ["", "\n</think>\n\nyes", "</think>yes", "yes\n</think>\n\n"])
def test_a_call_ends_reasoning_wherever_it_stands(calls, before, late):
    for start, is_open in (("", True), ("<think>\n", False)):
        text = start + before + CALLS[calls] + late
        reasoning, content, found = read(calls, text, is_open=is_open)
        assert reasoning.strip("\n") == before.strip("\n")
        assert content.strip() == ("yes" if late else "")
        assert [(name, json.loads(given)) for name, given in found] == [("f", {"a": 1})]


def test_the_tags_of_a_section_may_be_missing_in_reasoning():
    assert read("kimi_k2", "hm " + kimi("f", "{}"), is_open=True) == ("hm ", "", [["f", "{}"]])


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("qwen3_xml", "I use <tool_call> or `<tool_call>\n<function=f>\n</function>` or so"),
        ("qwen3_xml", "<function=h>\n</function> and <tool_call><function=h></function>"),
        ("hermes", 'I use <tool_call>{"name": "h", "arguments": {}}</tool_call> or <tool_call>'),
        ("hermes", '<tool_call>\nnonsense, "<tool_call>{"name": "f", "arguments": {}}'),
        ("lfm2", "<|tool_call_start|>, it is called"),
    ],
)
def test_reasoning_about_calls_is_reasoning(calls, said):
    assert read(calls, said + "\n</think>\nyes", is_open=True) == (said, "yes", [])


def test_a_tag_that_closes_nothing_is_dropped_at_the_start_alone():
    assert read("hermes", "\n</think>\n\nyes") == ("", "yes", [])
    assert read("hermes", "a </think> b") == ("", "a </think> b", [])
    assert read("hermes", f"{CALLS['hermes']}</think>")[1] == "</think>"


@pytest.mark.parametrize(
    ("end", "begun", "is_open"),
    [
        ("<think>\n\n</think>\n\n", "", False),
        ("</think>", "", False),
        ("<think>\n", "", True),
        ("", "", True),
        ("<think>\n\n</think>\n\n", "ye", False),
        ("", "ye", True),
    ],
)
def test_reasoning_that_always_comes_does_not_where_the_prompt_closes_it(end, begun, is_open):
    form = AnswerFormat(calls="none", reasoning="deepseek_r1")
    prompt = f"user: what does </think> mean?\n<|im_start|>assistant\n{end}{begun}"
    assert form.is_open(prompt, begun) == is_open
    reasoning, content, _ = parsed(form, ["yes"], None, is_open=is_open)
    assert (reasoning, content) == (("yes", "") if is_open else ("", "yes"))


# --- anything -------------------------------------------------------------------------------------

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>\n"),
    *("<parameter=l>\n", "</parameter>", "<think>", "</think>", "\n", " ", "<", "</"),
    *("{", "}", '"', "'", "[", "]", "(", ")", ",", ":", "\\", "f(", "s=", "**", "'''", "TRUE"),
    *('{"name": "f", "arguments": {', '"s": "', "}}", "word", "7", "+", '"a": '),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "<|tool_call_start|>"),
    *("<function_calls>\n", "\n</function_calls>", "<|tool_call|>", "<TOOLCALL>", "</TOOLCALL>"),
]


@settings(max_examples=120)
@given(
    st.sampled_from(sorted(set(TOOL_CALLS) - {"qwen3_coder", "granite4"})),
    st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_answer_depends_on_how_it_is_cut_and_all_arguments_are_objects(
    calls, fragments, is_open, is_cut, pick
):
    form, text = AnswerFormat(reasoning="qwen3", calls=calls), "".join(fragments)
    pieces = [[text], list(text), cut(text, pick)]
    found = [parsed(form, each, TOOLS, is_open=is_open, is_cut=is_cut) for each in pieces]
    assert found[0] == found[1] == found[2]
    for _, arguments in found[0][2][: -1 if is_cut else None]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("calls", CALLS)
def test_a_call_that_is_cut_off_has_what_came_of_its_arguments(calls):
    """Closed, it could do what the model had not meant."""
    whole = CALLS[calls].replace("a=1", "s='xyz'").replace('"a": 1', '"s": "xyz"')
    whole = whole.replace("=a>\n1", "=s>\nxyz")
    form = AnswerFormat(reasoning="none", calls=calls)
    expected = parsed(form, [whole], TOOLS)[2]
    for length in range(len(whole)):
        found = [
            parsed(form, pieces, TOOLS, is_cut=True)[2]
            for pieces in ([whole[:length]], list(whole[:length]))
        ]
        assert found[0] == found[1]
        given = "".join(arguments for _, arguments in found[0])
        assert '{"s": "xyz"}'.startswith(given.partition("xyz")[0])
        if given.endswith("}"):
            assert found[0] == expected


def test_events_come_as_soon_as_they_are_known():
    parser = AnswerFormat(reasoning="none", calls="kimi_k2").parser(tools=TOOLS, is_open=False)
    events = parser.feed(kimi("f", '{"s": "abc', ""))
    assert events == [CallStart("f", "functions.f:0"), CallArguments('{"s": "abc')]
