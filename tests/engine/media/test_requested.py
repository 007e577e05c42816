"""A request's own sizes of images and videos replace the server's, and never pass its limits."""

from __future__ import annotations

import msgspec
import pytest

from milepost.engine.media import Given, ImageFacts, VideoFacts, facts_for, images_of
from milepost.engine.media.prepared import Unprepared
from milepost.errors import InvalidPromptError, InvalidRequestError
from milepost.images import FrameSampling, ImageSettings
from milepost.images.settings import MAX_FRAMES, ImageTiling

IMAGES = ImageSettings(min_pixels=2**16, max_pixels=2**22)
VIDEOS = ImageSettings(min_pixels=4096, max_pixels=2**23)
SAMPLING = FrameSampling(min_frames=4, max_frames=64)
VIDEO = VideoFacts(settings=VIDEOS, sampling=SAMPLING, token_id=2, text="", max_videos=1)
FACTS = ImageFacts(settings=IMAGES, token_id=1, text="", video=VIDEO)


def limits_of(settings: ImageSettings) -> tuple[int, int]:
    return settings.min_pixels, settings.max_pixels


class Unwritten(list):
    """As long as a body may make a list: writing it out would hold everybody else up."""

    def __repr__(self):
        raise AssertionError("it was written out")


UNWRITTEN = Unwritten([None])


@pytest.mark.parametrize(
    ("asked", "images", "videos"),
    [
        ({}, (2**16, 2**22), (4096, 2**23)),
        ({"max_pixels": 2**20}, (2**16, 2**20), (4096, 2**20)),
        ({"size": {"longest_edge": 2**20}}, (2**16, 2**20), (4096, 2**20)),
        ({"size": {"shortest_edge": 2**18}}, (2**18, 2**22), (2**18, 2**23)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2**20}}, (1, 2**20), (1, 2**20)),
        ({"max_pixels": 2**12}, (2**12, 2**12), (2**12, 2**12)),
        ({"min_pixels": None, "size": None, "fps": None}, (2**16, 2**22), (4096, 2**23)),
        ({"images_kwargs": {"max_pixels": 2**20}}, (2**16, 2**20), (4096, 2**23)),
        ({"videos_kwargs": {"max_pixels": 2**23}}, (2**16, 2**22), (4096, 2**23)),
        (
            {"max_pixels": 2**20, "videos_kwargs": {"size": {"longest_edge": 2**21}}},
            *((2**16, 2**20), (4096, 2**21)),
        ),
    ],
)
def test_sizes_hold_for_images_and_videos_or_for_one_of_them(asked, images, videos):
    found = facts_for(FACTS, asked)
    assert limits_of(found.settings) == images
    assert limits_of(found.video.settings) == videos
    assert found.video.sampling == SAMPLING


