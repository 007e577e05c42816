"""Tools of the Responses API, and the names by which a model knows them.

A namespace groups functions and custom tools. A model sees flat names; clients get theirs back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from milepost.server import tools as chat
from milepost.server.fields import AnyType, Body, LeftOutBody, ToolList, Unread, tagged

Name = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, Unread(False)] = None
    allowed_callers: Annotated[list[str] | None, Unread()] = None
    output_schema: Annotated[dict[str, Any] | None, Unread()] = None


class TextForm(Body):
    """The form of a custom tool's input. The model is told of it; nothing enforces it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _has_grammar(self) -> TextForm:
        if self.type == "grammar" and None in (self.syntax, self.definition):
            raise ValueError("a format of type 'grammar' needs syntax and definition")
        return self

    def changed(self) -> Iterator[str]:
        if self.type == "grammar":
            yield "definition"


class CustomTool(Body):
    """A tool that the client runs, whose input is text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: TextForm | None = None
    defer_loading: Annotated[bool | None, Unread(False)] = None
    allowed_callers: Annotated[list[str] | None, Unread()] = None


class Namespace(Body):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: ToolList[ResponseTool]
    """Functions and custom tools."""

    @model_validator(mode="after")
    def _is_flat(self) -> Namespace:
        if any(isinstance(tool, Namespace) for tool in self.tools):
            raise ValueError("a namespace in a namespace is not supported")
        return self

    @property
    def runnable(self) -> list[FunctionTool | CustomTool]:
        return [tool for tool in self.tools if isinstance(tool, FunctionTool | CustomTool)]


class OtherTool(LeftOutBody):
    """A tool for a server to run, or known only to some models; left out."""

    type: AnyType

    def left_out(self) -> Iterator[str]:
        yield self.type


ResponseTool: Any = tagged(
    FunctionTool, CustomTool, Namespace, OtherTool, other=lambda _: OtherTool
)


class NamedTool(LeftOutBody):
    """One of the allowed tools. Hosted tools have names of other kinds."""

    type: AnyType
    name: str | None = None
    namespace: str | None = None


class ChosenTool(Body):
    """The one tool to call, or with `allowed_tools` those that may be called."""

    type: AnyType
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: ToolList[NamedTool] | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> ChosenTool:
        if self.type == "allowed_tools":
            if self.mode is None or not self.tools:
                raise ValueError("a tool choice of type 'allowed_tools' needs mode and tools")
        elif self.type not in ("function", "custom"):
            raise ValueError(f"tools of type {self.type!r} are left out, so none can be chosen")
        elif self.name is None:
            raise ValueError(f"a tool choice of type {self.type!r} needs a name")
        return self


def flat(name: str, namespace: str | None) -> str:
    """Returns the name that the model knows."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def fields(self) -> dict[str, str]:
        fields = {"name": self.name}
        return fields if self.namespace is None else {**fields, "namespace": self.namespace}


class Names:
    """Maps the names that a model calls to the client's names."""

    def __init__(self, tools: Iterable[ResponseTool]) -> None:
        """Raises ValueError for two tools of one name."""
        self._own: dict[str, OwnName] = {}
        self._bare: dict[str, str] = {}
        for namespace, tool in _all(tools):
            name = flat(tool.name, namespace)
            if name in self._own:
                raise ValueError(f"tools: two are named {name!r}")
            is_custom = tool.type == "custom"
            self._own[name] = OwnName(name=tool.name, namespace=namespace, is_custom=is_custom)
            self._bare.setdefault(tool.name, name)

    def of_call(self, called: str) -> OwnName:
        """Returns the tool that a model means; it may leave out the namespace."""
        known = called if called in self._own else self._bare.get(called, called)
        return self._own.get(known, OwnName(name=called))

    def of_client(self, name: str, namespace: str | None) -> str:
        """Returns the model's name of a tool."""
        if namespace is not None or name in self._own:
            return flat(name, namespace)
        return self._bare.get(name, name)


def _all(tools: Iterable[ResponseTool]) -> Iterator[tuple[str | None, FunctionTool | CustomTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from ((tool.name, inner) for inner in tool.runnable)
        elif isinstance(tool, FunctionTool | CustomTool):
            yield None, tool


def for_chat(tools: Iterable[ResponseTool]) -> list[chat.Tool]:
    """Returns the tools as chat tools. The first of a namespace also has the namespace's
    description."""
    found = []
    for tool in tools:
        if isinstance(tool, Namespace):
            about = tool.description
            for inner in tool.runnable:
                found.append(_for_chat(inner, tool.name, about))
                about = None
        elif isinstance(tool, FunctionTool | CustomTool):
            found.append(_for_chat(tool, None, None))
    return found


def _for_chat(
    tool: FunctionTool | CustomTool, namespace: str | None, about: str | None
) -> chat.Tool:
    name = flat(tool.name, namespace)
    description = "\n\n".join(text for text in (about, tool.description) if text) or None
    if isinstance(tool, CustomTool):
        form = tool.format
        grammar = None
        if form is not None and form.syntax is not None and form.definition is not None:
            grammar = chat.Grammar(syntax=form.syntax, definition=form.definition)
        wanted = None if grammar is None else chat.CustomFormat(type="grammar", grammar=grammar)
        custom = chat.CustomDefinition(name=name, description=description, format=wanted)
        return chat.Tool(type="custom", custom=custom)
    function = chat.FunctionDefinition(
        name=name, description=description, parameters=tool.parameters, strict=tool.strict
    )
    return chat.Tool(type="function", function=function)


def choice_for_chat(choice: str | ChosenTool | None, names: Names) -> Any:
    """Returns the tool choice of a chat request."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "allowed_tools":
        return chat.NamedToolChoice(**_named(choice, names))
    allowed = [chat.AllowedTool(**_named(tool, names)) for tool in choice.tools or ()]
    assert choice.mode is not None, "allowed tools have a mode"
    wanted = chat.AllowedTools(mode=choice.mode, tools=allowed)
    return chat.NamedToolChoice(type="allowed_tools", allowed_tools=wanted)


def _named(tool: NamedTool | ChosenTool, names: Names) -> dict[str, Any]:
    chosen: dict[str, Any] = {"type": tool.type}
    if tool.type in ("function", "custom") and tool.name is not None:
        chosen[tool.type] = chat.FunctionName(name=names.of_client(tool.name, tool.namespace))
    return chosen
