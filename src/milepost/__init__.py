"""Milepost: an engine for hybrid language models whose prefix cache really hits."""

__version__ = "0.1.0"
