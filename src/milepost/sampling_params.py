"""Parameters of one request: how its tokens are chosen, and when its answer ends.

Names and meanings are vLLM's. Values that contradict each other or mean nothing are refused here,
with InvalidRequestError; `check_vocab` checks token ids against the model's vocabulary. Pure: no
torch, no tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from numbers import Real
from typing import Any

from milepost.checks import check_ids, check_int, check_number, check_unicode, listed, refuse
from milepost.structured_outputs import StructuredOutputs
from milepost.vllm_keywords import SAMPLING, with_vllm_keywords

MAX_LOGPROBS = 20
"""Limit on `logprobs`: alternatives per token."""

EXCLUDING_BIAS = -100
"""A token with this bias is never sampled, as with OpenAI."""

MAX_N = 16384
"""Limit on the answers to one prompt: all of them are set up before the first begins."""

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTokens:
    """The tokens around an answer's reasoning. Raises InvalidRequestError."""

    closes: int
    opens: int | None = None
    """None if only the prompt opens the reasoning."""
    is_open: bool = False
    """Whether the answer begins inside the reasoning."""

    def __post_init__(self) -> None:
        check_int("reasoning.closes", self.closes, 0, "a token id")
        if self.opens is not None:
            check_int("reasoning.opens", self.opens, 0, "a token id, or None")
        if not isinstance(self.is_open, bool):
            refuse("reasoning.is_open", self.is_open, "True or False")


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
    """Where the reasoning is: strings of `stop` count only after it."""
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
    """Report log-probabilities of the prompt's tokens too. The whole prompt is computed for it: it
    hits nothing, and nothing hits it."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of the answer's tokens so far; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has it; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the answer less likely if it is above 1."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single token ids; from -100, which excludes a token, to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be sampled."""
    bad_words: Sequence[str] | None = None
    """Strings that must not appear, as spelled at the beginning of a text or after a space: the
    last token of each is never sampled after its others."""
    thinking_token_budget: int | None = None
    """Limit on the tokens between `<think>` and `</think>`; then the reasoning is closed."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer; a mapping of its fields is accepted too."""
    detokenize: bool = True
    """Turn the answer's tokens into text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token that ended the answer in its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, Mapping):
            form = StructuredOutputs(**self.structured_outputs)
            object.__setattr__(self, "structured_outputs", form)
        for name in _NUMBERS:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            biases = {_plain(id_): _plain(bias) for id_, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)
        self._check_types()
        self._check_shape_of_distribution()
        self._check_penalties()
        self._check_counts()
        self._check_seed()
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._token_ids("stop_token_ids"))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", self._token_ids("allowed_token_ids"))
            if not self.allowed_token_ids:
                refuse("allowed_token_ids", [], "at least one token id, or None for all")
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
        """Values added to the logits of single tokens."""
        biases = self.logit_bias or {}
        return {id_: -inf if bias <= EXCLUDING_BIAS else bias for id_, bias in biases.items()}

    @property
    def takes_preparing(self) -> bool:
        """Whether a form or the spelling of words is prepared before the answer begins, while steps
        go on."""
        return self.structured_outputs is not None or self.bad_words is not None

    def sample_seed(self, index: int, *, engine_seed: int, request_number: int) -> int:
        """Returns the seed of answer `index` (below n), from `seed` if set, else from the other
        two. It is a hash, so neighbouring seeds and answers share nothing."""
        source = (self.seed,) if self.seed is not None else (engine_seed, request_number)
        words = ":".join(map(str, (*source, index)))
        return int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token id is not one of the model's `vocab_size`."""
        check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)

    def _check_types(self) -> None:
        """Checks what nothing below looks at: another type would end an engine's step."""
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                refuse(name, value, "True or False")
        if not isinstance(self.logit_bias, Mapping | None):
            refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers, or None")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            refuse("structured_outputs", self.structured_outputs, "StructuredOutputs(...) or None")
        if not isinstance(self.reasoning, ReasoningTokens | None):
            refuse("reasoning", self.reasoning, "ReasoningTokens(...) or None")

    def _check_shape_of_distribution(self) -> None:
        check_number("temperature", self.temperature, 0, _LARGEST, "0 for greedy, or more")
        check_number("top_p", self.top_p, 0, 1, "a share above 0 and up to 1; 1 is off")
        if self.top_p == 0:
            refuse("top_p", self.top_p, "a share above 0 and up to 1; temperature=0 is greedy")
        check_number("min_p", self.min_p, 0, 1, "a share from 0 to 1; 0 is off")
        check_int("top_k", self.top_k, -1, "1 or more, or 0 or -1 for all tokens")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -2, 2, "a number from -2 to 2; 0 is off")
        check_number("repetition_penalty", self.repetition_penalty, 0, _LARGEST, _ABOVE_ZERO)
        if self.repetition_penalty == 0:
            refuse("repetition_penalty", self.repetition_penalty, _ABOVE_ZERO)
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("logit_bias", token_id, 0, "token ids as keys")
            check_number(f"logit_bias[{token_id}]", bias, -100, 100, "a number from -100 to 100")

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, "1 or more, or None for the most possible")
        check_int("min_tokens", self.min_tokens, 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        check_int("n", self.n, 1, f"1 to {MAX_N}", high=MAX_N)
        if self.n > 1 and self.is_greedy:
            refuse("n", self.n, "n=1 with temperature=0: greedy answers are all the same")
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, 0, "0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                hint = f"0 to {MAX_LOGPROBS}, or None for none"
                check_int(name, value, 0, hint, high=MAX_LOGPROBS)

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        check_int("seed", self.seed, -_MAX_SEED - 1, "a number of 64 bits, or None for none")
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        elif self.seed > _MAX_SEED:
            refuse("seed", self.seed, f"at most {_MAX_SEED}")

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else listed("stop", self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                refuse("stop", text, "strings that are not empty")
        if stop and not self.detokenize:
            refuse("stop", stop, "detokenize=True, or stop_token_ids: stop strings need text")
        return stop

    def _token_ids(self, name: str) -> tuple[int, ...]:
        token_ids = tuple(map(_plain, listed(name, getattr(self, name))))
        for token_id in token_ids:
            check_int(name, token_id, 0, "token ids")
        return token_ids

    def _checked_bad_words(self) -> tuple[str, ...] | None:
        words = listed("bad_words", self.bad_words)
        for word in words:
            if not isinstance(word, str) or not word:
                refuse("bad_words", word, "strings that are not empty")
            check_unicode(word, f"bad_words={word!r}")
        return words or None


def _plain(value: Any) -> Any:
    """Returns Python's number for one of numpy's."""
    if isinstance(value, int | float | None) or not isinstance(value, Real):
        return value
    return getattr(value, "item", lambda: value)()


_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "n", "logprobs",
    "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "thinking_token_budget",
)  # fmt: skip
"""Fields that may be numpy's numbers, such as a seed from one of its generators."""
_ABOVE_ZERO = "a finite number above 0; 1 is off"
_LARGEST = sys.float_info.max
_FLAGS = ("ignore_eos", "detokenize", "include_stop_str_in_output", "skip_special_tokens")


SamplingParams.__init__ = with_vllm_keywords(SAMPLING)(  # type: ignore[method-assign]
    SamplingParams.__init__
)
