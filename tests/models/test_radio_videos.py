"""Frames of videos for Nemotron's vision tower, which embeds two of them by a projection of their
own: sizes, texts, embeddings and logits beside transformers'."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from milepost.errors import UnsupportedModelError
from milepost.images import FrameSampling, read_frame_sampling, read_video_settings
from milepost.images.sizes import resized_frame
from milepost.images.videos import FrameGroup, prepare_video
from milepost.runner.pictures import EncodedPictures, PicturePixels
from milepost.scheduler.plans import StepPlan
from tests.floating import (
    SETTINGS,
    SIDE,
    VIDEO_SETTINGS,
    frames,
    pixel_values_videos,
    prepared,
    save,
)
from tests.models.test_radio import encode, load
from tests.numbers import relative_error
from tests.pictured import prompt
from tests.runner.pictured import chunked_logits

PACKAGE = "transformers.models.nemotron_h_omni"


def groups_of(count: int, **own: Any) -> list[FrameGroup]:
    return prepare_video(frames(count, **own), [k * 0.5 for k in range(count)], VIDEO_SETTINGS)


@pytest.mark.parametrize("most", [24, 96, 1024])
def test_sizes_are_those_of_the_reference(most: int) -> None:
    module = pytest.importorskip(f"{PACKAGE}.video_processing_nemotron_h_omni")
    processor = module.NemotronH_Omni_Reasoning_V3VideoProcessor
    own = SimpleNamespace(
        video_target_num_patches=most, _downsample_factor=2, video_maintain_aspect_ratio=True
    )
    for height in (4, 16, 31, 90, 480, 1080):
        for width in (6, 17, 160, 640, 777):
            across, down = processor._compute_target_patches(own, height, width)
            expected = down * SIDE, across * SIDE
            assert resized_frame(height, width, SIDE, 2, most) == expected


@pytest.mark.parametrize("count", [2, 5])
def test_texts_are_those_of_the_reference(count: int) -> None:
    module = pytest.importorskip(f"{PACKAGE}.processing_nemotron_h_omni")
    own = SimpleNamespace(
        image_start_token="",
        image_token="",
        image_end_token="",
        video_temporal_patch_dim=2,
    )
    metadata = SimpleNamespace(fps=2, frames_indices=None)
    given = {"num_frames": count, "video_metadata": metadata}
    wanted = module.NemotronH_Omni_Reasoning_V3Processor.replace_video_token(
        own, {"num_tokens": [6]}, 0, **given
    )
    assert "".join(each.text for each in groups_of(count)) == wanted


@torch.no_grad()
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("size", [(31, 47), (60, 16)])
def test_embeddings_match_transformers(count: int, size: tuple[int, int], tmp_path: Path) -> None:
    reference, model = save(tmp_path), load(tmp_path)
    groups = groups_of(count, size=size)
    values = pixel_values_videos(frames(count, size), resized_frame(*size, SIDE, 2, 24))
    wanted = reference.get_video_features(values).pooler_output
    assert len(groups) == len(wanted) == -(-count // 2)
    for group, own in zip(groups, wanted, strict=True):
        assert group.image.num_tokens == len(own)
        for is_fixed in (False, True):
            assert relative_error(encode(model, group.image, is_fixed=is_fixed), own) < 1e-5
        assert own.std() > 0.3, "flat embeddings would show nothing"


@torch.no_grad()
def test_logits_match_transformers(tmp_path: Path) -> None:
    reference, model = save(tmp_path), load(tmp_path)
    parts: list[Any] = [7]
    for group in groups_of(5):
        parts += [group.image, 4]
    given = prompt(*parts, 20)
    values = pixel_values_videos(frames(5), resized_frame(31, 47, SIDE, 2, 24))
    encoded = reference.get_video_features(values)
    # Its forward pass takes a sequence of them, and makes a tensor itself (5.23).
    encoded.pooler_output = tuple(encoded.pooler_output)
    own = {"input_ids": given.token_ids[None], "mm_encoder_outputs": {"video": encoded}}
    wanted = reference(**own, use_cache=False).logits[0]
    found = chunked_logits(model, SETTINGS, given, [0, len(given.token_ids)])
    assert relative_error(found, wanted) < 1e-4


def test_a_still_image_beside_frames_is_embedded_as_one(tmp_path: Path) -> None:
    """Rows of both kinds never share a run of the tower."""
    save(tmp_path)
    model = load(tmp_path)
    assert model.tower is not None
    images = [prepared(16, 24), groups_of(2)[0].image, prepared(16, 24, 1)]
    pictures = prompt(*images).pictures
    pixels = EncodedPictures(model.tower, SETTINGS, joins=True)
    for each in images:
        pixels.take(each.identity, PicturePixels(rows=each.rows, grid=each.grid))
    pixels.follow(StepPlan(sequences=(), encodes=tuple(pictures)))
    for each in images:
        alone = encode(model, each, is_fixed=True)
        assert torch.equal(pixels._embeddings[each.identity], alone)


def test_settings_of_videos_are_read(tmp_path: Path) -> None:
    save(tmp_path)
    assert read_video_settings(tmp_path) == VIDEO_SETTINGS
    assert read_frame_sampling(tmp_path) == FrameSampling(max_frames=128)
    path = tmp_path / "video_preprocessor_config.json"
    path.unlink()
    assert read_video_settings(tmp_path).frame_patches == 1024
    path.write_text('{"video_maintain_aspect_ratio": false}')
    with pytest.raises(UnsupportedModelError, match="video_maintain_aspect_ratio=False"):
        read_video_settings(tmp_path)
