"""Turns the tokens of one answer into text as they come, and finds the stop strings in it.

Two things delay text: bytes that may be the beginning of a character, and text that may be the
beginning of a stop string. Text is never retracted, and in the end all of it equals what decoding
all tokens at once returns (cut at the stop string, if one ended the answer). Stop strings count
only after the reasoning, if the request names the tokens around it.
"""

from __future__ import annotations

from enum import Enum, auto

from milepost.engine.text.token_texts import INCOMPLETE, TokenTexts
from milepost.sampling_params import ReasoningTokens, SamplingParams

_MAX_PENDING = 32
"""Largest number of tokens that wait for the rest of a character, which has four bytes at most."""


def detokenizer_for(texts: TokenTexts | None, params: SamplingParams) -> Detokenizer:
    """Returns a `TextDetokenizer`, or `NoText` if no text is wanted or there is no tokenizer."""
    if texts is None or not params.detokenize:
        return NoText()
    return TextDetokenizer(texts, params)


class NoText:
    """Stands for a `TextDetokenizer` where answers are token ids only."""

    def append(self, token_id: int) -> None:  # noqa: ARG002
        return None

    def append_stop(self, token_id: int) -> None:
        """Does nothing: there is no text."""

    def flush(self) -> None:
        """Does nothing: there is no text."""

    def delta(self) -> str:
        return ""


class TextDetokenizer:
    """The text of one answer. Costs a look into a table for a token whose text is known by itself,
    else two decodings of a few tokens.

    Call `append` for each token until it returns a stop string or the engine ends the answer; in
    the second case call `flush` once. A token that ends the answer (end of sequence, or one of
    stop_token_ids) goes to `append_stop`, which shows it only with include_stop_str_in_output.
    """

    def __init__(self, texts: TokenTexts, params: SamplingParams) -> None:
        self._pieces = _TokenDecoder(texts, params.skip_special_tokens)
        self._stops = [_Stop(text) for text in params.stop or ()]
        self._behind = None
        if self._stops and params.reasoning is not None:
            self._behind = _BehindReasoning(params.reasoning)
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._safe: list[str] = []
        """Text that is safe to show, since the last `delta`."""
        self._held = ""
        """Text held back because it may be the beginning of a stop string."""
        self._has_ended = False

    def delta(self) -> str:
        """Returns the text that has become safe to show since the last call: after the end all of
        the rest, before it what cannot change."""
        text, self._safe = "".join(self._safe), []
        return text

    def append(self, token_id: int) -> str | None:
        """Adds a token. Returns the stop string that it completes, which ends the answer; the one
        that begins first if there are several. Finds none until the answer has more than min_tokens
        tokens."""
        assert not self._has_ended, "no token follows the end of an answer"
        self._num_tokens += 1
        piece = self._pieces.append(token_id)
        if not self._stops:
            self._safe.append(piece)
            return None
        if self._behind is not None:
            piece = self._counted(token_id, piece)
        held = self._held + piece
        stop = self._find_stop(piece, held)
        if stop is None:
            num_held = 0 if self._keeps_stop else max(stop.num_matched for stop in self._stops)
            self._safe.append(held[: len(held) - num_held])
            self._held = held[len(held) - num_held :]
        return stop

    def _counted(self, token_id: int, piece: str) -> str:
        """Returns the end of a piece, in which stop strings count; the text before it is safe to
        show."""
        assert self._behind is not None, "stop strings count everywhere"
        num_free = self._behind.num_free(token_id, piece)
        if self._behind.is_settled:
            self._behind = None
        if num_free:
            self._safe.append(self._held + piece[:num_free])
            self._held = ""
            for stop in self._stops:
                stop.num_matched = 0
        return piece[num_free:]

    def append_stop(self, token_id: int) -> None:
        """Adds the token that ends the answer, and flushes."""
        if self._keeps_stop:
            self._held += self._pieces.append(token_id)
        self.flush()

    def flush(self) -> None:
        """Shows the text that was held back, at the end of an answer without a stop string."""
        self._safe.append(self._held + self._pieces.flush())
        self._held = ""
        self._has_ended = True

    def _find_stop(self, piece: str, held: str) -> str | None:
        """Looks for stop strings that end in `piece`, and cuts the text at the start of the
        first."""
        finds = self._num_tokens > self._min_tokens
        ends = [(stop.advance(piece, finds=finds), stop.text) for stop in self._stops]
        matches = [(end - len(text), end, text) for end, text in ends if end is not None]
        if not matches:
            return None
        start, end, text = min(matches, key=lambda match: match[0])
        cut = len(held) - len(piece) + (end if self._keeps_stop else start)
        self._safe.append(held[:cut])
        self._held = ""
        self._has_ended = True
        return text


