"""Puts prepared images into the tokens of a prompt: one token stands for each, and is repeated as
often as the image has tokens. A group of a video's frames is such an image, with a token of its
own. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from milepost.engine.prompts import Prompt
from milepost.errors import InvalidPromptError
from milepost.pictures import Picture
from milepost.runner.recording import PictureRecord


class Expandable(Protocol):
    """An image as the tower reads it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_positions(self) -> int: ...

    @property
    def record(self) -> PictureRecord:
        """The image's pixels."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The tokens of a prompt with its images in them."""

    token_ids: list[int]
    pictures: tuple[Picture, ...]
    pixels: tuple[PictureRecord, ...]
    """Pixels of each image, once."""
    places: list[int]
    """Positions of the tokens that stood for images."""
    grown: list[int]
    """Number of tokens added before each of those, and after all."""

    def moved(self, position: int) -> int:
        """Returns where a position of the prompt without images is now."""
        return position + self.grown[bisect_left(self.places, position)]


Waiting = Mapping[int, Sequence[Expandable]]
"""Images by the token that stands for each, in the order of the prompt."""


def expand(given: Sequence[int], waiting: Waiting) -> Expansion:
    """Inserts images into tokens. Raises InvalidPromptError if there are not as many as tokens that
    stand for them."""
    places = [place for place, token in enumerate(given) if token in waiting]
    for token_id, own in waiting.items():
        count = sum(given[place] == token_id for place in places)
        if count != len(own):
            raise InvalidPromptError(
                f"the prompt has a place for {count} images (token {token_id}), and "
                f"{len(own)} came with it"
            )
    queues = {token_id: iter(own) for token_id, own in waiting.items()}
    images = [next(queues[given[place]]) for place in places]
    tokens: list[int] = []
    pictures: list[Picture] = []
    done, grown = 0, [0]
    for place, image in zip(places, images, strict=True):
        tokens += given[done:place]
        pictures.append(_placed(image, len(tokens)))
        tokens += [given[place]] * image.num_tokens
        done = place + 1
        grown.append(len(tokens) - done)
    records = {image.record.identity: image.record for image in images}
    return Expansion(
        token_ids=[*tokens, *given[done:]],
        pictures=tuple(pictures),
        pixels=tuple(records.values()),
        places=places,
        grown=grown,
    )


def expanded(prompt: Prompt, waiting: Waiting) -> Prompt:
    """Returns a prompt with its images, and marks moved along. Raises InvalidPromptError."""
    if not any(waiting.values()):
        return prompt
    found = expand(prompt.token_ids, waiting)
    return replace(
        prompt,
        token_ids=found.token_ids,
        cache_marks=tuple(found.moved(m) if _is_whole(m) else m for m in prompt.cache_marks),
        pictures=found.pictures,
        pixels=found.pixels,
    )


def _placed(image: Expandable, offset: int) -> Picture:
    return Picture(
        identity=image.record.identity,
        offset=offset,
        num_tokens=image.num_tokens,
        grid=image.record.grid,
        num_positions=image.num_positions,
    )


def _is_whole(mark: object) -> bool:
    return isinstance(mark, int) and not isinstance(mark, bool)
