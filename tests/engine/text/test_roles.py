"""Conversations that a template would refuse, or show without some message."""

import itertools
import re

import pytest

from milepost.engine.text.chat import render
from milepost.errors import InvalidRequestError

TURN = "{{ '<|im_start|>' + m.role + '\\n' + text(m.content) + '<|im_end|>\\n' }}"
TEXT = (
    "{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content or [] %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
)
LATE = "{{ raise_exception('System message must be at the beginning.') }}"
STRICT = TEXT + (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + LATE
    + "{% endif %}"
    + TURN
    + "{% endfor %}"
)
"""As Qwen3.5's does it."""
DROPS = TEXT + (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
TAKES = TEXT + "{% for m in messages %}" + TURN + "{% endfor %}"
ALTERNATES = TEXT + (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}" + TURN + "{% endfor %}"
)
TEMPLATES = {"strict": STRICT, "drops": DROPS, "takes": TAKES, "alternates": ALTERNATES}


@pytest.fixture
def with_template(tokenizer):
    def set_template(template):
        tokenizer.chat_template = template
        return tokenizer

    yield set_template
    tokenizer.chat_template = None


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def turns(tokenizer, messages, **options):
    """(role, text) of each turn of the prompt."""
    prompt = render(tokenizer, messages, add_generation_prompt=False, **options)
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt.text, re.DOTALL)


@pytest.mark.parametrize("template", ["strict", "drops", "takes"])
def test_system_messages_at_the_head_are_joined(with_template, template):
    tokenizer = with_template(TEMPLATES[template])
    head = [said("system", "one"), said("developer", "two"), said("system", "three")]
    found = turns(tokenizer, [*head, said("user", "hello")])
    assert found == [("system", "one\n\ntwo\n\nthree"), ("user", "hello")]


def test_a_later_one_stays_where_it_was_said(with_template):
    messages = [
        said("system", "one"),
        said("user", "hello"),
        said("system", "agents: two"),
        said("assistant", "yes"),
        said("user", "more"),
    ]
    for template, who in [("strict", "user"), ("drops", "user"), ("takes", "system")]:
        found = turns(with_template(TEMPLATES[template]), messages)
        assert found[2] == (who, "agents: two"), template
        assert [text for _, text in found] == [m["content"] for m in messages]


def test_a_later_turn_begins_with_the_earlier_ones(with_template):
    tokenizer = with_template(STRICT)
    first = [said("system", "one"), said("user", "hello"), said("system", "two")]
    more = [*first, said("assistant", "yes"), said("user", "more"), said("system", "three")]
    texts = [render(tokenizer, each, add_generation_prompt=False).text for each in (first, more)]
    assert texts[1].startswith(texts[0])


def test_a_conversation_without_a_user(with_template):
    tokenizer = with_template(STRICT)
    assert turns(tokenizer, [said("system", "do it")]) == [("user", "do it")]
    both = [said("system", "be brief"), said("developer", "do it")]
    assert turns(tokenizer, both) == [("user", "be brief\n\ndo it")]
    assert turns(tokenizer, [said("assistant", "yes")]) == [("user", ""), ("assistant", "yes")]
    assert turns(with_template(TAKES), [said("system", "do it")]) == [("system", "do it")]


def test_turns_alternate_where_they_must(with_template):
    tokenizer = with_template(ALTERNATES)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        said("system", "one"),
        said("user", "hello"),
        said("user", [{"type": "text", "text": "and"}, {"type": "text", "text": "more"}]),
        said("assistant", "", tool_calls=[call]),
        said("tool", "1"),
        said("assistant", "yes"),
        said("assistant", "indeed"),
    ]
    assert turns(tokenizer, messages) == [
        ("user", "one\n\nhello\n\nandmore"),
        ("assistant", ""),
        ("tool", "1"),
        ("assistant", "yes\n\nindeed"),
    ]


def test_breakpoints_stay_at_the_ends_of_their_parts(with_template):
    mark = {"type": "ephemeral"}
    messages = [
        said("system", [{"type": "text", "text": "one", "cache_control": mark}]),
        said("system", "two", cache_control=mark),
        said("user", "hello"),
    ]
    for template in (STRICT, ALTERNATES):
        tokenizer = with_template(template)
        prompt = render(tokenizer, messages)
        ends = [tokenizer.decode(prompt.token_ids[:place]) for place in prompt.breakpoints]
        assert [
            text.endswith(word) for text, word in zip(sorted(ends), ("one", "two"), strict=True)
        ]
        assert {text[-3:] for text in ends} == {"one", "two"}


@pytest.mark.parametrize("template", [*TEMPLATES])
def test_whatever_the_order_nothing_is_lost(with_template, template):
    """All orders of up to four messages; the texts come in the order in which they were said."""
    tokenizer = with_template(TEMPLATES[template])
    for length in (1, 2, 3, 4):
        for roles in itertools.product(("system", "developer", "user", "assistant"), repeat=length):
            messages = [said(role, f"word{i}") for i, role in enumerate(roles)]
            text = " ".join(text for _, text in turns(tokenizer, messages))
            assert re.findall(r"word\d", text) == [f"word{i}" for i in range(length)], roles


def test_what_is_refused_however_it_is_put_says_why_at_first(with_template):
    tokenizer = with_template("{{ raise_exception('never: ' ~ messages[0].role) }}")
    with pytest.raises(InvalidRequestError, match="refuses the messages: never: system"):
        render(tokenizer, [said("system", "one"), said("user", "a"), said("user", "b")])
