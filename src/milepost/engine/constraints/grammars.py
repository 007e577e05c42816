"""Turns the forms of answers into grammars, and keeps the compiled ones.

llguidance does the work. Building a grammar takes a millisecond for most schemas and minutes for a
hostile one; copying one takes microseconds. So a form is compiled once, by a thread that no step
waits for (llguidance releases the interpreter lock), and each answer follows a copy. A server first
has a process that can be killed compile the same form (`process`), so compiling it here is
known to end.

Copies share a lexer, which remembers what it has seen, up to a limit. So a form is used for a
limited number of tokens and then compiled again: no answer fails for what others have used up.

Does not know requests, HTTP, models or torch: the process imports little more than this.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from milepost.errors import ConfigError, InvalidRequestError, needing
from milepost.structured_outputs import MAX_LEN, StructuredOutputs

MAX_KNOWN = 128
"""Number of compiled forms to keep."""
MAX_KNOWN_LEN = 2**19
"""Largest total length of the kept grammars; a character takes about 150 bytes when compiled."""
MAX_FOLLOWED = 2**14
"""Number of tokens that copies of a form follow before it is compiled again."""
LIMITS = {
    "max_grammar_size": 5_000,
    "max_items_in_row": 2_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 20_000,
    "max_lexer_states": 2**16,
    "verbose_errors": False,
}
"""llguidance's bounds. A step waits for the masks of its answers, so the cost of one mask is
bounded, at about 20 ms, by counting. The time of one parser row grows with the square of its items,
so a row may have no more items than a grammar has symbols; a row that exceeds its bound ends the
answer. The other bounds are sums over the rows, and the lexer's work for one token. Lexer states
bound memory (100 MB): JSON schemas with bounded strings need 16,000."""
_TOLD_BY = {"expressions constructed": "step_lexer_fuel", "fuel": "step_lexer_fuel"}
"""Maps words of an error message to the limit in question, for errors that do not show
its number."""
_OF_LLGUIDANCE = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""Advice that only this program could follow."""
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}
"""Options for JSON schemas: white space is allowed but bounded, since small models may otherwise
write it without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The facts about a tokenizer that a grammar needs, as plain values."""

    tokenizer_json: str
    num_tokens: int
    end_token_ids: tuple[int, ...]


def vocabulary_of(tokenizer: Any, vocab_size: int, end_token_ids: tuple[int, ...]) -> Vocabulary:
    """Returns the vocabulary of a fast tokenizer, which may have tokens beyond the model's
    `vocab_size`. Raises ConfigError for one that is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("structured outputs need a fast tokenizer (a tokenizer.json)")
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    plain["padding"] = plain["truncation"] = None
    ids = tuple(end_token_ids) or (tokenizer.eos_token_id,)
    return Vocabulary(
        tokenizer_json=json.dumps(plain),
        num_tokens=max(vocab_size, len(tokenizer)),
        end_token_ids=tuple(id_ for id_ in ids if id_ is not None),
    )


def llguidance() -> Any:
    """Returns the llguidance module. Raises ConfigError if it is not installed."""
    with needing("a structured output", "server"):
        import llguidance as library
    return library


@cache
def _limits() -> Any:
    return llguidance()._lib.LLParserLimits(**LIMITS)


def grammar_of(wanted: StructuredOutputs) -> str:
    """Returns a constraint as a grammar of llguidance. Raises InvalidRequestError."""
    try:
        kind, text = _text_of(wanted)
        if len(text) > MAX_LEN:
            raise ValueError(f"it has {len(text)} characters: use {MAX_LEN} or fewer")
        matcher = llguidance().LLMatcher
        if kind == "json":
            return str(matcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS))
        make = matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark
        return str(make(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{wanted.field}: {_first_line(str(error))}") from error


def _text_of(wanted: StructuredOutputs) -> tuple[str, str]:
    """Returns the kind and text of a form. Equal forms have equal texts."""
    if wanted.json is not None:
        schema = wanted.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if '"format"' in text and len(text) <= MAX_LEN:
            text = json.dumps(without_unknown_formats(json.loads(text)))
        return "json", text
    if wanted.regex is not None:
        return "regex", wanted.regex
    if wanted.grammar is not None:
        return "lark", wanted.grammar
    options = " | ".join(json.dumps(choice) for choice in wanted.choice or ())
    return "lark", f"start: {options}"


ENFORCED: Final = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri",
    "uuid",
))  # fmt: skip
"""Formats of strings in a JSON schema that llguidance enforces. It refuses all others, which
validators skip; schemas that libraries make are full of them (`password`, `binary`, `regex`)."""
_DATA: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_NAMED: Final = frozenset((
    "$defs", "definitions", "dependentSchemas", "patternProperties", "properties",
))  # fmt: skip
"""Keywords whose values map names to schemas."""


def without_unknown_formats(schema: Any) -> Any:
    """Returns a copy of a schema without the formats that are not enforced."""
    top: list[Any] = [schema]
    todo: list[tuple[Any, Any, bool]] = [(top, 0, True)]
    while todo:
        holder, place, is_schema = todo.pop()
        value = holder[place]
        if isinstance(value, Mapping):
            copy: Any = dict(value)
            format_ = copy.get("format")
            if is_schema and isinstance(format_, str) and format_ not in ENFORCED:
                del copy["format"]
            inside = (key for key in copy if not (is_schema and key in _DATA))
            todo += [(copy, key, not (is_schema and key in _NAMED)) for key in inside]
        elif isinstance(value, list):
            copy = list(value)
            todo += [(copy, index, True) for index in range(len(copy))]
        else:
            continue
        holder[place] = copy
    return top[0]


class Compiler:
    """llguidance with one tokenizer. Raises ConfigError if it does not take the tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        library = llguidance()
        self._matcher = library.LLMatcher
        try:
            self._tokenizer = library.LLTokenizer(
                vocabulary.tokenizer_json,
                n_vocab=vocabulary.num_tokens,
                eos_token=list(vocabulary.end_token_ids) or None,
            )
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"structured outputs cannot use this tokenizer: {_first_line(str(error))}"
            ) from error
        added = json.loads(vocabulary.tokenizer_json).get("added_tokens") or ()
        self.spelled: Mapping[int, int] = {
            token["id"]: self._tokenizer.greedy_tokenize(token["content"])[0]
            for token in added
            if token["content"]
        }
        """Maps each added token to the first of the tokens that spell it as text."""

    def compile(self, grammar: str) -> Any:
        """Returns a matcher at its start. Raises ValueError for an invalid grammar. Releases the
        interpreter lock meanwhile."""
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        problem = problem_of(matcher)
        if problem is not None:
            raise ValueError(problem)
        return matcher


