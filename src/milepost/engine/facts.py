"""Facts that a started engine reports about itself, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a running engine: its device, its data types, and its memory."""

    device: str
    """The manufacturer's name of the device."""
    dtype: str
    """Dtype of weights and activations."""
    state_dtype: str
    """Dtype of recurrent states."""
    weights_bytes: int
    page_bytes: int
    """Bytes of a page, over all layers."""
    slot_bytes: int
    """Bytes of a state slot, over all layers."""
    cache_bytes: int
    """Bytes of all pages and slots."""
    is_shared: bool
    """Whether pages and slots share one memory."""
    num_graphs: int
    """Number of captured steps."""
    kv_dtype: str = ""
    """Dtype of keys and values, if it is not `dtype`."""
    fingerprint: str = ""
    """Names the bitwise mode and what its bits depend on; empty in the default mode."""
    model_type: str = ""
    """Model type of the configuration."""
    num_positions: int = 0
    """Length in tokens of the longest sequence that the model supports."""
    step_tokens: int = 0
    """Largest number of tokens of a step."""
