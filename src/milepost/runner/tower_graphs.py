"""CUDA graphs of a vision tower's runs over small pictures.

A small picture's kernels run shorter than the host takes to launch them one by one. The tower's
shapes follow from the pictures' grids, so a graph is captured for grids that come again, and the
others run kernel by kernel. A graph launches the same kernels with the same shapes, so embeddings
have the same bits either way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from milepost.layers.tower import Tower
from milepost.layers.tower_parts import Grid, TowerLayout

MOST_GRAPH_PATCHES = 4096
"""Largest number of patches in a captured run. A GPU computes on a larger one for longer than the
host launches."""
MOST_GRAPHS = 16
"""Number of graphs that are kept."""
_MOST_SEEN = 64
"""Number of runs that are remembered without a graph."""
_LEAST_BETWEEN = 32
"""Runs between two captures once `MOST_GRAPHS` are kept. A capture takes as long as launching a few
runs, so pictures of ever new sizes must not cause one each."""

_SLACK_BYTES = 64 * 2**20
"""Memory of graphs besides a run's: a GEMM library's workspace, and the allocator's rounding."""

Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")
Launches = Callable[[], object]


class RecentGraphs(Generic[Key, Graph]):
    """The most recently used graphs, and the rule for what is worth one: a run that comes again."""

    def __init__(
        self,
        *,
        most: int = MOST_GRAPHS,
        most_seen: int = _MOST_SEEN,
        least_between: int = _LEAST_BETWEEN,
    ) -> None:
        self._most, self._most_seen, self._least_between = most, most_seen, least_between
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._num_since = 0
        """Runs since the last capture."""

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Key) -> Graph | None:
        """Returns the graph of a run that is about to begin, if there is one."""
        self._num_since += 1
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        return captured

    def deserves(self, key: Key) -> bool:
        """Whether to capture a run that has no graph: it was seen before, and graphs do not
        displace each other too often. Remembers that it was seen."""
        is_known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._most_seen:
            self._seen.popitem(last=False)
        has_room = len(self._graphs) < self._most
        return is_known and (has_room or self._num_since >= self._least_between)

    def keep(self, key: Key, graph: Graph) -> None:
        """Keeps the graph of a run, and drops the least recently used ones beyond the limit."""
        self._seen.pop(key, None)
        self._graphs[key] = graph
        self._num_since = 0
        while len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())

    def clear(self) -> None:
        """Drops everything."""
        self._graphs.clear()
        self._seen.clear()


