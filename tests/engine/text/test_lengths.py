"""How long a conversation is decides whether an event loop may prepare it."""

from milepost.engine.text import MAX_SHORT, text_length


def test_numbers_make_a_value_long_as_texts_do():
    """A tool's schema may list two million of them, in a body with hardly any text."""
    assert text_length({"a": [1, 2.5, None], "bc": ["de", "f"], "g": [{"h": "i"}, 7, True]}) == 14
    for value in (7, "a", None):
        tools = [{"function": {"parameters": {"enum": [value] * (MAX_SHORT + 1)}}}]
        assert text_length([tools]) > MAX_SHORT
