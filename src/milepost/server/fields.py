"""Types of fields, and the base class of all bodies.

A field that would change the answer and is not supported accepts only values without an effect
(`Only`). A field that clients send for another service, and that changes nothing here, is accepted
and named in the response (`Unread`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    WrapValidator,
)
from pydantic_core.core_schema import (
    CoreSchema,
    no_info_plain_validator_function,
    with_info_plain_validator_function,
)

from milepost.server.bodies import STOP_AT_FIRST

MAX_INT = 2**63 - 1
MAX_PARTS = 8192
T = TypeVar("T")
Many = Annotated[list[T], STOP_AT_FIRST]
MAX_TOOLS = 4096
"""Largest number of tools in a request: in a prompt each takes thirty tokens or more."""
ToolList = Annotated[list[T], STOP_AT_FIRST, Field(max_length=MAX_TOOLS)]


def _whole(value: Any) -> Any:
    """Returns 2 for 2.0, as clients write integers whose language has floats alone."""
    is_whole = type(value) is float and value.is_integer() and abs(value) <= 2**53
    return int(value) if is_whole else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[WholeNumber, Field(ge=0, le=MAX_INT)]
Positive = Annotated[WholeNumber, Field(ge=1, le=MAX_INT)]
Alternatives = Annotated[WholeNumber, Field(ge=0, le=20)]
AnyType = Annotated[str, Field(max_length=64)]
"""A `type` of any name."""
Int64 = Annotated[WholeNumber, Field(ge=-MAX_INT - 1, le=MAX_INT)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_IDS_AT_ONCE = 2**16


def _are_token_ids(value: Any) -> bool:
    """Whether a value is a list of possible token ids. Other threads need not wait for all of it,
    as they would if pydantic checked it."""
    if type(value) is not list or not value:
        return False
    try:
        for start in range(0, len(value), _IDS_AT_ONCE):
            some = value[start : start + _IDS_AT_ONCE]
            array("I", some)
            if set(map(type, some)) != {int}:
                return False
    except (OverflowError, TypeError):
        return False
    return True


TokenIds = Annotated[
    Many[TokenId],
    WrapValidator(lambda value, check: value if _are_token_ids(value) else check(value)),
]
Detail = Literal["auto", "low", "high", "original"]
"""How closely an image is looked at: only `low` changes anything, to 256 tokens at most."""
MAX_STOP_LEN = 1024
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]


class Only:
    """Marks a field that is not supported: it may be null, or one of `values`, which have no
    effect. The `hint` says what to use in its place."""

    def __init__(self, *values: Any, hint: str = "") -> None:
        self._allowed = (None, *values)
        self._hint = hint

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        hint = self._hint
        about = f"Not supported; {hint}." if hint else "Not supported beyond these values."
        return {"enum": [*self._allowed], "description": about}

    def _check(self, value: Any) -> Any:
        if not _is_one_of(value, self._allowed):
            raise ValueError(self._hint or "this is not supported: leave the field out")
        return value


class Unread:
    """Marks a field that is accepted and changes nothing here. Its value is reported in the
    response, unless it is one of `asks_nothing`."""

    def __init__(self, *asks_nothing: Any) -> None:
        self._asks_nothing = asks_nothing

    def is_asked(self, value: Any) -> bool:
        if value is None or value in ("", [], {}):
            return False
        return not _is_one_of(value, self._asks_nothing)


class Renamed(Unread):
    """Marks a field that was renamed. Clients that send both names mean the new one, which
    `replacement` names (`field.member`); the old one alone is refused."""

    def __init__(self, replacement: str) -> None:
        super().__init__()
        self._replacement = replacement

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        return {"description": f"Not supported; use {self._replacement}."}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        field = self._replacement.partition(".")[0]
        if value is not None and info.data.get(field) is None:
            raise ValueError(f"use {self._replacement}")
        return value


def _is_one_of(value: Any, others: tuple[Any, ...]) -> bool:
    """Whether a value equals one of the others and has its type: True is not 1."""
    return any(type(value) is type(other) and value == other for other in others)


class Body(BaseModel):
    """Accepts JSON types strictly: no number in a string."""

    model_config = ConfigDict(extra="allow", strict=True)

    def left_out(self) -> Iterator[str]:
        """Yields names of requested items that nothing here supports, so they are left out."""
        yield from ()

    def changed(self) -> Iterator[str]:
        """Yields names of fields whose value was not used as it stands."""
        yield from ()


class LeftOutBody(Body):
    """A body that nothing here reads; its unknown fields are not reported one by one."""

    model_config = ConfigDict(extra="ignore")


def with_type(name: str, body: T) -> T:
    """Raises ValueError unless a body has the field `name` exactly if its `type` says so."""
    if (body.type == name) != (getattr(body, name) is not None):  # type: ignore[attr-defined]
        raise ValueError(f"use {name} with type {name!r}, and only with it")
    return body


def tagged(*classes: type[Body], other: Callable[[Any], type[Body]]) -> Any:
    """Returns the type of a body that is one of `classes`, chosen by its `type`; `other` returns
    the class for a `type` that none of them lists. Tags are names of classes, since errors would
    take names of fields for parts of a path."""
    by_type = {
        kind: cls
        for cls in classes
        for kind in getattr(cls.model_fields["type"].annotation, "__args__", ())
    }

    def tag(value: Any) -> str:
        if isinstance(value, Body):
            return type(value).__name__
        kind = value.get("type") if isinstance(value, dict) else None
        known = by_type.get(kind) if isinstance(kind, str) else None
        return (known or other(kind)).__name__

    members = (Annotated[cls, Tag(cls.__name__)] for cls in classes)
    return Annotated[reduce(or_, members), Discriminator(tag)]
