"""Fills a model from safetensors files, straight into its parameters.

Hardly more than one tensor of the checkpoint is held besides the model (see `reading`). Every
tensor of the checkpoint is either placed or on the list of tensors to skip; every parameter is
filled, or loading fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from milepost.errors import WeightsError
from milepost.layers.parameters import VALUES
from milepost.layers.weight_slots import WeightSlot, WeightSlots
from milepost.models.decoder import Decoder
from milepost.models.reading import Header, Reader, read_extents, read_header
from milepost.models.weight_index import INDEX, open_weights, tensor_files
from milepost.progress import progress

_SHOWN_BYTES = 2**28
"""Size below which no progress is shown, because it is read in a moment."""
_ZEROS = ("bias", "weight_zero_point", "input_zero_point")
"""Tensors without effect if they are zeros next to a projection that has no such tensor."""
DERIVED = (r"(.*\.)?rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$",)
"""Patterns of tensors that old tools saved although they follow from the configuration."""


class WeightFiles:
    """The safetensors files of a folder. Raises WeightsError if there are none, or the index is
    broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name = tensor_files(folder)
        """Maps a tensor's name to the file that must hold it."""

    def headers(self) -> Iterator[tuple[Path, Header]]:
        """Yields each file that is loaded with its header, by name. Raises WeightsError for a
        broken file."""
        for file in sorted(set(self.by_name.values())):
            with open_weights(file):
                yield file, read_header(file)

    def read_into(
        self,
        placements: WeightSlots,
        skipped: Sequence[str] = (),
        device: torch.device | None = None,
        *,
        shows_progress: bool = True,
    ) -> None:
        """Stores every tensor as placed, once, from the CPU, or from `device` if one is given.
        Raises WeightsError, naming file and tensor. Shows progress if it takes more than a
        moment."""
        pattern = re.compile("|".join(skipped) or "(?!)")
        self._refuse_missing(placements)
        names: dict[Path, list[str]] = {}
        for name, holder in self.by_name.items():
            names.setdefault(holder, []).append(name)
        files = sorted(names)
        total = sum(file.stat().st_size for file in files if file.is_file())
        brings = nullcontext() if device is None else Reader(device)
        is_shown = shows_progress and total >= _SHOWN_BYTES
        showing = progress("loading weights", total, "bytes", is_shown=is_shown)
        with showing as note_bytes, brings as reader:
            for file in files:
                self._read_file(file, names[file], placements, pattern, reader, note_bytes)

    def check(self, placements: WeightSlots, prefix: str, elsewhere: Sequence[str] = ()) -> None:
        """Raises WeightsError, naming file and tensor, unless the tensors whose names begin with
        `prefix` are exactly the placed ones or match a pattern in `elsewhere`. Reads no values."""
        pattern = re.compile("|".join(elsewhere) or "(?!)")
        self._refuse_missing(placements)
        expected = {
            name: file
            for name, file in self.by_name.items()
            if name.startswith(prefix) and not pattern.match(name)
        }
        for file in sorted(set(expected.values())):
            with open_weights(file) as tensors:
                held = set(tensors.keys())
                for name in [name for name in expected if expected[name] == file]:
                    if name in placements and name in held:
                        _check_fits(file, name, tensors, placements[name])
                    elif name not in placements:
                        _refuse_unplaced(file, name, tensors, placements)

    def _refuse_missing(self, placements: WeightSlots) -> None:
        for name in placements:
            if name not in self.by_name:
                raise WeightsError(
                    f"{self.folder}: tensor {name!r} is missing; the checkpoint doesn't fit its "
                    "config.json, or was saved incompletely"
                )

    def _read_file(
        self,
        file: Path,
        wanted: Sequence[str],
        placements: WeightSlots,
        skipped: re.Pattern[str],
        reader: Reader | None,
        note_bytes: Callable[[int], object],
    ) -> None:
        placed = []
        with open_weights(file) as tensors:
            held = set(tensors.keys())
            for name in wanted:
                if name not in held:
                    raise WeightsError(
                        f"{file}: tensor {name!r} is missing, though {INDEX} names it here; "
                        "download the checkpoint again"
                    )
                if name in placements:
                    _check_fits(file, name, tensors, placements[name])
                    if reader is None or placements[name].cuts:
                        note_bytes(_store(name, tensors, placements[name]))
                    else:
                        placed.append(name)
                elif not skipped.match(name):
                    _refuse_unplaced(file, name, tensors, placements)
            self._refuse_others(file, tensors, held, skipped)
        if reader is None:
            return
        for extent, tensor in reader.read(file, read_extents(file, placed)):
            _place(tensor, placements[extent.name])
            note_bytes(tensor.nbytes)

    def _refuse_others(
        self, file: Path, tensors: safe_open, held: set[str], skipped: re.Pattern[str]
    ) -> None:
        """Refuses tensors of a file that the index does not assign to it, unless they are
        copies."""
        for name in sorted(held):
            holder = self.by_name.get(name)
            if holder is None and not skipped.match(name):
                raise WeightsError(f"{file}: tensor {name!r} is in the file but not in {INDEX}")
            if holder not in (None, file) and not _is_copy(name, tensors, holder):
                raise WeightsError(f"tensor {name!r} is in two files, {holder} and {file}")


