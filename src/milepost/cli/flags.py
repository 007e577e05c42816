"""Makes command-line flags from the configuration's dataclasses.

There is one flag per field, with the field's name in dashes, its type, its default, and the
docstring under it as help. So a default and its description are in one place, and a new field is a
new flag.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import CoercionError, Group, Parameter, Token, convert
from docstring_parser import parse_from_object

from milepost.config import EngineConfig
from milepost.errors import ConfigError

C = TypeVar("C")

SHORT = {"tensor_parallel_size": "-tp"}
"""Fields whose flags have a second name, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags(Generic[C]):
    """The flags of one dataclass.

    `renamed` maps a field to another flag name if two dataclasses share a field name; `left_out`
    names fields that only the Python API has; `defaults` are the command's own.
    """

    config: type[C]
    group: Group
    renamed: Mapping[str, str]
    left_out: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    with_negative: Collection[str] = ()
    """Fields that are off by default but also have a `--no-` flag."""

    def parameters(self) -> list[inspect.Parameter]:
        """Returns one keyword-only parameter per flag, annotated for cyclopts."""
        config: type = self.config
        hints, docs = get_type_hints(config), field_docs(config)
        return [
            self._parameter(field, hints[field.name], docs.get(field.name, ""))
            for field in fields(self.config)  # type: ignore[arg-type]
            if field.name not in self.left_out
        ]

    def build(self, values: Mapping[str, Any]) -> C:
        """Builds the dataclass from a call's values by parameter name. Raises the dataclass's
        errors."""
        return self.config(**self.given(values))

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that the command line or the command itself sets, with
        their values."""
        settable = [field.name for field in fields(self.config) if field.name not in self.left_out]  # type: ignore[arg-type]
        names = {name: self._name(name) for name in settable}
        named = {field: values[name] for field, name in names.items() if name in values}
        return {**self.defaults, **named}

    def _name(self, field: str) -> str:
        return self.renamed.get(field, field)

    def _parameter(self, field: Field[Any], hint: Any, doc: str) -> inspect.Parameter:
        assert field.default is not MISSING, f"a flag needs a default: {field.name}"
        says_no = field.name in self.with_negative
        alias = SHORT.get(field.name)
        flag = Parameter(
            alias=alias,
            group=self.group,
            help=doc,
            negative=() if field.default is False and not says_no else None,
            negative_iterable=(),
            converter=whole(_flag_type(hint)) if _is_whole(hint) else None,
        )
        return inspect.Parameter(
            self._name(field.name),
            inspect.Parameter.KEYWORD_ONLY,
            default=self.defaults.get(field.name, field.default),
            annotation=Annotated[_flag_type(hint), flag],
        )


def whole(hint: Any) -> Callable[[Any, Sequence[Token]], Any]:
    """Makes a converter to whole numbers of type `hint`. It raises CoercionError for a fraction,
    which cyclopts would round."""

    def converted(_kind: Any, tokens: Sequence[Token]) -> Any:
        for token in tokens:
            if _has_fraction(token.value):
                raise CoercionError(token=token, target_type=int)
        return convert(hint, tokens)

    return converted


Whole = Annotated[int, Parameter(converter=whole(int))]
WholeOrNone = Annotated[int | None, Parameter(converter=whole(int | None))]
"""Types for flags that are not made from a field."""


def _has_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:
        return False  # the converter explains why it is not a number


def _is_whole(hint: Any) -> bool:
    return any(int in (each, *get_args(each)) for each in (hint, *get_args(hint)))


ENGINE = Flags(config=EngineConfig, group=Group("Engine", sort_key=3), renamed={})
"""The engine's flags, for each command that opens or plans one."""

ModelArgument = Annotated[str | None, Parameter(help="The same as --model.")]
"""A model that is named without a flag; see `one_model`."""


def add_flags(command: Callable[..., C], flags: Sequence[Flags[Any]]) -> Callable[..., C]:
    """Adds these flags to a command, in place of its `**values`; returns the command."""
    existing = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    added = [parameter for group in flags for parameter in group.parameters()]
    command.__signature__ = inspect.Signature(existing + added)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in existing + added}
    return command


def one_model(behind_command: str | None, flag: str | None) -> str | None:
    """Returns the model of a command line. Raises ConfigError if it names two."""
    if behind_command is not None and flag not in (None, behind_command):
        raise ConfigError(f"{behind_command} --model {flag}: name one model")
    return flag if behind_command is None else behind_command


@functools.cache
def field_docs(config: type) -> Mapping[str, str]:
    """Returns the docstring under each field of a dataclass, as one paragraph."""
    docs: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        for described in parse_from_object(kind).params:
            if described.description:
                docs[described.arg_name] = " ".join(described.description.split())
    return docs


def _flag_type(hint: Any) -> Any:
    """Returns the type that a flag parses: for `Sequence[X] | X | None` a list that grows with each
    use, for a dataclass its JSON text."""
    for member in get_args(hint):
        if is_dataclass(member):
            return str | None
        if get_origin(member) is Sequence:
            item: Any = get_args(member)[0]
            return list[item] | None
    return hint