Detokenizer = TextDetokenizer | NoText
"""The text of one answer, as its tokens come."""


class _Phase(Enum):
    START = auto()
    """The text so far is white space only."""
    REASONING = auto()
    GAP = auto()
    """The text is at the line breaks after the reasoning."""
    BEHIND = auto()


class _BehindReasoning:
    """Decides where stop strings count: neither in the reasoning at the start of an answer, nor in
    the line breaks after it."""

    def __init__(self, tokens: ReasoningTokens) -> None:
        self._tokens = tokens
        self._phase = _Phase.REASONING if tokens.is_open else _Phase.START

    @property
    def is_settled(self) -> bool:
        """Whether stop strings count in all the text that follows."""
        return self._phase is _Phase.BEHIND

    def num_free(self, token_id: int, piece: str) -> int:
        """Returns the length of the start of a token's piece in which stop strings do not count."""
        if self._phase is _Phase.START:
            if token_id != self._tokens.opens:
                if piece.strip():
                    self._phase = _Phase.BEHIND
                return 0
            self._phase = _Phase.REASONING
        elif self._phase is _Phase.REASONING and token_id == self._tokens.closes:
            self._phase = _Phase.GAP
        elif self._phase is _Phase.GAP and (rest := piece.lstrip("\n")):
            self._phase = _Phase.BEHIND
            return len(piece) - len(rest)
        return len(piece)


class _Stop:
    """Follows how much of a stop string the text ends with (Knuth, Morris and Pratt, 1977): a few
    steps for each character, whatever the two are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0, 0]

    def advance(self, piece: str, *, finds: bool) -> int | None:
        """Takes more text. With `finds`, returns the first position in it at which the stop string
        ends, if any."""
        text, matched, at = self.text, self.num_matched, 0
        while at < len(piece):
            if matched == 0:
                at = piece.find(text[0], at)
                if at < 0:
                    break
            character = piece[at]
            while matched and text[matched] != character:
                matched = self._border(matched)
            matched += text[matched] == character
            at += 1
            if matched == len(text):
                if finds:
                    return at
                matched = self._border(matched)
        self.num_matched = matched
        return None

    def _border(self, length: int) -> int:
        """Returns the length of the longest proper prefix of the stop string's first `length`
        characters that is also their suffix."""
        text, borders = self.text, self._borders
        while len(borders) <= length:
            last, border = text[len(borders) - 1], borders[-1]
            while border and text[border] != last:
                border = borders[border]
            borders.append(border + (text[border] == last))
        return borders[length]


class _TokenDecoder:
    """Decodes a growing sequence piece by piece.

    A token's text can depend on the tokens before it (a character's first bytes, a word's leading
    space), so each is decoded in a window: the tokens of the last complete piece, then those since.
    Tokens that are bytes need no window after a complete piece.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._decode = texts.decode(skip_special_tokens=skip_special_tokens)
        self._skipped = texts.special_ids if skip_special_tokens else frozenset()
        self._whole = texts.whole
        self._are_bytes = texts.are_bytes
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0

    def append(self, token_id: int) -> str:
        """Returns the text that a token completes."""
        if token_id in self._skipped:
            return ""
        if not self._window and (piece := self._whole(token_id)) is not None:
            return piece
        self._window.append(token_id)
        text = self._decode(self._window)
        num_whole = len(text.rstrip(INCOMPLETE))
        if num_whole <= self._num_shown:
            is_waiting = len(self._window) - self._num_context <= _MAX_PENDING
            return "" if is_waiting else self._give_up(text)
        piece = text[self._num_shown : num_whole]
        self._num_shown = num_whole
        if num_whole == len(text):
            self._move_window()
        return piece

    def _give_up(self, text: str) -> str:
        """Shows bytes that can be no character any more, so that the window does not grow: all but
        the last tokens, if the bytes of none of them belong to the same sequence as those before.
        """
        old, last = self._window[:-4], self._window[-4:]
        shown = self._decode(old)
        if shown + self._decode(last) != text:
            return ""
        piece = shown[self._num_shown :]
        self._window, self._num_context, self._num_shown = last, 0, 0
        return piece

    def flush(self) -> str:
        """Returns the text of the remaining tokens; incomplete bytes show as U+FFFD."""
        piece = self._decode(self._window)[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def _move_window(self) -> None:
        self._window = [] if self._are_bytes else self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._decode(self._window)) if self._window else 0