def problem_of(matcher: Any) -> str | None:
    """Returns the reason for which a matcher has stopped, in one line."""
    if not matcher.is_error():
        return None
    line = _first_line(matcher.get_error().removeprefix("Parser Error: "))
    if line == "NoExtensionBias":
        return "no text completes it: does it refer to itself without an end, as #: {$ref: #} does?"
    limits = {str(limit): name for name, limit in LIMITS.items()} | _TOLD_BY
    names = [name for sign, name in limits.items() if sign in line]
    if names:
        return f"too complex: {line} ({names[0]})"
    is_bound = any(word in line for word in ("too many", "max is", "too large", "limit"))
    return f"too complex: {line}" if is_bound else line


class CompiledForm:
    """A compiled form. Each answer follows a copy."""

    def __init__(self, matcher: Any, length: int, spelled: Mapping[int, int]) -> None:
        self._matcher = matcher
        self.length = length
        self.spelled = spelled
        self.num_followed = 0
        """Number of tokens that the copies have followed."""

    @property
    def is_worn(self) -> bool:
        return self.num_followed >= MAX_FOLLOWED

    def wear_out(self) -> None:
        """Retires the form: no new answer will use it."""
        self.num_followed = MAX_FOLLOWED

    def copy(self) -> Any:
        """Returns a matcher at its start."""
        return self._matcher.deep_copy()


class Forms:
    """Compiles the forms of one engine and keeps the most recently used. Safe to use from several
    threads. The compiler is made with the first form."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], CompiledForm] = OrderedDict()
        self.num_compiled = 0

    def prepare(self) -> Compiler:
        """Prepares the compiler for the tokenizer now, rather than with the first form. Raises
        ConfigError."""
        if self._compiler is None:
            self._compiler = Compiler(self._vocabulary)
        return self._compiler

    def compile(self, wanted: StructuredOutputs) -> CompiledForm:
        """Returns the compiled form. Raises InvalidRequestError for one that cannot be enforced."""
        try:
            key = _text_of(wanted)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{wanted.field}: {_first_line(str(error))}") from error
        with self._lock:
            known = self._known.get(key)
            if known is not None and not known.is_worn:
                self._known.move_to_end(key)
                return known
        grammar = grammar_of(wanted)
        try:
            compiler = self.prepare()
            form = CompiledForm(compiler.compile(grammar), len(grammar), compiler.spelled)
        except (ValueError, ConfigError) as error:
            raise InvalidRequestError(f"{wanted.field}: {error}") from error
        with self._lock:
            self.num_compiled += 1
            self._known[key] = form
            self._known.move_to_end(key)
            while self._is_full():
                self._known.popitem(last=False)
        return form

    def _is_full(self) -> bool:
        total = sum(form.length for form in self._known.values())
        return len(self._known) > MAX_KNOWN or (total > MAX_KNOWN_LEN and len(self._known) > 1)


def _first_line(text: str) -> str:
    """Returns an error in one line. The fault of a regular expression stands below the first
    line."""
    lines = text.strip().splitlines() or ["it cannot be read"]
    why = [line.removeprefix("error:") for line in lines[1:] if line.startswith("error:")]
    line = lines[0] + "".join(why) if lines[0].endswith(":") else lines[0]
    return line.replace(_OF_LLGUIDANCE, " where several may match: use anyOf")
