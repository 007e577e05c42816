"""Reads values as models write them, in JSON, in Python or a mixture, and writes JSON.

JSON passes through unchanged, piece by piece, each scalar once it is complete. Python's literals
become JSON's, and missing or extra commas, colons, brackets, quotes and line breaks in strings are
mended on the way, so the output is always JSON. The work is linear in the text and nothing
recurses, whatever a model writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from milepost.server.parsing.strings import QUOTES, Give, StringReader, quoted
from milepost.server.parsing.tape import Reading, Tape

MAX_DEPTH = 128
"""Largest number of nested brackets: readers of JSON have limits of their own."""
_PAIRS = {"{": "}", "[": "]", "(": ")"}
_MARKS = (*_PAIRS, *_PAIRS.values(), *QUOTES, ",", ":")
_SCALAR = re.compile(r"[^\s,:\"'{}\[\]()<]*")
_PREFIX = re.compile(r"[rRuUbBfF]{1,2}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LOOSE = re.compile(r"([-+]?)((?:0|[1-9][0-9_]*)?)(?:\.([0-9_]*))?((?:[eE][-+]?[0-9]+)?)")
_BASED = re.compile(r"[-+]?0(?:[xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)")
_BARRED = re.compile(r'["\\\x00-\x1f]')
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_EXACT = frozenset(("true", "false", "null", "True", "False", "None"))


def value(
    tape: Tape, give: Give, ends: tuple[str, ...], *, is_object: bool = False
) -> Reading[bool]:
    """Passes on the JSON of the value that begins here, and returns whether it ended by itself.

    It did not if the text is over, or if one of `ends` (not read) comes where it cannot be part of
    the value. The value is closed then, unless the whole answer was cut off there. With
    `is_object`, a brace always begins an object.
    """
    return (yield from ValueReader(tape, give, ends, is_object=is_object).read())


@dataclass(slots=True)
class _Bracket:
    """A bracket that is open."""

    mark: str
    is_object: bool | None
    """None for a brace that may still turn out to be a set."""
    place: int = 0
    """Index of its mark in the held text, while it may still change."""
    is_held: bool = False
    key: int = 0
    """Index of the last key in the held text."""
    has_key: bool = False
    """Whether a key or an item of a set was read, and it is not known yet which."""
    has_colon: bool = False
    num_items: int = 0
    comma: str = ""
    """The comma to write before the next item."""


class ValueReader:
    """Reads one value."""

    def __init__(
        self,
        tape: Tape,
        give: Give,
        ends: tuple[str, ...],
        *,
        is_object: bool = False,
        is_python: bool = False,
    ) -> None:
        self._tape = tape
        self._give = give
        self._ends = ends
        self._is_object = is_object
        self._is_python = is_python
        self._open: list[_Bracket] = []
        self._held: list[str] = []
        """Text that may still change; empty unless something is held."""
        self._num_holds = 0
        self._strings = StringReader(tape, self._put, ends, is_python=is_python)
        self._has_guessed = False

    @property
    def has_guessed(self) -> bool:
        """Whether something was mended, not only rewritten as JSON."""
        return self._has_guessed or self._strings.has_guessed

    def read(self) -> Reading[bool]:
        tape = self._tape
        while True:
            space = yield from tape.spaces()
            mark = yield from tape.take(*_MARKS)
            if not mark and not (yield from self._has_more()):
                return self._give_up()
            if mark and mark in ")]},:" and not self._open:
                tape.unread(mark)
                return self._give_up()
            if mark and mark in ")]}":
                self._close(mark, space)
            elif mark == ",":
                self._comma(space)
            elif mark == ":":
                self._colon(space)
            else:
                self._begin(space)
                if mark in _PAIRS:
                    self._push(mark)
                    if len(self._open) > MAX_DEPTH:
                        return self._give_up()
                    continue
                is_whole = yield from (self._strings.read(mark) if mark else self._scalar())
                self._end()
                if not is_whole:
                    return self._give_up()
            if not self._open:
                return True

    def _has_more(self) -> Reading[bool]:
        """Returns whether a scalar can come here."""
        tape = self._tape
        if self._ends and (end := (yield from tape.take(*self._ends))):
            tape.unread(end)
            return False
        return not tape.is_empty or not tape.is_over

    # --- scalars ----------------------------------------------------------------------------------

    def _scalar(self) -> Reading[bool]:
        text = yield from self._tape.run(_SCALAR)
        text = text or (yield from self._tape.one())
        if _PREFIX.fullmatch(text) and (quote := (yield from self._tape.take(*QUOTES))):
            return (yield from self._strings.read(quote, is_raw="r" in text.lower()))
        if text in _EXACT or _NUMBER.fullmatch(text):
            self._put(_WORDS.get(text.lower(), text))
            return True
        number = _number(text)
        self._has_guessed |= number is None or not self._is_python
        self._put(number or _WORDS.get(text.lower()) or quoted(text))
        return True

    # --- structure --------------------------------------------------------------------------------

    def _begin(self, space: str) -> None:
        """Begins a value, an item or a key."""
        if not self._open:
            return
        top = self._open[-1]
        if top.has_colon:
            self._put(space)
            return
        if top.has_key:  # the colon or comma after it is missing
            self._has_guessed = True
            self._comma("")
            space = space or " "
        if top.num_items and not top.comma:
            self._has_guessed = True
            self._comma("")
            space = space or " "
        if top.is_object:
            self._hold()
        self._put(top.comma + space)
        top.comma = ""
        top.key = len(self._held)

    def _end(self) -> None:
        """Ends a value, an item or a key."""
        if not self._open:
            return
        top = self._open[-1]
        top.has_key = top.is_object is not False and not top.has_colon
        if not top.has_key:
            top.has_colon = False
            top.num_items += 1

    def _push(self, mark: str) -> None:
        is_root = not self._open
        is_object = None if mark == "{" else False
        if is_root and self._is_object:
            is_object = True
        bracket = _Bracket(mark, is_object)
        if mark == "(" or is_object is None:
            self._hold()
            bracket.is_held = True
            bracket.place = len(self._held)
        self._put("{" if mark == "{" else "[")
        self._open.append(bracket)

    def _colon(self, space: str) -> None:
        top = self._open[-1]
        if not top.has_key:
            self._has_guessed = True
            return
        key = "".join(self._held[top.key :])
        del self._held[top.key :]
        if not key.startswith('"'):
            key = f'"{_BARRED.sub("", key)}"'  # escapes would double with each nested key
        self._put(key + space + ":")
        top.is_object, top.has_key, top.has_colon, top.is_held = True, False, True, False
        self._release()

    def _comma(self, space: str) -> None:
        top = self._open[-1]
        self._settle(top)
        if top.mark == "(" and top.is_held and top.num_items:
            top.is_held = False
            self._release()
        if top.comma or not top.num_items:
            self._has_guessed = True
        else:
            top.comma = space + ","

    def _settle(self, top: _Bracket) -> None:
        """Completes a last key without a colon, or a last colon without a value."""
        if top.has_key and top.is_object is None:  # a set's first item
            self._held[top.place] = "["
            top.is_object, top.is_held, top.has_key = False, False, False
            top.num_items = 1
            self._release()
            return
        if top.has_key:
            self._colon("")
        if top.has_colon:
            self._has_guessed = True
            self._put(" null")
            top.has_colon = False
            top.num_items += 1

    def _close(self, mark: str, space: str) -> None:
        if all(_PAIRS[bracket.mark] != mark for bracket in reversed(self._open)):
            self._has_guessed = True
            return
        while _PAIRS[self._open[-1].mark] != mark:
            self._has_guessed = True
            self._pop("")
        self._pop(space)

    def _pop(self, space: str) -> None:
        top = self._open[-1]
        self._settle(top)
        self._open.pop()
        closing = "]" if top.is_object is False else "}"
        if top.mark == "(" and top.is_held and top.num_items:  # a value in brackets, no tuple
            self._held[top.place] = closing = space = ""
        self._put(space + closing)
        if top.is_held:
            self._release()
        self._end()

    def _give_up(self) -> bool:
        """Closes a value that has no end of its own."""
        if not (self._tape.is_cut and self._tape.is_empty):
            while self._open:
                self._pop("")
        self._num_holds = min(self._num_holds, 1)
        if self._num_holds:
            self._release()
        return False

    # --- output -----------------------------------------------------------------------------------

    def _hold(self) -> None:
        self._num_holds += 1

    def _release(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            text = "".join(self._held)
            self._held.clear()
            self._put(text)

    def _put(self, text: str) -> None:
        if self._num_holds:
            self._held.append(text)
        elif text:
            self._give(text)


def _number(text: str) -> str | None:
    """Returns the JSON of a number that only Python accepts, or None if it is not a number."""
    if _BASED.fullmatch(text):
        try:
            return str(int(text, 0))
        except ValueError:
            return None
    loose = _LOOSE.fullmatch(text)
    if loose is None or not (loose[2] or loose[3]):
        return None
    fraction = "" if loose[3] is None else f".{loose[3] or 0}"
    found = f"{loose[1].strip('+')}{loose[2] or 0}{fraction}{loose[4]}".replace("_", "")
    return found if _NUMBER.fullmatch(found) else None
