"""The text part of MiniCPM-V 4.6 and 4.7, which is Qwen3.5. Their vision tower and its mergers are
not run. No MTP head is published; one would have to be Qwen3.5's."""

from __future__ import annotations

from dataclasses import replace

from milepost.models.architectures.qwen3_5 import DENSE

ARCHITECTURES = (
    replace(
        DENSE,
        model_types=("minicpmv4_6", "minicpmv4_7"),
        text_types=("qwen3_5_text",),
        tower=None,
        tower_path="model.vision_tower",
        skipped=(r"model\.(vpm|vit_merger|merger)\.",),
    ),
)
