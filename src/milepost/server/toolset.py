"""Which tools of a request the model is shown, which it may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.server.messages import tools_for_template
from milepost.server.parsing import lark
from milepost.server.protocol import ChatRequest
from milepost.server.tools import NamedToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools as functions; None for no tools."""

    shown: Sequence[Mapping[str, Any]] | None
    """In the prompt. Tools that may not be called stay there: they stand ahead of the
    conversation, and without them nothing of it would be in the cache."""
    callable: Sequence[Mapping[str, Any]] | None
    customs: frozenset[str]
    """Names of those whose input is text."""
    is_demanded: bool
    """The answer is a call."""
    is_single: bool
    """One call at most."""

    @property
    def is_bound(self) -> bool:
        """Whether calls are kept to a form although the answer may have none: the arguments of a
        strict function match its schema, and tools beside the allowed ones are not called."""
        tools = self.callable or ()
        is_partial = len(tools) < len(self.shown or ())
        return bool(tools) and (is_partial or any(map(lark.is_strict, tools)))


def toolset_of(request: ChatRequest) -> Toolset:
    tools, choice = tools_for_template(request.tools), request.tool_choice
    callable_, is_demanded = tools, choice == "required"
    is_named = False
    if choice == "none":
        callable_ = None
    elif isinstance(choice, NamedToolChoice):
        allowed = choice.allowed_tools
        is_named = allowed is None
        is_demanded = allowed is None or allowed.mode == "required"
        names = [choice.name] if allowed is None else [tool.name for tool in allowed.tools]
        callable_ = [tool for tool in tools or () if tool["function"]["name"] in names]
    return Toolset(
        shown=tools,
        callable=callable_,
        customs=frozenset(
            tool.custom.name for tool in request.tools or () if tool.custom is not None
        ),
        is_demanded=is_demanded,
        is_single=is_named or request.parallel_tool_calls is False,
    )