def _is_copy(name: str, tensors: safe_open, holder: Path) -> bool:
    """Whether the file `holder` has the tensor `name` with the same bytes."""
    with open_weights(holder) as others:
        if name not in others.keys():  # noqa: SIM118
            return False
        views = tensors.get_slice(name), others.get_slice(name)
        told = [(view.get_shape(), view.get_dtype()) for view in views]
        if told[0] != told[1]:
            return False
        first, other = (each.get_tensor(name).contiguous() for each in (tensors, others))
        return torch.equal(*(each.flatten().view(torch.uint8) for each in (first, other)))


def fill_from_files(model: Decoder, files: WeightFiles, skipped: Sequence[str]) -> None:
    """Fills `model` from the checkpoint's files, skipping tensors whose names begin with one of the
    patterns `skipped`. Raises WeightsError."""
    with torch.no_grad():
        device, others = model.embedding.device, (*skipped, *model.elsewhere)
        files.read_into(
            model.placements(),
            others,
            device if device.type == "cuda" else None,
            shows_progress=model.ranks.is_first,
        )


def _refuse_unplaced(file: Path, name: str, tensors: safe_open, placements: WeightSlots) -> None:
    """Raises WeightsError for a tensor that would change an answer. Zeros that some tools write for
    every projection do not."""
    path, _, last = name.rpartition(".")
    is_beside = any(f"{path}.{values}" in placements for values in VALUES)
    # Packed zero points that are all zero do change an answer.
    may_be_zeros = last in _ZEROS and tensors.get_slice(name).get_dtype() != "I32"
    if is_beside and may_be_zeros and not tensors.get_tensor(name).float().any():
        return
    raise WeightsError(
        f"{file}: tensor {name!r} has no place in the model; the checkpoint "
        "doesn't fit its config.json"
    )


def _store(name: str, tensors: safe_open, placement: WeightSlot) -> int:
    """Stores a tensor, or a part of it, from the page cache of its file; returns its bytes
    there."""
    view = tensors.get_slice(name)
    tensor = placement.take(view) if placement.cuts else tensors.get_tensor(name)
    _place(tensor, placement)
    return tensor.nbytes


def _place(tensor: Tensor, placement: WeightSlot) -> None:
    # A single number may have no dimension, or several of size 1.
    is_one = tensor.numel() == 1 and not placement.cuts
    placement.store(tensor.view(placement.shape) if is_one else tensor)


def _check_fits(file: Path, name: str, tensors: safe_open, placement: WeightSlot) -> None:
    view = tensors.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != placement.shape and (math.prod(shape), math.prod(placement.shape)) != (1, 1):
        raise WeightsError(
            f"{file}: tensor {name!r} has shape {list(shape)}, the model needs "
            f"{list(placement.shape)}; the checkpoint doesn't fit its config.json"
        )
    if dtype not in placement.types:
        raise WeightsError(
            f"{file}: tensor {name!r} is {dtype}; use a checkpoint in {', '.join(placement.types)}"
        )
