"""Architectures and how to load them; the entry point is `load_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milepost.models.folder import find_folder

if TYPE_CHECKING:
    from milepost.models.decoder import Decoder
    from milepost.models.loading import LoadOptions, load_model
    from milepost.models.registry import load_config

__all__ = ["Decoder", "LoadOptions", "find_folder", "load_config", "load_model"]


def __getattr__(name: str) -> Any:
    """Imports names that need torch only when they are asked for."""
    if name == "Decoder":
        from milepost.models.decoder import Decoder

        return Decoder
    if name == "load_config":
        from milepost.models.registry import load_config

        return load_config
    if name in ("LoadOptions", "load_model"):
        from milepost.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
