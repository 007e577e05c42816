"""Renders conversations in a process that can be ended (`process`), within limits.

A chat template is a program that somebody else wrote. Jinja's sandbox keeps it from the system, but
limits neither its loops nor the cost of one expression: `'x' * 10**10` and `([0] * n).count(1)` run
in C, where nothing in the process can interrupt them. So templates have limits of processor time
and memory. Beyond them, Python code ends with an exception, which leaves the process intact, and C
code is ended by a signal, with the process.
"""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import msgspec

from milepost.engine.child import bound_memory
from milepost.engine.text import chat
from milepost.errors import InvalidRequestError

MAX_BYTES = 2 * 2**30
"""Bytes that rendering may allocate, besides what the process already has."""


class Unrendered(msgspec.Struct, array_like=True, frozen=True, tag="conversation"):
    """A conversation to render. `content` is JSON, since messages may have numbers of any size."""

    content: bytes
    max_chars: int
    """Largest length of the rendered text; a longer one is refused."""
    max_tokenized: int
    """Largest length of a text that this process also tokenizes."""
    limit_s: float
    """Limit of processor time, in seconds."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a tokenizer that render a conversation."""

    chat_template: str | dict[str, str]
    special_tokens: dict[str, Any]
    special: str | None
    """Pattern of texts in messages that must not be read as special tokens."""


class Rendered(msgspec.Struct, array_like=True, frozen=True):
    """A rendered conversation, or the reason for its refusal."""

    composed: chat.Composed = chat.Composed(pieces=[], ends=[])
    refusal: str = ""
    is_slow: bool = False
    """Whether it was refused because rendering takes too long."""


def too_slow(limit_s: float) -> Rendered:
    """Returns the outcome of a conversation whose rendering was cut off."""
    return Rendered(
        refusal=f"the chat template takes more than {limit_s:g} seconds to render the messages",
        is_slow=True,
    )


def content_of(messages: Sequence[Mapping[str, Any]], **options: Any) -> bytes:
    """Returns the content of `Unrendered` for messages and options of `chat.compose`. Raises
    InvalidRequestError."""
    try:
        return json.dumps({"messages": messages, **options}).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"messages: {error}") from error


# --- in the process -------------------------------------------------------------------------------


class _TooSlow(BaseException):
    """Rendering has taken too long. No handler of `Exception` on the way catches it."""


class Renderer:
    """Renders one template. The first renderer imports transformers."""

    def __init__(self, template: Template) -> None:
        from milepost.engine.text.tokenizer import without_torch

        without_torch()
        import transformers.utils.chat_template_utils  # noqa: F401 - else the first template pays
        from transformers import PreTrainedTokenizerBase as KnownTokenizer

        class Stand:
            """The part of a tokenizer that renders."""

            chat_template = template.chat_template
            special_tokens_map = template.special_tokens
            get_chat_template = KnownTokenizer.get_chat_template
            apply_chat_template = KnownTokenizer.apply_chat_template

        self._tokenizer: Any = Stand()
        self._special = None if template.special is None else re.compile(template.special)
        self._memory = resource.getrlimit(resource.RLIMIT_AS)
        signal.signal(signal.SIGPROF, _stop)

    def render(self, asked: Unrendered) -> Rendered:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * asked.limit_s)  # ends the process
            bound_memory(MAX_BYTES)
            signal.setitimer(signal.ITIMER_PROF, asked.limit_s)
            rendered = Rendered(self._composed(asked))
            signal.setitimer(signal.ITIMER_PROF, 0)
        except InvalidRequestError as error:
            return Rendered(refusal=str(error))
        except MemoryError:
            return Rendered(
                refusal=f"the chat template takes more than {MAX_BYTES >> 20} MiB to render the "
                "messages"
            )
        except _TooSlow:
            return too_slow(asked.limit_s)
        finally:  # whichever of these an alarm may have interrupted
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, self._memory)
        return rendered

    def _composed(self, asked: Unrendered) -> chat.Composed:
        def check(text: str) -> None:
            if len(text) > asked.max_chars:
                raise InvalidRequestError(
                    f"the chat template makes {len(text)} characters of the messages, of "
                    f"{asked.max_chars} at most"
                )

        content = json.loads(asked.content)
        messages = content.pop("messages")
        return chat.compose(
            self._tokenizer, messages, special=self._special, check=check, **content
        )


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _TooSlow
