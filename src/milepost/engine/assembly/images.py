"""Decides whether an engine takes images, and finds what its prompts need to know of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.config import EngineConfig
from milepost.engine.media import ImageFacts, TileFacts, VideoFacts
from milepost.errors import UnsupportedModelError, how_to_install
from milepost.images import (
    ImageSettings,
    read_frame_sampling,
    read_image_settings,
    read_video_settings,
)
from milepost.images.processors import NESTED
from milepost.models.decoder import Decoder
from milepost.models.folder import read_object
from milepost.models.loading import has_pictures
from milepost.models.radio import has_video_patches
from milepost.runner.measuring import num_weights
from milepost.scheduler.encoders import TowerCost

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_ATTENTION_TIMES = 2
"""Duration of an operation of attention in a tower, relative to one of a GEMM: 1.9 to 2.5 on an
H200."""

_USUAL_SHARE, _MOST_SHARE = 64, 16
"""Encoder outputs get the first part of the memory beside the weights, or up to the second for two
of the largest images."""
_MOST_IMAGES = 16
"""Largest images that are kept at most, however much memory there is."""

logger = logging.getLogger(__name__)


def takes_images(config: EngineConfig, whole: PreTrainedConfig) -> bool:
    """Whether the checkpoint's vision tower is loaded: if it has one, images are allowed, and
    Pillow is installed."""
    if not config.max_images:
        return False
    if not has_pictures(whole):
        if getattr(whole, "vision_config", None):
            logger.warning(
                "images are refused: the vision tower of model_type=%r is not run", whole.model_type
            )
        return False
    if find_spec("PIL") is None:
        logger.warning("images are refused, since Pillow is missing: %s", how_to_install("images"))
        return False
    return True


def image_settings_of(config: EngineConfig, folder: Path, whole: PreTrainedConfig) -> ImageSettings:
    """Returns the checkpoint's settings for pictures, with the limits of the configuration. Raises
    ConfigError."""
    settings = read_image_settings(folder).with_pixels(*config.pixel_limits)
    if settings.keeps_overshoot != (whole.vision_config.model_type == "radio"):
        raise UnsupportedModelError(
            f"model_type={whole.model_type!r} needs an image processor of its own in "
            "preprocessor_config.json; language_model_only=True leaves the vision part out"
        )
    return settings if _has_rows(whole) else replace(settings, has_rows=False)


def _has_rows(whole: PreTrainedConfig) -> bool:
    """Whether the tokens of pictures have rows and columns for rotary positions."""
    parameters = getattr(whole.get_text_config(), "rope_parameters", None) or {}
    return "mrope_section" in parameters


def with_encoder_cache(
    config: EngineConfig, model: Decoder, settings: ImageSettings | None, room: int
) -> EngineConfig:
    """Returns the configuration with the number of image tokens that stay encoded: as set, or what
    suits the `room` beside the weights, in bytes. Two of the largest images may stand side by side
    in a prompt, so there is space for both unless memory is short."""
    if settings is None or config.encoder_cache_size is not None:
        return config
    largest, most = settings.max_tokens, room // token_bytes_of(model)
    least = min(2 * largest, max(largest, most // _MOST_SHARE))
    tokens = max(least, min(most // _USUAL_SHARE, _MOST_IMAGES * largest))
    return replace(config, encoder_cache_size=tokens)


def token_bytes_of(model: Decoder) -> int:
    """Returns the bytes of the encoder outputs of an image's token."""
    size: int = model.config.hidden_size
    return size * model.dtype.itemsize


def tower_cost(model: Decoder) -> TowerCost:
    """Returns the work of a model's vision tower, by counting operations."""
    if model.tower is None:
        return TowerCost()
    shapes, text = model.tower.shapes, num_weights(model)
    num_attending = shapes.depth if shapes.num_attending is None else shapes.num_attending
    pairs = 2 * num_attending * shapes.hidden_size * shapes.merge_size**4
    return TowerCost(
        linear=shapes.num_weights / text,
        quadratic=_ATTENTION_TIMES * pairs / text,
        depth=shapes.depth,
    )


def image_facts(
    config: EngineConfig,
    folder: Path,
    whole: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> ImageFacts:
    """Returns how images enter the prompts of a model with a vision tower. Raises
    UnsupportedModelError for a checkpoint that does not name its image tokens."""

    def text_of(*names: str) -> str:
        ids = [getattr(whole, name, None) for name in names]
        known = [id_ for id_ in ids if id_ is not None]
        return "".join(tokenizer.convert_ids_to_tokens(known)) if tokenizer is not None else ""

    start, end = "vision_start_token_id", "vision_end_token_id"
    token_id = getattr(whole, "image_token_id", None)
    if token_id is None:
        raise UnsupportedModelError("config.json has a vision tower and no image_token_id")
    settings = image_settings_of(config, folder, whole)
    tiles = _tile_facts(folder, tokenizer, settings) if settings.is_tiled else None
    video, video_id = None, getattr(whole, "video_token_id", None)
    if tiles is not None and tiles.start and _takes_floating_videos(whole, settings):
        video = VideoFacts(
            settings=read_video_settings(folder),
            sampling=read_frame_sampling(folder),
            token_id=token_id,  # its processor writes the image's
            text=tiles.text([""], text_of("image_token_id")),
            max_videos=config.max_videos,
        )
    if video_id is not None and not settings.is_tiled:
        read = read_video_settings(folder)
        video = VideoFacts(
            settings=read if _has_rows(whole) else replace(read, has_rows=False),
            sampling=read_frame_sampling(folder),
            token_id=video_id,
            text=text_of(start, "video_token_id", end),
            max_videos=config.max_videos,
        )
    return ImageFacts(
        settings=settings,
        token_id=token_id,
        text=text_of(start, "image_token_id", end),
        tiles=tiles,
        video=video,
    )


def _takes_floating_videos(whole: PreTrainedConfig, settings: ImageSettings) -> bool:
    """Whether a model of Nemotron's takes videos. One that drops tokens of its frames by their
    contents does not."""
    if not settings.keeps_overshoot or not has_video_patches(whole.vision_config):
        return False
    rate = getattr(whole, "video_pruning_rate", 0)
    if rate:
        logger.warning("videos are refused: video_pruning_rate=%r is not run", rate)
    return not rate


def _tile_facts(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None, settings: ImageSettings
) -> TileFacts:
    """Returns the texts around images, by the names that processors of LFM2-VL and Nemotron have
    for them."""
    path = folder / NESTED
    raw = read_object(path) if path.exists() else {}
    if tokenizer is None or raw.get("use_image_special_tokens") is False:
        return TileFacts(start="", end="")
    start, end = _FLOATING_TEXTS if settings.keeps_overshoot else _TILED_TEXTS
    return TileFacts(
        start=str(getattr(tokenizer, "image_start_token", start)),
        end=str(getattr(tokenizer, "image_end_token", end)),
    )


_TILED_TEXTS = "<|image_start|>", "<|image_end|>"
_FLOATING_TEXTS = "<img>", "</img>"
