"""What a started engine reports about itself, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Where an engine runs, in which types, and what its memory is made of."""

    device: str
    """As its maker calls it."""
    dtype: str
    """Of weights and activations."""
    state_dtype: str
    """Of recurrent states."""
    weights_bytes: int
    page_bytes: int
    slot_bytes: int
    """Of one page and one state slot, over all layers."""
    cache_bytes: int
    """Of all pages and slots."""
    is_shared: bool
    """Whether pages and slots share one memory."""
    num_graphs: int
    """Captured steps."""
    kv_dtype: str = ""
    """Of keys and values, where it is not `dtype`."""
    model_type: str = ""
    """Of the model's configuration."""
