"""Fills a model from safetensors files, one tensor at a time, straight into its parameters.

At no time more than one tensor of the checkpoint is held besides the model. Every tensor of the
checkpoint is either placed or on the list of those that are knowingly skipped; every parameter is
filled, or loading fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from milepost.errors import WeightsError
from milepost.layers.parameters import Placement, Placements
from milepost.models.hybrid import HybridModel

SKIPPED = (
    r"mtp\.",  # multi-token prediction: drafts for speculative decoding, never part of the logits
    r"model\.visual\.",  # vision tower of a multimodal checkpoint: only text is run
)
"""Patterns of names that are left out knowingly, matched at the beginning."""

_PREFIXES = ("model.language_model.", "model.")
"""Where the text model stands in a checkpoint; the first whose embedding is there."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN_BYTES = 2**28
"""Less is read in a moment."""
_SKIPPED = re.compile("|".join(SKIPPED))


class WeightFiles:
    """The safetensors files of a folder; raises WeightsError if there are none, or the index is
    broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name = _read_names(folder)
        """Tensor's name -> the file that must hold it."""

    def read_into(self, placements: Placements) -> None:
        """Store every tensor as placed; raises WeightsError naming file and tensor. Shows how far
        it is where that takes more than a moment.
        """
        for name in placements:
            if name not in self.by_name:
                raise WeightsError(
                    f"{self.folder}: tensor {name!r} is missing; the checkpoint doesn't fit its "
                    "config.json, or was saved incompletely"
                )
        files = sorted(set(self.by_name.values()))
        total = sum(file.stat().st_size for file in files if file.is_file())
        with _progress(total) as note_bytes:
            for file in files:
                self._read_file(file, placements, note_bytes)

    def _read_file(
        self, file: Path, placements: Placements, note_bytes: Callable[[int], object]
    ) -> None:
        wanted = [name for name, holder in self.by_name.items() if holder == file]
        with _open(file) as tensors:
            held = set(tensors.keys())
            for name in wanted:
                if name not in held:
                    raise WeightsError(
                        f"{file}: tensor {name!r} is missing, though {_INDEX} names it here; "
                        "download the checkpoint again"
                    )
                if name in placements:
                    note_bytes(_store(file, name, tensors, placements[name]))
                elif not _SKIPPED.match(name):
                    raise WeightsError(
                        f"{file}: tensor {name!r} has no place in the model; the checkpoint "
                        "doesn't fit its config.json"
                    )
            _refuse_unnamed(file, held, self.by_name)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """Shows how much of so many bytes has been read, as the function that it yields is told."""
    if total < _SHOWN_BYTES:
        yield lambda _: None
        return
    words = "loading weights"
    with tqdm(total=total, desc=words, unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        yield bar.update


def fill_from_folder(model: HybridModel, files: WeightFiles) -> None:
    """Fill `model` from the checkpoint's files; raises WeightsError."""
    with torch.no_grad():
        files.read_into(model.placements(_find_prefix(files.by_name), files.by_name))


def _find_prefix(names: Container[str]) -> str:
    found = (prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names)
    return next(found, _PREFIXES[-1])


def _store(file: Path, name: str, tensors: safe_open, placement: Placement) -> int:
    """Returns the tensor's bytes in the file."""
    view = tensors.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != placement.shape:
        raise WeightsError(
            f"{file}: tensor {name!r} has shape {list(shape)}, the model needs "
            f"{list(placement.shape)}; the checkpoint doesn't fit its config.json"
        )
    if dtype not in _FLOATS:
        raise WeightsError(
            f"{file}: tensor {name!r} is {dtype}; use a checkpoint in {', '.join(_FLOATS)}"
        )
    tensor = tensors.get_tensor(name)
    placement.store(tensor)
    return tensor.nbytes


def _read_names(folder: Path) -> dict[str, Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in named.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not an index of safetensors files ({error!r})") from error
    if single.is_file():
        with _open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    raise WeightsError(
        f"{folder}: neither {_SINGLE} nor {_INDEX} is there; save the weights as safetensors"
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
        raise WeightsError(
            f"{file}: cannot be read, it may be truncated ({error}); download it again"
        ) from error


def _refuse_unnamed(file: Path, held: set[str], named: Container[str]) -> None:
    unnamed = sorted(name for name in held if name not in named and not _SKIPPED.match(name))
    if unnamed:
        raise WeightsError(f"{file}: tensor {unnamed[0]!r} is in the file but not in {_INDEX}")
