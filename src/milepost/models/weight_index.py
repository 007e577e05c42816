"""Finds the safetensors files of a checkpoint, and the tensors that each must hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from milepost.errors import WeightsError
from milepost.models.folder import read_object, reading

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_SINGLE = "model.safetensors"
_OTHERS = ("adapter_model.safetensors", "consolidated*.safetensors")
"""Patterns of files that are not the checkpoint's own: adapters, and copies under the maker's
names."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """Maps each tensor's name to its file, from the index, or from all files if there is none. An
    index whose files are gone, next to a single file, is a leftover of other weights."""
    index, single = folder / INDEX, folder / _SINGLE
    if index.exists():
        indexed = _read_index(folder, index)
        files = set(indexed.values())
        if single in files or not single.is_file():
            return indexed
        if all(file.is_file() for file in files):
            _refuse_two_sets(folder, indexed)
            return indexed
        logger.warning("%s: names files that are not there, so %s is loaded", index, _SINGLE)
    by_name: dict[str, Path] = {}
    for file in [single] if single.is_file() else _own_files(folder):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in by_name:
                    raise WeightsError(
                        f"tensor {name!r} is in two files, {by_name[name]} and {file}"
                    )
                by_name[name] = file
    return by_name


def _refuse_two_sets(folder: Path, indexed: Mapping[str, Path]) -> None:
    """Raises WeightsError if the single file holds tensors that the index assigns to others."""
    with open_weights(folder / _SINGLE) as tensors:
        twice = next((name for name in tensors.keys() if name in indexed), None)  # noqa: SIM118
    if twice is not None:
        raise WeightsError(
            f"{folder}: {_SINGLE} and the files that {INDEX} names are both there, with "
            f"{twice!r} in both; remove those that are not the model's"
        )


def _own_files(folder: Path) -> list[Path]:
    """Returns the files of a folder without an index, as some quantisers write it."""
    every = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    listed = [file for file in every if not any(file.match(other) for other in _OTHERS)]
    if listed:
        return listed
    is_adapter = any(file.match(_OTHERS[0]) for file in every)
    advice = "it is an adapter: merge it into its model" if is_adapter else "download it again"
    raise WeightsError(
        f"{folder}: neither {_SINGLE} nor {INDEX} is there; {advice}, or save the checkpoint's "
        "weights as safetensors"
    )


def _read_index(folder: Path, index: Path) -> dict[str, Path]:
    with reading(index, WeightsError):
        weight_map = read_object(index, WeightsError).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(f, str) for f in weight_map.values()
        ):
            raise WeightsError(f"{index}: weight_map is no object of files' names")
        files = {file: folder / file for file in set(weight_map.values())}
        for file in files:
            if not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
                raise WeightsError(
                    f"{index}: {file!r} is no file in this folder; link it here under another name"
                )
            # Both calls raise for a name that no file can have.
            os.fsencode(file)
            files[file].exists()
    return {name: files[file] for name, file in weight_map.items()}


@contextmanager
def open_weights(file: Path) -> Iterator[safe_open]:
    """Opens one file on the CPU; raises WeightsError if it is missing or truncated."""
    if file.exists() and not file.is_file():
        raise WeightsError(f"{file}: is no regular file")
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
    """Whether the file is the pointer that Git leaves in place of a large file if LFS is not
    installed."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER
