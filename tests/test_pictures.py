"""Pictures in prompts, and the settings of images."""

import pytest

from milepost.config import EngineConfig
from milepost.errors import ConfigError, InvalidPromptError
from milepost.pictures import Picture, check_pictures, overlapping, position_shift


def picture(offset, grid=(1, 4, 6), **fields):
    _, rows, columns = grid
    own = {
        "identity": b"a" * 16,
        "num_tokens": rows * columns // 4,
        "num_positions": max(rows, columns) // 2,
    }
    return Picture(offset=offset, grid=grid, **{**own, **fields})


def test_the_shift_counts_pictures_that_have_ended():
    pictures = (picture(3), picture(12, (1, 8, 8)))
    assert [position_shift(pictures, i) for i in (0, 3, 8, 9, 12, 27, 28)] == [
        *(0, 0, 0, -3, -3, -3, -15)
    ]


def test_a_picture_overlaps_a_range_with_one_of_its_tokens():
    one = picture(10)  # tokens 10 to 15
    found = {
        r: list(overlapping([one], *r)) for r in ((0, 10), (0, 11), (15, 20), (16, 20), (12, 12))
    }
    assert found == {(0, 10): [], (0, 11): [one], (15, 20): [one], (16, 20): [], (12, 12): []}


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([picture(-1)], "tokens -1 to 5 of a prompt of 40"),
        ([picture(35)], "tokens 35 to 41 of a prompt of 40"),
        ([picture(3), picture(8)], "picture 1: tokens 8 to 14"),
        ([picture(3, identity=b"short")], "an identity of 5 bytes: use 16"),
        ([picture(3, num_tokens=0)], "0 tokens with 3 positions"),
        ([picture(3, num_positions=7)], "6 tokens with 7 positions"),
    ],
)
def test_pictures_that_cannot_be_are_refused(pictures, message):
    with pytest.raises(InvalidPromptError, match=message):
        check_pictures(pictures, 40)
    check_pictures([picture(0), picture(6)], 40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"limit_mm_per_prompt": '{"image": -1}'},
            'use {"image": NUMBER, "video": NUMBER}, 0 or more',
        ),
        ({"limit_mm_per_prompt": '{"image": {"count": "2"}}'}, "0 or more"),
        ({"limit_mm_per_prompt": "2"}, "use a JSON object"),
        ({"mm_processor_kwargs": '{"max_pixel": 4}'}, "unknown field 'max_pixel': use min_pixels"),
        ({"mm_processor_kwargs": '{"max_pixels": 0.5}'}, "max_pixels=0.5: use 1 or more"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 4}}, "more than max_pixels=4"),
        ({"encoder_cache_size": 0}, "encoder_cache_size=0: use 1 or more"),
        ({"allowed_local_media_path": ""}, "name a directory, or leave it out"),
        ({"allowed_media_domains": ["[1"]}, "not a JSON list"),
        ({"allowed_media_domains": 3}, "use a list"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_limits_of_images():
    assert EngineConfig().max_images == 999
    assert EngineConfig(limit_mm_per_prompt={"image": 3}).max_images == 3
    assert EngineConfig(limit_mm_per_prompt='{"image": {"count": 2, "width": 9}}').max_images == 2
    assert EngineConfig(language_model_only=True).max_images == 0
    assert EngineConfig(mm_processor_kwargs={"max_pixels": 7}).pixel_limits == (None, 7)
    domains = EngineConfig(allowed_media_domains=("a.example", '["b.example"]'))
    assert domains.allowed_media_domains == ["a.example", "b.example"]
