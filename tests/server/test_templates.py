"""What a chat template reads of a request."""

import pytest
from jinja2 import nodes

from milepost.server.errors import HttpError
from milepost.server.messages import check_template_kwargs, variables_of
from tests import chatmodel

ALWAYS = {"messages", "add_generation_prompt"}


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ messages }}{% if add_generation_prompt %}a{% endif %}", set()),
        (
            "{% if enable_thinking is defined and enable_thinking %}a{% endif %}",
            {"enable_thinking"},
        ),
        ("{% set mode = mode | default('x') %}{{ mode }}", {"mode"}),
        ("{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{{ y }}{% endfor %}", {"y"}),
        ("{% generation %}{{ z }}{% endgeneration %}", {"z"}),
        ("{% macro f(a) %}{{ a }}{{ b }}{% endmacro %}{{ f(c) }}", {"b", "c"}),
        ("{% set ns = namespace(i=0) %}{% set ns.i = 1 %}{{ ns.i }}", set()),
    ],
)
def test_variables(template, names):
    assert variables_of(template) - ALWAYS - {"namespace"} == names


def test_what_cannot_be_told():
    assert variables_of(None) is None
    assert variables_of({"default": "x"}) is None
    assert variables_of("{% no_such_tag %}") is None
    check_template_kwargs({"anything": 1}, None)


def test_a_variable_that_is_not_read_is_refused():
    variables = variables_of(chatmodel.TEMPLATE)
    check_template_kwargs({"enable_thinking": True}, variables)
    check_template_kwargs({"other": None, "another": False}, variables)
    with pytest.raises(HttpError, match=r"no such variable: did you mean enable_thinking\?"):
        check_template_kwargs({"enable_thinkin": True}, variables)
    with pytest.raises(HttpError, match=r"reads no such variable$"):
        check_template_kwargs({"enable_thinking": True}, variables_of("{{ messages }}"))


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "bos_token"])
def test_what_is_not_for_a_request_to_set(name):
    with pytest.raises(HttpError, match="requests cannot set it"):
        check_template_kwargs({name: False}, None)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 }}{{ y }}",
        "{% set a = 2 ** 3 %}{{ y }}",
        "{% autoescape 2 ** 3 %}{{ y }}{% endautoescape %}",
        "{% if 2 * 3 %}{{ [y, 'x' * 3] }}{% endif %}",
        "{% macro f(a=2 ** 3) %}{{ 'a' | center(2 * 3) }}{% endmacro %}{{ f(y) }}",
        "{% filter center(2 * 3) %}{{ y }}{% endfilter %}",
    ],
)
def test_nothing_of_a_template_is_computed_to_find_its_names(monkeypatch, template):
    """This is done in the server itself, and constants may be as large as one likes."""
    for kind in (nodes.Mul, nodes.Pow, nodes.Filter):
        monkeypatch.setattr(kind, "as_const", lambda *_: pytest.fail("computed"))
    assert variables_of(template) == {"y"}


def test_a_template_too_deep_to_read_is_not_told():
    assert variables_of("{{ " + "(" * 50_000 + ")" * 50_000 + " }}") is None