class Recorder(Protocol):
    """Records launches, to be repeated by one call."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the records hold."""
        ...

    def record(self, launches: Launches) -> Launches:
        """Returns what repeats `launches`, which use the same addresses each time. They run before
        only if the caller runs them."""
        ...

    def clear(self) -> None:
        """Gives the memory of all records back; none is repeated any more."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory, since never two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def record(self, launches: Launches) -> Launches:
        # Not torch.cuda.graph as a context, which synchronises and empties torch's cache.
        if torch.cuda.graph.default_capture_stream is None:
            torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
        stream, current = torch.cuda.graph.default_capture_stream, torch.cuda.current_stream()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # NCCL's threads query events during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launches()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        self._num_bytes += max(torch.cuda.memory_reserved() - before, 0)
        return graph.replay

    def clear(self) -> None:
        self._pool, self._num_bytes = torch.cuda.graph_pool_handle(), 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRun:
    """A run that one call repeats."""

    launch: Launches
    rows: Tensor
    """[P, bytes], the patches that it reads."""
    embeddings: Tensor
    """[P / M, C], overwritten by the next run of any graph."""
    layout: TowerLayout
    """Kept since the graph reads its tensors."""


@dataclass(frozen=True, slots=True)
class RunKind:
    """All that decides the kernels of a run and their shapes."""

    grids: tuple[Grid, ...]
    row_bytes: int
    is_fixed: bool

    @property
    def num_patches(self) -> int:
        return sum(prod(grid) for grid in self.grids)


class TowerGraphs:
    """Runs a tower over small pictures by graphs that take up to `most_bytes` together. `table` is
    that of `Tower.begin`."""

    def __init__(
        self, tower: Tower, table: Tensor, *, most_bytes: int, recorder: Recorder | None = None
    ) -> None:
        self._tower, self._table, self._most_bytes = tower, table, most_bytes
        self._recorder = recorder or CudaRecorder()
        self._recent: RecentGraphs[RunKind, CapturedRun] = RecentGraphs()
        shapes = tower.shapes
        num_tokens = MOST_GRAPH_PATCHES // shapes.merge_size**2
        row_bytes = shapes.num_frames * shapes.frame_bytes
        self._rows = table.new_empty(MOST_GRAPH_PATCHES * row_bytes, dtype=torch.uint8)
        self._embeddings = table.new_empty(num_tokens, shapes.output_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the graphs, their layouts and their buffers take."""
        layouts = sum(each.layout.num_bytes for each in self._recent)
        buffers = self._rows.nbytes + self._embeddings.nbytes
        return self._recorder.num_bytes + layouts + buffers

    def prepare(self) -> None:
        """Captures a run of the largest size, so that the others fit in its memory."""
        kind = largest_kind(self._tower)
        rows = self._rows[: kind.num_patches * kind.row_bytes].zero_()
        self._tower(rows.view(-1, kind.row_bytes), self._table, kind.grids)  # loads its kernels
        self._recent.keep(kind, self._capture(kind))

    @torch.inference_mode()
    def run(self, rows: Tensor, grids: tuple[Grid, ...], *, is_fixed: bool) -> Tensor | None:
        """Returns the embeddings [P / M, C] of pictures whose patches are `rows` [P, bytes] on the
        host, in pinned memory on a GPU. Returns None if no graph runs them: the tower has to."""
        if len(rows) > MOST_GRAPH_PATCHES or rows.nbytes > self._rows.nbytes:
            return None
        kind = RunKind(grids, rows.shape[1], is_fixed)
        captured = self._recent.find(kind)
        if captured is None:
            if not self._recent.deserves(kind):
                return None
            captured = self._capture(kind)
            self._recent.keep(kind, captured)
        captured.rows.copy_(rows, non_blocking=True)
        captured.launch()
        embeddings = captured.embeddings.clone()
        if self.num_bytes > self._most_bytes:
            self._recent.clear()
            self._recorder.clear()
        return embeddings

    @torch.inference_mode()
    def _capture(self, kind: RunKind) -> CapturedRun:
        """Captures a run whose kernels have run before."""
        layout = self._tower.lay_out(kind.grids, is_fixed=kind.is_fixed)
        num_patches, row_bytes = kind.num_patches, kind.row_bytes
        rows = self._rows[: num_patches * row_bytes].view(num_patches, row_bytes)
        embeddings = self._embeddings[: num_patches // self._tower.shapes.merge_size**2]
        launch = self._recorder.record(
            lambda: embeddings.copy_(self._tower.run(rows, self._table, layout))
        )
        return CapturedRun(launch=launch, rows=rows, embeddings=embeddings, layout=layout)


def largest_kind(tower: Tower) -> RunKind:
    """Returns the kind of a square picture with as many patches as a graph may have."""
    shapes = tower.shapes
    side = int(MOST_GRAPH_PATCHES**0.5) // shapes.merge_size * shapes.merge_size
    return RunKind(((1, side, side),), shapes.frame_bytes, is_fixed=False)


def graph_bytes(tower: Tower, run_bytes: int, layout: TowerLayout) -> int:
    """Returns the most bytes that a tower's graphs take. The largest run takes `run_bytes`, and has
    this layout. The graphs share what it takes, and half as much for the gaps between tensors of
    runs of other sizes, and some more for libraries."""
    shapes = tower.shapes
    num_tokens = MOST_GRAPH_PATCHES // shapes.merge_size**2
    embeddings = num_tokens * shapes.output_size * tower.scope.dtype.itemsize
    buffers = MOST_GRAPH_PATCHES * shapes.num_frames * shapes.frame_bytes + embeddings
    return run_bytes * 3 // 2 + _SLACK_BYTES + buffers + MOST_GRAPHS * layout.num_bytes
