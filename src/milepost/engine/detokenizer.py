"""Turns the tokens of one answer into text as they come, and finds the stop strings in it.

Two things make text wait: bytes that may be the beginning of a character, and text that may be the
beginning of a stop string. What has been handed out is never taken back, and at the end the whole
is what decoding all tokens at once gives (cut at the stop string, if one ended the answer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""What decoding shows for bytes that are no whole character (yet)."""


class AnswerText(Protocol):
    """The text side of one answer."""

    def append(self, token_id: int) -> str | None: ...
    def append_stop(self, token_id: int) -> None: ...
    def flush(self) -> None: ...
    def delta(self) -> str: ...
    @property
    def text(self) -> str: ...


def detokenizer_for(
    tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams
) -> AnswerText:
    """A `Detokenizer`, or `NoText` where no text is wanted or no tokenizer is there.

    Raises InvalidRequestError for stop strings without a tokenizer.
    """
    if tokenizer is None and params.stop:
        raise InvalidRequestError(
            f"stop={params.stop!r}: stop strings need a tokenizer; use stop_token_ids, "
            "or an engine without skip_tokenizer_init=True"
        )
    if tokenizer is None or not params.detokenize:
        return NoText()
    return Detokenizer(tokenizer, params)


class NoText:
    """Stands for a `Detokenizer` where answers are token ids only."""

    text = ""

    def append(self, token_id: int) -> None:  # noqa: ARG002
        return None

    def append_stop(self, token_id: int) -> None:
        """Nothing to show."""

    def flush(self) -> None:
        """Nothing to show."""

    def delta(self) -> str:
        return ""


class Detokenizer:
    """The text of one answer. Costs two decodings of a few tokens for each token appended.

    Call `append` for each token until it returns a stop string or the engine ends the answer; in
    the second case call `flush` once. A token that ends the answer (end of sequence, or one of
    stop_token_ids) goes to `append_stop`, which shows it only with include_stop_str_in_output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self._pieces = _Pieces(tokenizer, params.skip_special_tokens)
        self._stops = tuple(params.stop or ())
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._decoded = ""
        self._num_safe = 0
        self._num_handed_out = 0
        self._has_ended = False

    @property
    def text(self) -> str:
        """The text that is safe to show: after the end all of it, before it what cannot change."""
        return self._decoded[: self._num_safe]

    def delta(self) -> str:
        """The part of `text` that no earlier call returned."""
        start, self._num_handed_out = self._num_handed_out, self._num_safe
        return self._decoded[start : self._num_safe]

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completes, with which the answer ends.

        Of several, the one that begins first. None is found while the answer has no more than
        min_tokens tokens.
        """
        assert not self._has_ended, "no token follows the end of an answer"
        self._num_tokens += 1
        old_length = len(self._decoded)
        self._decoded += self._pieces.append(token_id)
        if not self._stops:
            self._num_safe = len(self._decoded)
            return None
        stop = self._find_stop(old_length) if self._num_tokens > self._min_tokens else None
        if stop is None:
            self._num_safe = max(self._num_safe, len(self._decoded) - self._num_held())
        return stop

    def append_stop(self, token_id: int) -> None:
        """Add the token that ends the answer, and flush."""
        if self._keeps_stop:
            self._decoded += self._pieces.append(token_id)
        self.flush()

    def flush(self) -> None:
        """The answer ended without a stop string: whatever waited becomes text."""
        self._decoded += self._pieces.flush()
        self._num_safe = len(self._decoded)
        self._has_ended = True

    def _find_stop(self, old_length: int) -> str | None:
        """Look for stop strings that end after `old_length`; cut the text at the first one."""
        found = [
            (start, stop)
            for stop in self._stops
            if (start := self._decoded.find(stop, max(0, old_length - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        start, stop = min(found, key=lambda match: match[0])
        self._decoded = self._decoded[: start + len(stop) * self._keeps_stop]
        self._num_safe = len(self._decoded)
        self._has_ended = True
        return stop

    def _num_held(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        if self._keeps_stop:
            return 0
        return max(_overlap(self._decoded, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, not all, of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _Pieces:
    """Decodes a growing sequence piece by piece.

    A token's text can depend on the tokens before it (a character's first bytes, a word's leading
    space), so each is decoded in a window: the tokens of the last complete piece, then those since.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._decode = _decoding(tokenizer, skip_special_tokens)
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0

    def append(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_whole = len(text.rstrip(_INCOMPLETE))
        if num_whole <= self._num_shown:
            return ""
        piece = text[self._num_shown : num_whole]
        self._num_shown = num_whole
        if num_whole == len(text):
            self._move_window()
        return piece

    def flush(self) -> str:
        """The text of what is left; incomplete bytes show as U+FFFD."""
        piece = self._decode(self._window)[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def _move_window(self) -> None:
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._decode(self._window))


def _decoding(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool
) -> Callable[[list[int]], str]:
    """Token ids to text, past the tokenizer's Python layer where that changes nothing."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        decode = tokenizer.backend_tokenizer.decode
    else:
        decode = tokenizer.decode
    return lambda token_ids: decode(token_ids, skip_special_tokens=skip_special_tokens)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)
