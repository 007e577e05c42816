"""Architectures, and loading them: `load_model` is the way in."""

from milepost.models.hybrid import HybridModel
from milepost.models.loading import find_folder, load_config, load_model

__all__ = ["HybridModel", "find_folder", "load_config", "load_model"]
