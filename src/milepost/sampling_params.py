"""How the tokens of one request are chosen, and when its answer ends.

Names and meanings are vLLM's. A value that contradicts another or cannot be meant is refused here,
with InvalidRequestError; what depends on the model (token ids against its vocabulary) is checked by
`check_vocab`. Pure: no torch, no tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any, NoReturn, TypeVar

from milepost.errors import InvalidRequestError

MAX_LOGPROBS = 20
"""Most alternatives per token that `logprobs` may ask for."""

EXCLUDING_BIAS = -100
"""A token with this bias may not come at all, as with OpenAI."""

MAX_N = 16384
"""Most answers that one prompt may have: all of them are made before the first begins."""

_MAX_SEED = 2**63 - 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer: exactly one of the first four; raises InvalidRequestError."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The whole answer is one of these."""
    grammar: str | None = None
    """In llguidance's dialect of Lark."""
    starts_after: int | None = None
    """Token id behind which the form begins, such as the end of the reasoning."""
    field: str = "structured_outputs"
    """What the caller knows this as; messages begin with it."""

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

    def _refuse(self, name: str, value: object, instead: str) -> NoReturn:
        raise InvalidRequestError(f"{self.field}: {name}={value!r}: use {instead}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTokens:
    """The tokens between which an answer reasons; raises InvalidRequestError."""

    closes: int
    opens: int | None = None
    """None where only the prompt opens the reasoning."""
    is_open: bool = False
    """Whether the answer begins inside it."""

    def __post_init__(self) -> None:
        _check_int("reasoning.closes", self.closes, 0, "a token id")
        if self.opens is not None:
            _check_int("reasoning.opens", self.opens, 0, "a token id, or None")
        if not isinstance(self.is_open, bool):
            _refuse("reasoning.is_open", self.is_open, "True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; raises InvalidRequestError for values that contradict each other.

    `stop`, `stop_token_ids`, `allowed_token_ids` and `bad_words` are stored as tuples, whatever
    they were given as, and `logit_bias` as a copy.
    """

    temperature: float = 1.0
    """0 takes the likeliest token; larger values flatten the distribution."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this share of the probability."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 or -1 for all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability."""
    max_tokens: int | None = 16
    """Maximum length of the answer in tokens; `None` for as many as max_model_len leaves."""
    min_tokens: int = 0
    """Minimum length of the answer in tokens; before that only max_tokens ends it."""
    stop: Sequence[str] | str | None = None
    """Text that ends the answer when it appears."""
    reasoning: ReasoningTokens | None = None
    """Where the answer reasons: strings of `stop` count only behind that."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    seed: int | None = None
    """Makes this request's samples repeatable; otherwise, and for -1, they follow from the engine's
    seed."""
    n: int = 1
    """Answers per prompt, up to 16384."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many alternatives, up to 20."""
    prompt_logprobs: int | None = None
    """Report the same of the prompt's tokens. The whole prompt is computed for it: it hits nothing,
    and nothing hits it."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer has; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has it; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Above 1, makes tokens of the prompt and the answer less likely."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single token ids; from -100, which excludes a token, to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may come."""
    bad_words: Sequence[str] | None = None
    """Texts that the answer may not have: the last token of one may not come behind its others, as
    it is spelled at the beginning of a text or behind a space."""
    thinking_token_budget: int | None = None
    """Most tokens between `<think>` and `</think>`; then the reasoning is closed."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer keeps to."""
    detokenize: bool = True
    """Turn the answer's tokens into text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token that ended the answer in its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_shape_of_distribution()
        self._check_penalties()
        self._check_counts()
        self._check_seed()
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_token_ids())
        object.__setattr__(self, "allowed_token_ids", self._checked_allowed_token_ids())
        object.__setattr__(self, "bad_words", self._checked_bad_words())

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def excluded_ids(self) -> tuple[int, ...]:
        """Token ids that `logit_bias` excludes."""
        biases = self.logit_bias or {}
        return tuple(sorted(id_ for id_, bias in biases.items() if bias <= EXCLUDING_BIAS))

    @property
    def biases(self) -> dict[int, float]:
        """What is added to single logits."""
        biases = self.logit_bias or {}
        return {id_: -inf if bias <= EXCLUDING_BIAS else bias for id_, bias in biases.items()}

    @property
    def takes_preparing(self) -> bool:
        """Whether something of it is made before an answer begins, which steps do not wait for: a
        form, or the spelling of words."""
        return self.structured_outputs is not None or self.bad_words is not None

    def sample_seed(self, index: int, *, engine_seed: int, request_number: int) -> int:
        """The seed of answer `index` (below n): from `seed` if set, else from the other two.

        Hashed, so that neighbouring seeds and answers share nothing.
        """
        own = (self.seed,) if self.seed is not None else (engine_seed, request_number)
        words = ":".join(map(str, (*own, index)))
        return int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id is not one of the model's `vocab_size`."""
        _check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        _check_ids("logit_bias", self.logit_bias or (), vocab_size)
        _check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)

    def _check_types(self) -> None:
        """Of what nothing below looks into: what is no flag would end an engine's step."""
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                _refuse(name, value, "True or False")
        if not isinstance(self.logit_bias, Mapping | None):
            _refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers, or None")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            _refuse("structured_outputs", self.structured_outputs, "StructuredOutputs(...) or None")
        if not isinstance(self.reasoning, ReasoningTokens | None):
            _refuse("reasoning", self.reasoning, "ReasoningTokens(...) or None")

    def _check_shape_of_distribution(self) -> None:
        _check_number("temperature", self.temperature, 0, _LARGEST, "0 for greedy, or more")
        _check_number("top_p", self.top_p, 0, 1, "a share above 0 and up to 1; 1 is off")
        if self.top_p == 0:
            _refuse("top_p", self.top_p, "a share above 0 and up to 1; temperature=0 is greedy")
        _check_number("min_p", self.min_p, 0, 1, "a share from 0 to 1; 0 is off")
        _check_int("top_k", self.top_k, -1, "1 or more, or 0 or -1 for all tokens")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2, 2, "a number from -2 to 2; 0 is off")
        _check_number("repetition_penalty", self.repetition_penalty, 0, _LARGEST, _ABOVE_ZERO)
        if self.repetition_penalty == 0:
            _refuse("repetition_penalty", self.repetition_penalty, _ABOVE_ZERO)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0, "token ids as keys")
            _check_number(f"logit_bias[{token_id}]", bias, -100, 100, "a number from -100 to 100")

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "1 or more, or None for the most possible")
        _check_int("min_tokens", self.min_tokens, 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        _check_int("n", self.n, 1, f"1 to {MAX_N}")
        if self.n > MAX_N:
            _refuse("n", self.n, f"1 to {MAX_N}")
        if self.n > 1 and self.is_greedy:
            _refuse("n", self.n, "n=1 with temperature=0: greedy answers are all the same")
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0, "0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is None:
                continue
            _check_int(name, value, 0, f"0 to {MAX_LOGPROBS}, or None for none")
            if value > MAX_LOGPROBS:
                _refuse(name, value, f"0 to {MAX_LOGPROBS}")

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        _check_int("seed", self.seed, -_MAX_SEED - 1, "a number of 64 bits, or None for none")
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        elif self.seed > _MAX_SEED:
            _refuse("seed", self.seed, f"at most {_MAX_SEED}")

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "strings that are not empty")
        if stop and not self.detokenize:
            _refuse("stop", stop, "detokenize=True, or stop_token_ids: stop strings need text")
        return stop

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        token_ids = _listed("stop_token_ids", self.stop_token_ids)
        for token_id in token_ids:
            _check_int("stop_token_ids", token_id, 0, "token ids")
        return token_ids

    def _checked_allowed_token_ids(self) -> tuple[int, ...] | None:
        if self.allowed_token_ids is None:
            return None
        token_ids = _listed("allowed_token_ids", self.allowed_token_ids)
        for token_id in token_ids:
            _check_int("allowed_token_ids", token_id, 0, "token ids")
        if not token_ids:
            _refuse("allowed_token_ids", [], "at least one token id, or None for all")
        return token_ids

    def _checked_bad_words(self) -> tuple[str, ...] | None:
        words = _listed("bad_words", self.bad_words)
        for word in words:
            if not isinstance(word, str) or not word:
                _refuse("bad_words", word, "strings that are not empty")
            check_unicode(word, f"bad_words={word!r}")
        return words or None


def check_unicode(text: str, name: str = "the text") -> None:
    """Raise InvalidRequestError for a text with halves of characters: JSON's and Python's may have
    some, which neither tokenizers nor digests take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid Unicode: use whole characters ({error})"
        ) from error


_ABOVE_ZERO = "a finite number above 0; 1 is off"
_LARGEST = sys.float_info.max
_FLAGS = ("ignore_eos", "detokenize", "include_stop_str_in_output", "skip_special_tokens")


def _refuse(name: str, value: object, instead: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={value!r}: use {instead}")


def _listed(name: str, values: Iterable[T] | None) -> tuple[T, ...]:
    """As a tuple. A text is no list of its characters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable | None):
        _refuse(name, values, "a list")
    return tuple(values or ())


def _check_number(name: str, value: object, low: float, high: float, instead: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        _refuse(name, value, instead)


def _check_int(name: str, value: object, low: int, instead: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        _refuse(name, value, instead)


def _check_ids(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            _refuse(name, token_id, f"token ids below the model's vocabulary of {vocab_size}")
