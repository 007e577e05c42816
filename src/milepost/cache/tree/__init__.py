"""What is known of prompts: chains of keys, nodes and checkpoints, kinds of layers, matching."""

from milepost.cache.tree.chain import TOKEN_BYTES, Chain, checkpoint_key
from milepost.cache.tree.index import Tree
from milepost.cache.tree.kinds import (
    HYBRID,
    FullAttention,
    LayerKind,
    Path,
    Recurrent,
    ShortConvolution,
    SlidingWindow,
    grid_of,
    window_of,
)
from milepost.cache.tree.links import (
    MAX_TAILS_COMPARED,
    follow,
    link,
    unlink,
)
from milepost.cache.tree.matching import Finder, Match
from milepost.cache.tree.nodes import (
    Checkpoint,
    End,
    Node,
    Reservation,
)
from milepost.cache.tree.outbox import Outbox
from milepost.cache.tree.reservations import hang, pass_on, take

__all__ = [
    "HYBRID",
    "MAX_TAILS_COMPARED",
    "TOKEN_BYTES",
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
    "follow",
    "grid_of",
    "hang",
    "link",
    "pass_on",
    "take",
    "unlink",
    "window_of",
]
