"""How fast a checkpoint comes from the disk to the device, beside what the disk itself reads.

    python bench/loading.py [--model bench/models/hybrid-80b-a3b-fp8] [--layers 6] [--folder DIR]

Writes a checkpoint of so many layers to the folder, random bytes in the model's own layout, unless
it is there. Then in turn, each time with the files out of the system's cache: one thread reads them
from end to end, eight read pieces of them (both to nowhere), the loader fills a model; last the
loader again, from the cache. Before all that the configuration is read, for which a process imports
modules (of a checkpoint that was there; apart in the row). One JSON row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rows
import torch

from milepost.models.loading import LoadOptions, load_model, outline
from milepost.models.registry import load_config

_BLOCK = 8 << 20
_SHARD = 4 << 30
_READERS = 8
_BYTES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=rows.ROOT / "bench/models/hybrid-80b-a3b-fp8")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "milepost-load"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-loading.jsonl")
    arguments = parser.parse_args()
    folder = arguments.folder / f"{arguments.model.name}-{arguments.layers}"
    if not (folder / "model.safetensors.index.json").exists():
        _write(arguments.model, arguments.layers, folder)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    config_s = _time(lambda: load_config(folder))
    ways: dict[str, Callable[[], object]] = {
        "one_reader": lambda: _read(files, 1),
        "eight_readers": lambda: _read(files, _READERS),
        "load": lambda: load_model(folder, LoadOptions(device=device)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.turns):
        for name, run in ways.items():
            _drop(files)
            seconds[name].append(_time(run))
    seconds["load_from_cache"] = [_time(ways["load"]) for _ in range(arguments.turns)]
    rate = {name: size / statistics.median(each) / 1e9 for name, each in seconds.items()}
    row = {
        **rows.provenance(),
        "model": arguments.model.name,
        "layers": arguments.layers,
        "bytes": size,
        "gb_per_s": rate,
        "config_s": config_s,
        "load_of_one_reader": rows.paired_ratio(seconds["one_reader"], seconds["load"]),
        "load_of_eight_readers": rows.paired_ratio(seconds["eight_readers"], seconds["load"]),
    }
    print(json.dumps(row), flush=True)
    rows.write(arguments.out, [row])
    return 0


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _drop(files: list[Path]) -> None:
    """Out of the system's cache; what is not on the disk yet would stay in it."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path], num_threads: int) -> None:
    """All of their bytes, in their order, so many blocks at a time."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        starts = range(0, file.stat().st_size, _BLOCK)

        def read(start: int, descriptor: int = descriptor) -> int:
            return len(os.pread(descriptor, _BLOCK, start))

        with ThreadPoolExecutor(num_threads) as threads:
            count = sum(threads.map(read, starts))
        os.close(descriptor)
        assert count == file.stat().st_size, f"{file} was read whole"


# --- a checkpoint ---------------------------------------------------------------------------------


def _write(model: Path, num_layers: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    config["layer_types"] = config["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names: dict[str, str] = {}
    for number, shard in enumerate(_shards(folder)):
        file = f"model-{number + 1:05d}.safetensors"
        _write_shard(folder / file, shard)
        names |= dict.fromkeys(shard, file)
    index = json.dumps({"weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _shards(folder: Path) -> Iterator[dict[str, tuple[str, tuple[int, ...]]]]:
    """Types and shapes of tensors, as many as make a file."""
    held: dict[str, tuple[str, tuple[int, ...]]] = {}
    size = 0
    for name, place in outline(folder)[0].placements().items():
        dtype = next(each for each in _BYTES if each in place.types)
        held[name] = dtype, place.shape
        size += _BYTES[dtype] * math.prod(place.shape)
        if size > _SHARD:
            yield held
            held, size = {}, 0
    if held:
        yield held


def _write_shard(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    noise = os.urandom(_BLOCK + 4096)
    with file.open("wb") as opened:
        opened.write(len(head).to_bytes(8, "little") + head)
        for number, start in enumerate(range(0, end, _BLOCK)):
            shift = number % 4096
            opened.write(noise[shift : shift + min(_BLOCK, end - start)])
        opened.flush()
        os.fsync(opened.fileno())


if __name__ == "__main__":
    sys.exit(main())
