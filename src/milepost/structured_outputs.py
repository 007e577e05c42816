"""The form of an answer: a JSON schema, a regular expression, a choice, or a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, NoReturn

from milepost.errors import InvalidRequestError
from milepost.vllm_keywords import STRUCTURED, with_vllm_keywords

MAX_LEN = 2**18
"""Largest length of a form that is compiled, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer: exactly one of the first four fields. Raises InvalidRequestError."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The whole answer is one of these."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark."""
    starts_after: int | None = None
    """Token id after which the form begins, such as the end of the reasoning."""
    field: str = "structured_outputs"
    """The caller's name for it; messages begin with it."""

    def __post_init__(self) -> None:
        given = [self.json, self.regex, self.choice, self.grammar]
        if sum(form is not None for form in given) != 1 or self.choice in ([], ()):
            raise InvalidRequestError(
                f"{self.field}: give exactly one of json, regex, choice and grammar"
            )
        if not isinstance(self.json, str | Mapping | None):
            self._refuse("json", self.json, "a JSON schema, as a mapping or as text")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                self._refuse(name, value, "a string")
        choice = self.choice
        if isinstance(choice, str | bytes) or not isinstance(choice, Iterable | None):
            self._refuse("choice", choice, "a list of strings")
        for text in choice or ():
            if not isinstance(text, str):
                self._refuse("choice", text, "strings")

    @property
    def as_text(self) -> StructuredOutputs:
        """Returns the form with its schema as text: numbers in a mapping may be too large to send.
        Raises InvalidRequestError for a mapping that is not JSON, and for a form that is longer
        than MAX_LEN."""
        if _is_longer([self.json, self.regex, self.choice, self.grammar], MAX_LEN):
            raise InvalidRequestError(f"{self.field}: use {MAX_LEN} or fewer characters")
        if not isinstance(self.json, Mapping):
            return self
        try:
            return replace(self, json=dumps(self.json))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{self.field}: {error}") from error

    def _refuse(self, name: str, value: object, instead: str) -> NoReturn:
        raise InvalidRequestError(f"{self.field}: {name}={value!r}: use {instead}")


def _is_longer(value: Any, limit: int) -> bool:
    """Returns whether a value is certainly longer than this as JSON. Nothing is written out, and no
    more is read than the limit: a body may hold millions of values."""
    todo = [value]
    while todo and limit >= 0:
        item = todo.pop()
        if isinstance(item, str):
            limit -= len(item)
        elif isinstance(item, Mapping):
            limit -= 6 * len(item)  # two quotes, ": " and ", "
            todo += [*item, *item.values()] if limit >= 0 else ()
        elif isinstance(item, Sequence):
            limit -= 2 * len(item)
            todo += item if limit >= 0 else ()
        else:
            limit -= 1
    return limit < 0


StructuredOutputs.__init__ = with_vllm_keywords(STRUCTURED)(  # type: ignore[method-assign]
    StructuredOutputs.__init__
)
