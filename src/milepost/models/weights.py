"""Fills a model from safetensors files, straight into its parameters.

Hardly more than one tensor of the checkpoint is held besides the model (see `reading`). Every
tensor of the checkpoint is either placed or on the list of those that are knowingly skipped; every
parameter is filled, or loading fails.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from milepost.errors import WeightsError
from milepost.layers.placements import Placement, Placements
from milepost.models.decoder import Decoder
from milepost.models.reading import Header, Reader, read_extents, read_header

_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_SINGLE = "model.safetensors"
_SHOWN_BYTES = 2**28
"""Less is read in a moment."""


class WeightFiles:
    """The safetensors files of a folder; raises WeightsError if there are none, or the index is
    broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name = _read_names(folder)
        """Tensor's name -> the file that must hold it."""

    def headers(self) -> Iterator[tuple[Path, Header]]:
        """Each file that is loaded, by their names; raises WeightsError for a broken one."""
        for file in sorted(set(self.by_name.values())):
            with _open(file):
                yield file, read_header(file)

    def read_into(
        self,
        placements: Placements,
        skipped: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """Store every tensor as placed, once, from the CPU or from a `device` to which all are
        brought; raises WeightsError naming file and tensor. Shows how far it is where that takes
        more than a moment.
        """
        pattern = re.compile("|".join(skipped) or "(?!)")
        self._refuse_missing(placements)
        names: dict[Path, list[str]] = {}
        for name, holder in self.by_name.items():
            names.setdefault(holder, []).append(name)
        files = sorted(names)
        total = sum(file.stat().st_size for file in files if file.is_file())
        brings = nullcontext() if device is None else Reader(device)
        with _progress(total) as note_bytes, brings as reader:
            for file in files:
                self._read_file(file, names[file], placements, pattern, reader, note_bytes)

    def check(self, placements: Placements, prefix: str, elsewhere: Sequence[str] = ()) -> None:
        """Raise WeightsError, naming file and tensor, unless what begins with `prefix` is exactly
        what is placed, or is one of the patterns `elsewhere`; reads no values."""
        pattern = re.compile("|".join(elsewhere) or "(?!)")
        self._refuse_missing(placements)
        own = {
            name: file
            for name, file in self.by_name.items()
            if name.startswith(prefix) and not pattern.match(name)
        }
        for name, file in own.items():
            if name not in placements:
                raise _no_place(file, name)
        for file in sorted(set(own.values())):
            with _open(file) as tensors:
                held = set(tensors.keys())
                for name in [name for name in own if own[name] == file and name in held]:
                    _check_fits(file, name, tensors, placements[name])

    def _refuse_missing(self, placements: Placements) -> None:
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
        placements: Placements,
        skipped: re.Pattern[str],
        reader: Reader | None,
        note_bytes: Callable[[int], object],
    ) -> None:
        placed = []
        with _open(file) as tensors:
            held = set(tensors.keys())
            for name in wanted:
                if name not in held:
                    raise WeightsError(
                        f"{file}: tensor {name!r} is missing, though {_INDEX} names it here; "
                        "download the checkpoint again"
                    )
                if name in placements:
                    _check_fits(file, name, tensors, placements[name])
                    if reader is None or placements[name].cuts:
                        note_bytes(_store(name, tensors, placements[name]))
                    else:
                        placed.append(name)
                elif not skipped.match(name):
                    raise _no_place(file, name)
            self._refuse_others(file, held, skipped)
        if reader is None:
            return
        for extent, tensor in reader.read(file, read_extents(file, placed)):
            _place(tensor, placements[extent.name])
            note_bytes(tensor.nbytes)

    def _refuse_others(self, file: Path, held: set[str], skipped: re.Pattern[str]) -> None:
        """What a file holds besides the tensors that the index names there."""
        for name in sorted(held):
            holder = self.by_name.get(name)
            if holder is None and not skipped.match(name):
                raise WeightsError(f"{file}: tensor {name!r} is in the file but not in {_INDEX}")
            if holder not in (None, file):
                raise WeightsError(f"tensor {name!r} is in two files, {holder} and {file}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """Shows how much of so many bytes has been read, as the function that it yields is told."""
    if total < _SHOWN_BYTES:
        yield lambda _: None
        return
    words = "loading weights"
    with tqdm(total=total, desc=words, unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        yield bar.update


def fill_from_files(model: Decoder, files: WeightFiles, skipped: Sequence[str]) -> None:
    """Fill `model` from the checkpoint's files, but for tensors whose names begin with one of the
    patterns `skipped`; raises WeightsError."""
    with torch.no_grad():
        device, others = model.embedding.device, (*skipped, *model.elsewhere)
        files.read_into(model.placements(), others, device if device.type == "cuda" else None)


def _no_place(file: Path, name: str) -> WeightsError:
    return WeightsError(
        f"{file}: tensor {name!r} has no place in the model; the checkpoint "
        "doesn't fit its config.json"
    )


def _store(name: str, tensors: safe_open, placement: Placement) -> int:
    """Store a tensor, or a part of it, as it lies in the system's cache of the file; returns its
    bytes there."""
    view = tensors.get_slice(name)
    tensor = placement.take(view) if placement.cuts else tensors.get_tensor(name)
    _place(tensor, placement)
    return tensor.nbytes


def _place(tensor: Tensor, placement: Placement) -> None:
    # A single number may have no dimension, or some of one.
    is_one = tensor.numel() == 1 and not placement.cuts
    placement.store(tensor.view(placement.shape) if is_one else tensor)


def _check_fits(file: Path, name: str, tensors: safe_open, placement: Placement) -> None:
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


def _read_names(folder: Path) -> dict[str, Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: folder / file for file in set(named.values())}
            return {name: files[file] for name, file in named.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{index}: not an index of safetensors files ({error!r})") from error
    if single.is_file():
        with _open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    raise WeightsError(
        f"{folder}: neither {_SINGLE} nor {_INDEX} is there; download the checkpoint again, or "
        "save its weights as safetensors"
    )


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    """Open one file on the CPU; raises WeightsError if it is missing or truncated."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise WeightsError(f"{file}: is missing; download the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        if _is_pointer(file):
            raise WeightsError(
                f"{file}: is Git LFS's pointer to the weights; fetch them with `git lfs pull`"
            ) from error
        raise WeightsError(
            f"{file}: cannot be read, it may be truncated ({error}); download it again"
        ) from error


def _is_pointer(file: Path) -> bool:
    """What Git leaves in place of a large file where LFS is not installed."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER
