"""Finds the variables that a chat template reads; a request that sets another one is refused."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.compiler import Frame
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

from milepost.server.errors import HttpError


class _Generation(Extension):
    """The tag that transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(TrackingCodeGenerator):
    """Finds names as Jinja does, but computes nothing: a template's constants may take for ever to
    compute, and nothing could end that here."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        self._visit_children(node, frame)

    def visit_EvalContextModifier(self, node: nodes.Node, frame: Frame) -> None:  # noqa: N802
        self._visit_children(node, frame)

    visit_ScopedEvalContextModifier = visit_EvalContextModifier  # noqa: N815

    def _visit_children(self, node: nodes.Node, frame: Frame) -> None:
        for child in node.iter_child_nodes():
            self.visit(child, frame)


def variables_of(template: object) -> frozenset[str] | None:
    """Returns the names that a template may read from outside, or None if they are unknown.

    A name that it sets itself on some paths, and reads, is included. Several templates in one
    mapping are unknown: the request decides which one is used.
    """
    if not isinstance(template, str):
        return None
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    names = _Names(environment)
    names.optimizer = None
    try:
        names.visit(environment.parse(template))
    except (TemplateError, RecursionError):
        return None
    return frozenset(names.undeclared_identifiers)


def check_template_kwargs(kwargs: Mapping[str, Any], variables: Collection[str] | None) -> None:
    """Raises HttpError for variables that requests may not set, or the template does not read.
    False and null are always accepted."""
    for name, value in kwargs.items():
        if name in _not_for_requests():
            raise _refusal(name, "requests cannot set it")
        if variables is not None and name not in variables and value not in (None, False):
            near = get_close_matches(name, sorted(set(variables) - _not_for_requests()), n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise _refusal(name, f"this model's chat template reads no such variable{hint}")


def with_effort(
    kwargs: Mapping[str, Any], effort: str | None, variables: Collection[str] | None
) -> dict[str, Any]:
    """Returns `kwargs` with `reasoning_effort`, and `enable_thinking` derived from it, if the
    template reads them and the request did not set them."""
    if effort is None or variables is None:
        return dict(kwargs)
    found = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**{name: value for name, value in found.items() if name in variables}, **kwargs}


def _refusal(name: str, why: str) -> HttpError:
    field = f"chat_template_kwargs.{name}"
    return HttpError(400, f"{field}: {why}", param=field)


@cache
def _not_for_requests() -> frozenset[str]:
    """Returns the variables that requests may not set: they change how the template is applied, or
    are always passed to it."""
    from transformers import PreTrainedTokenizerBase  # slow, but imported by now

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    named = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    given = {"messages", "conversations", "bos_token", "eos_token", "raise_exception"}
    return frozenset(named | given)
