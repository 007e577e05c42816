"""Calls as a model would write them, grammars as an engine keeps to them, answers read back."""

from __future__ import annotations

import json
import random

import llguidance.hf
import numpy as np
from llguidance import LLMatcher
from transformers import AutoTokenizer

from milepost.models.folder import EMBEDDED_MODEL
from milepost.server.parsing import lark
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.events import CallArguments, CallStart, Content, Reasoning


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _json(value):
    """Returns JSON as a model may write it: llguidance takes the character U+007F only escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def hermes(name, arguments):
    call = _json({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def xml(name, arguments, *, python_words=False):
    """As the templates write it: `None` and `True` in the older ones."""
    parts = "".join(
        f"<parameter={key}>\n{_text(value, python_words)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def _text(value, python_words):
    if isinstance(value, str):
        return value
    if python_words and (value is None or isinstance(value, bool)):
        return str(value)
    return _json(value)


def ling(name, arguments):
    """As the template writes it: strings as they are, and JSON of everything else."""
    parts = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value, False)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{parts}</tool_call>"


def kimi(name, arguments):
    written = _json(arguments)
    call = f"functions.{name}:0<|tool_call_argument_begin|>{written}"
    call = f"<|tool_call_begin|>{call}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def python(name, arguments, *, write=repr):
    return f"{name}({', '.join(f'{key}={write(value)}' for key, value in arguments.items())})"


def lfm2(name, arguments, **options):
    return f"<|tool_call_start|>[{python(name, arguments, **options)}]<|tool_call_end|>"


def olmo3(name, arguments, **options):
    return f"<function_calls>\n{python(name, arguments, **options)}\n</function_calls>"


WRITERS = {"hermes": hermes, "qwen3_xml": xml}


def parsed(form, pieces, tools, *, is_open=False, is_cut=False):
    """(reasoning, content, [[name, arguments]])"""
    parser = form.parser(tools=tools, is_open=is_open)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(is_cut=is_cut)
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
    return reasoning, content, calls


def cut(text, pick):
    """A text in up to ten pieces."""
    places = sorted(pick.sample(range(len(text) + 1), min(len(text), pick.randint(0, 9))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


class Grammar:
    """Of demanded calls, with the embedded model's vocabulary."""

    tokenizer = None

    def __init__(self, calls, tools, *, is_single=True):
        form = AnswerFormat(reasoning="none", calls=calls).tool_calls
        self._compile(["start: calls", *form.grammar(tools, lark.text, is_single=is_single)])

    @classmethod
    def of(cls, rules):
        self = cls.__new__(cls)
        self._compile(rules)
        return self

    def _compile(self, rules):
        text = "\n".join(rules)
        cls = type(self)
        if cls.tokenizer is None:
            cls.tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
            cls.library = llguidance.hf.from_tokenizer(cls.tokenizer)
        self._matcher = LLMatcher(cls.library, LLMatcher.grammar_from_lark(text), log_level=0)
        assert not self._matcher.is_error(), (self._matcher.get_error(), text)

    def accepts(self, text):
        matcher = self._matcher.deep_copy()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def sample(self, seed, likely, end, max_tokens=120):
        """A random text that is accepted, or None if none came about."""
        matcher, pick = self._matcher.deep_copy(), random.Random(seed)
        common = {i for text in likely for i in self.tokenizer.encode(text)}
        closing = self.tokenizer.encode(end)
        tokens = []
        while len(tokens) < max_tokens:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
            if matcher.is_stopped() or self.tokenizer.eos_token_id in allowed:
                return self.tokenizer.decode(tokens)
            following = closing
            if pick.random() < 0.8 or matcher.validate_tokens(closing) < len(closing):
                likeliest = allowed & common if pick.random() < 0.95 else set()
                following = [pick.choice(sorted(likeliest or allowed))]
            assert matcher.consume_tokens(following)
            tokens += following
        return None