def test_frames_are_those_of_videos():
    assert facts_for(FACTS, {"fps": 0.5}).video.sampling == FrameSampling(
        fps=0.5, min_frames=4, max_frames=64
    )
    asked = {"videos_kwargs": {"num_frames": 7}}
    assert len(facts_for(FACTS, asked).video.sampling.chosen(1000, 30.0)) == 7
    assert len(facts_for(FACTS, asked).video.sampling.chosen(5, 30.0)) == 5


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], r"mm_processor_kwargs=\[\]: use a mapping"),
        ({"size": 5}, "mm_processor_kwargs.size=5: use a mapping"),
        ({"images_kwargs": 5}, "mm_processor_kwargs.images_kwargs=5: use a mapping"),
        ({"size": UNWRITTEN}, "mm_processor_kwargs.size=a Unwritten: use a mapping"),
        ({"min_pixels": UNWRITTEN}, "min_pixels=a Unwritten: use 1 or more"),
        ({"max_pixel": 5}, "unknown field 'max_pixel': use min_pixels, max_pixels, fps"),
        ({"longest_edge": 5}, "unknown field 'longest_edge'"),
        ({"size": {"height": 5}}, "unknown field 'size.height'"),
        ({"size": {"max_pixels": 5000}}, "unknown field 'size.max_pixels'"),
        ({"images_kwargs": {"fps": 1}}, "unknown field 'images_kwargs.fps': use min_pixels"),
        ({"images_kwargs": {"videos_kwargs": {}}}, "unknown field 'images_kwargs.videos_kwargs'"),
        ({"max_pixels": 0}, "max_pixels=0: use 1 or more"),
        ({"max_pixels": True}, "max_pixels=True: use 1 or more"),
        ({"min_pixels": 2.0**17}, "min_pixels=131072.0: use 1 or more"),
        ({"max_pixels": "9" * 99}, "max_pixels=9{80}: use 1 or more"),
        ({"max_pixels": 1023}, "max_pixels=1023: a token has 1024 pixels"),
        ({"max_pixels": 2**22 + 1}, "max_pixels=4194305: the limit for images is 4194304 here"),
        ({"min_pixels": 2**22 + 1}, "min_pixels=4194305: the limit for images is 4194304 here"),
        (
            {"videos_kwargs": {"size": {"longest_edge": 2**24}}},
            "videos_kwargs.size.longest_edge=16777216: the limit for videos is 8388608 here",
        ),
        ({"min_pixels": 4096, "max_pixels": 2048}, "min_pixels=4096: max_pixels is less, 2048"),
        (
            {"max_pixels": 4096, "size": {"longest_edge": 4096}},
            "size.longest_edge=4096: max_pixels says the same: use one of them",
        ),
        ({"fps": 0}, "fps=0: use a number above 0, up to 1000"),
        ({"fps": 1001}, "fps=1001: use a number above 0, up to 1000"),
        ({"fps": float("nan")}, "fps=nan: use a number above 0"),
        ({"fps": True}, "fps=True: use a number above 0"),
        ({"num_frames": 0}, "num_frames=0: use 1 or more"),
        ({"num_frames": 65}, "num_frames=65: the limit is 64 here"),
        ({"fps": 1, "num_frames": 4}, "fps=1: num_frames is set too: use one of them"),
    ],
)
def test_what_is_not_served_is_refused_with_value_and_limit(asked, message):
    with pytest.raises(InvalidRequestError, match=message):
        facts_for(FACTS, asked)


def test_a_model_without_images_or_videos_refuses_unknown_names_alone():
    assert facts_for(None, {"max_pixels": 2**30, "fps": 1}) is None
    with pytest.raises(InvalidRequestError, match="unknown field 'max_pixel'"):
        facts_for(None, {"max_pixel": 5})
    still = msgspec.structs.replace(FACTS, video=None)
    assert limits_of(facts_for(still, {"max_pixels": 2**20, "num_frames": 99}).settings)[1] == 2**20
    assert facts_for(FACTS, None) is FACTS


def test_an_image_with_a_limit_of_its_own_is_not_cut():
    tiled = ImageSettings(min_pixels=2**16, max_pixels=2**18, is_tiled=True, tiling=ImageTiling())
    facts = ImageFacts(settings=tiled, token_id=1, text="")
    assert facts_for(facts, {"max_pixels": 2**17}).settings.tiling is None
    assert facts_for(facts, {"min_pixels": 2**17}).settings.tiling == ImageTiling()


def test_long_lists_in_parts_of_messages_are_named_not_written_out():
    video = Given({"frames": ["x"], "times": UNWRITTEN, "fps": UNWRITTEN}, is_video=True)
    with pytest.raises(InvalidPromptError, match="times=a Unwritten and fps=a Unwritten: use"):
        Unprepared.of(video, ["x"], FACTS)
    video = Given({"frames": ["x"], "times": [0.0] * (MAX_FRAMES + 1)}, is_video=True)
    with pytest.raises(InvalidPromptError, match="times=a list and fps=None: use one time"):
        Unprepared.of(video, ["x"], FACTS)
    part = {"type": "image_url", "image_url": {"url": "x", "detail": UNWRITTEN}}
    with pytest.raises(InvalidPromptError, match="detail='a Unwritten': use auto"):
        images_of([{"role": "user", "content": [part]}])
