"""Intern-S2-Preview: Qwen3.5 with experts, beside a vision tower and an encoder and a forecaster of
time series, which are not run."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig, Qwen3_5MoeConfig

from milepost.models.architectures.qwen3_5 import SPARSE


class InternS2PreviewConfig(Qwen3_5MoeConfig):
    """The settings of the text part; those of the other parts are kept and not read."""

    model_type = "intern_s2_preview"


AutoConfig.register("intern_s2_preview", InternS2PreviewConfig, exist_ok=True)

ARCHITECTURES = (
    replace(
        SPARSE,
        model_types=("intern_s2_preview",),
        text_types=("qwen3_5_moe_text",),
        tower=None,
        skipped=(r"(model\.)?time_series\.", r"time_series_forecaster\."),
    ),
)
