"""The prefix tree: chains of keys, nodes and checkpoints, kinds of layers, matching."""

from milepost.cache.tree.chain import (
    TOKEN_BYTES,
    Chain,
    checkpoint_key,
    num_before_pictures,
    num_tokens,
)
from milepost.cache.tree.index import Tree
from milepost.cache.tree.kinds import (
    HYBRID,
    CacheConfig,
    FullAttention,
    LayerKind,
    Recurrent,
    ShortConvolution,
    SlidingWindow,
    grid_of,
    num_window_pages,
    window_of,
    window_pages,
)
from milepost.cache.tree.links import upwards
from milepost.cache.tree.matching import Finder, Match
from milepost.cache.tree.nodes import Checkpoint, End, Node, Reservation
from milepost.cache.tree.outbox import Outbox
from milepost.cache.tree.path import Path

__all__ = [
    "HYBRID",
    "TOKEN_BYTES",
    "CacheConfig",
    "Chain",
    "Checkpoint",
    "End",
    "Finder",
    "FullAttention",
    "LayerKind",
    "Match",
    "Node",
    "Outbox",
    "Path",
    "Recurrent",
    "Reservation",
    "ShortConvolution",
    "SlidingWindow",
    "Tree",
    "checkpoint_key",
    "grid_of",
    "num_before_pictures",
    "num_tokens",
    "num_window_pages",
    "upwards",
    "window_of",
    "window_pages",
]
