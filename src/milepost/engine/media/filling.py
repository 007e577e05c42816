"""Puts images and videos into prompts: into the text before it is tokenized, and then into the
tokens. Pure.

A chat template writes one text for each image. For a video it would not know the times of the
frames, so their texts are made here, and stand where the template's would. In a plain prompt they
replace what a template writes for a video. One token stands for each image, and is repeated as
often as the image has tokens; so is one for each group of frames of a video.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milepost.engine.media.facts import ImageFacts, VideoFacts, facts_for
from milepost.engine.media.given import Given
from milepost.engine.media.prepared import Prepared, PreparedPicture
from milepost.engine.prompts import Prompt
from milepost.engine.validation import check_num_images
from milepost.errors import InvalidPromptError
from milepost.pictures import Picture
from milepost.runner.recording import PictureRecord


def facts_to_prepare(
    facts: ImageFacts | None, given: Sequence[Given], kwargs: object, max_images: int
) -> ImageFacts | None:
    """Returns the model's facts for a request with these images, videos and `mm_processor_kwargs`;
    None if there is nothing to prepare. Raises InvalidRequestError, also for more images or videos
    than a prompt may have."""
    facts = facts_for(facts, kwargs)
    num_videos = sum(each.is_video for each in given)
    check_num_images(len(given) - num_videos, 0 if facts is None else max_images)
    if num_videos:
        _check_videos(num_videos, facts)
    return facts if given else None


def _check_videos(num_videos: int, facts: ImageFacts | None) -> None:
    video = facts.video if facts is not None else None
    shown = "1 video" if num_videos == 1 else f"{num_videos} videos"
    if video is None or not video.max_videos:
        raise InvalidPromptError(f"{shown}: this model is served without videos")
    if num_videos > video.max_videos:
        raise InvalidPromptError(f"{shown}: use {video.max_videos} or fewer (limit_mm_per_prompt)")


@dataclass(frozen=True, slots=True)
class Media:
    """The images and videos of one prompt, prepared."""

    facts: ImageFacts
    found: Sequence[Prepared]

    @property
    def texts(self) -> list[str]:
        """Texts of all of them, in order, as they stand in a conversation."""
        return [self._text(each) for each in self.found]

    def into_plain(self, prompt: Any, encode: Callable[[str], list[int]] | None) -> Any:
        """Returns a plain prompt, as callers give it, with the texts of its videos, and of images
        in tiles. `encode` tokenizes these where the prompt has token ids. Raises
        InvalidPromptError."""
        video = self.facts.video
        has_own_token = video is None or video.token_id != self.facts.token_id
        if not has_own_token and any(each.is_video for each in self.found):
            raise InvalidPromptError(
                "a plain prompt has no place for a video of this model: put it in a message"
            )
        texts = {
            is_video: [self._text(each) for each in self.found if each.is_video is is_video]
            for is_video in (False, True)
        }
        if self.facts.tiles is not None and texts[False]:
            prompt = _with_texts(prompt, self.facts, texts[False], encode)
        if video is not None and texts[True]:
            prompt = _with_texts(prompt, video, texts[True], encode)
        return prompt

    def put_in(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with all images and frames in it, and its marks moved along. Raises
        InvalidPromptError."""
        found = _expanded(prompt.token_ids, self._waiting())
        marks = (found.moved(mark) if type(mark) is int else mark for mark in prompt.cache_marks)
        return replace(
            prompt,
            token_ids=found.token_ids,
            cache_marks=tuple(marks),
            breakpoints=tuple(map(found.moved, prompt.breakpoints)),
            pictures=found.pictures,
            pixels=found.pixels,
        )

    def _waiting(self) -> dict[int, list[PreparedPicture]]:
        video = self.facts.video
        waiting: dict[int, list[PreparedPicture]] = {self.facts.token_id: []}
        if video is not None:
            waiting[video.token_id] = []
        for each in self.found:
            place = video if video is not None and each.is_video else self.facts
            waiting[place.token_id] += each.pictures
        return waiting

    def _text(self, prepared: Prepared) -> str:
        if prepared.is_video:
            assert self.facts.video is not None, "videos are refused before"
            return "".join(time + self.facts.video.text for time in prepared.texts)
        if self.facts.tiles is not None:
            return self.facts.tiles.text(prepared.texts, self.facts.text)
        return self.facts.text


def _with_texts(
    prompt: Any,
    facts: ImageFacts | VideoFacts,
    texts: Sequence[str],
    encode: Callable[[str], list[int]] | None,
) -> Any:
    """Returns a plain prompt with a text for each place that `facts` names."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": _in_text(prompt["prompt"], facts.text, texts)}
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if encode is None or not isinstance(tokens, list):
        what = "a video" if isinstance(facts, VideoFacts) else "an image of this model"
        raise InvalidPromptError(
            f"{what} needs a tokenizer, and a prompt that is a text or a list of token ids"
        )
    ids = _in_tokens(tokens, facts.token_id, encode(facts.text), list(map(encode, texts)))
    return {**prompt, "prompt_token_ids": ids}


def _in_text(prompt: str, mark: str, texts: Sequence[str]) -> str:
    pieces = prompt.split(mark) if mark else [prompt]
    _check_places(len(pieces) - 1, len(texts), mark)
    return pieces[0] + "".join(text + piece for text, piece in zip(texts, pieces[1:], strict=True))


def _in_tokens(
    given: list[int], token_id: int, mark: list[int], texts: Sequence[list[int]]
) -> list[int]:
    """Replaces `mark`, or the token of a video or an image without the others around it."""
    places = [place for place, token in enumerate(given) if token == token_id]
    _check_places(len(places), len(texts), f"token {token_id}")
    before = mark.index(token_id) if token_id in mark else 0
    found: list[int] = []
    done = 0
    for place, text in zip(places, texts, strict=True):
        start, end = place - before, place - before + len(mark)
        if start < done or given[start:end] != mark:
            start, end = place, place + 1
        found += given[done:start] + text
        done = end
    return found + given[done:]


def _check_places(num_places: int, num_given: int, mark: str) -> None:
    if num_places != num_given:
        raise InvalidPromptError(
            f"the prompt has a place for {num_places} of {mark}, and {num_given} came with it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expansion:
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


def _expanded(given: Sequence[int], waiting: Mapping[int, Sequence[PreparedPicture]]) -> _Expansion:
    """Inserts images, which are listed by the token that stands for each, into tokens. Raises
    InvalidPromptError if there are not as many as tokens that stand for them."""
    places = [place for place, token in enumerate(given) if token in waiting]
    for token_id, prepared in waiting.items():
        count = sum(given[place] == token_id for place in places)
        if count != len(prepared):
            raise InvalidPromptError(
                f"the prompt has a place for {count} images (token {token_id}), and "
                f"{len(prepared)} came with it"
            )
    queues = {token_id: iter(prepared) for token_id, prepared in waiting.items()}
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
    return _Expansion(
        token_ids=[*tokens, *given[done:]],
        pictures=tuple(pictures),
        pixels=tuple(records.values()),
        places=places,
        grown=grown,
    )


def _placed(image: PreparedPicture, offset: int) -> Picture:
    return Picture(
        identity=image.record.identity,
        offset=offset,
        num_tokens=image.num_tokens,
        grid=image.record.grid,
        num_positions=image.num_positions,
    )
