"""Images and videos of a request on their way to a prompt. Imports no torch.

what a model and a request take  facts
from URLs to bytes               urls
from bytes to pixels             prepared, preparing, process
into the prompt's tokens         given, filling
"""

from __future__ import annotations

from milepost.engine.media.facts import ImageFacts, TileFacts, VideoFacts, facts_for
from milepost.engine.media.filling import Media
from milepost.engine.media.given import Given, images_in, images_of
from milepost.engine.media.preparing import Embedded, KeptImages, Preparer
from milepost.engine.media.urls import MediaRules

__all__ = [
    "Embedded",
    "Given",
    "ImageFacts",
    "KeptImages",
    "Media",
    "MediaRules",
    "Preparer",
    "TileFacts",
    "VideoFacts",
    "facts_for",
    "images_in",
    "images_of",
]
