"""Files are read in pieces, ahead of what is taken, whatever the sizes of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milepost.errors import WeightsError
from milepost.models import LoadOptions, load_model, reading
from milepost.models.reading import Reader, read_extents
from milepost.models.weights import WeightFiles
from tests.checkpoints import save

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Tensors far smaller than a piece, as large as one, and larger than all that are read ahead;
    of every size of number."""
    random = torch.Generator().manual_seed(0)
    sizes = [3, 1000, 0, 64, 1, 5000, 256, 255, 257, 30, 12_000, 7]
    types = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    tensors = {
        f"{index:02d}": torch.randint(0, 255, (size,), generator=random).to(types[index % 4])
        for index, size in enumerate(sizes)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(reading, "_MAX_GAP", 100)
    monkeypatch.setattr(reading, "_NUM_AHEAD", 3)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("step", [1, 2, 5])
def test_every_tensor_comes_whole(file: Path, step: int) -> None:
    """All of them, or some with others between."""
    from safetensors.torch import load_file

    expected = load_file(file)
    names = sorted(expected)[::step]
    with Reader(CPU) as reader:
        for _ in range(2):
            found = {e.name: t.clone() for e, t in reader.read(file, read_extents(file, names))}
            assert sorted(found) == names
            assert all(torch.equal(found[name], expected[name]) for name in names)
            assert all(found[name].dtype == expected[name].dtype for name in names)
        # What was read ahead was bounded: as many pieces' memory as there may be at a time.
        assert len(reader._free) <= 3


def test_numbers_that_lie_at_odd_places_are_read(tmp_path: Path) -> None:
    values = torch.arange(5, dtype=torch.float32)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "values": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "odd.safetensors"
    data = b"\x07" + values.numpy().tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with Reader(CPU) as reader:
        found = dict(reader.read(path, read_extents(path, ["byte", "values"])))
    assert [extent.name for extent in found] == ["byte", "values"]
    assert torch.equal(list(found.values())[1], values)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("method", [None, "fp8"])
def test_a_model_is_filled_as_from_the_systems_cache(tmp_path: Path, method: str | None) -> None:
    save("qwen3_5_moe", tmp_path)
    model, _ = load_model(tmp_path, LoadOptions(quantization=method))
    expected = {name: each.clone() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        if "scales" in name:  # the file has none of KV, nor of the units that fill blocks up
            each.data.mul_(each.data == 1)
        else:
            each.data.view(torch.uint8).zero_()
    with torch.no_grad():
        WeightFiles(tmp_path).read_into(model.placements(), (".*visual",), CPU)
    for name, each in model.named_parameters():
        assert torch.equal(each.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_becomes_shorter_while_it_is_read_is_named(file: Path) -> None:
    extents = read_extents(file, ["00", "10"])
    with file.open("r+b") as opened:
        opened.truncate(extents[-1].end - 10)
    with Reader(CPU) as reader, pytest.raises(WeightsError, match=r"model\.safetensors: cannot be"):
        for _ in reader.read(file, extents):
            pass


@pytest.mark.usefixtures("small_pieces")
def test_who_stops_early_leaves_nothing_running(file: Path) -> None:
    with Reader(CPU) as reader:
        begun, submit = [], reader._threads.submit
        reader._threads.submit = lambda *given: begun.append(submit(*given)) or begun[-1]
        reading_on = reader.read(file, read_extents(file, ["05", "10"]))
        next(reading_on)
        reading_on.close()
        # Nobody reads from a file that is closed.
        assert all(future.done() for future in begun)
    assert all(not thread.is_alive() for thread in reader._threads._threads)
