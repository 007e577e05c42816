"""The memory that a model's weights take, by part and form. `check_room` refuses a model that does
not fit its device before anything is allocated, and says what would help."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError
from milepost.layers.attention import Attention
from milepost.layers.linear import Linear
from milepost.layers.mla import MLA
from milepost.layers.mlp import MLP
from milepost.layers.moe import MoE
from milepost.layers.parameters import ModuleScope
from milepost.models.decoder import Decoder

GIB = 2**30
_WEIGHTS_SHARE = 0.8
"""Largest share of free memory for weights that leaves enough for a useful cache."""
_HOST = torch.device("cpu")
_MEMINFO = Path("/proc/meminfo")
"""File in which Linux says how much memory can be taken without swapping."""


def check_room(outline: Decoder, scope: ModuleScope, *, is_quantised: bool) -> None:
    """Raises ConfigError if the device of `scope` has too little free memory for the parameters of
    `outline`, which have shapes but no memory."""
    free = available_bytes(scope.device)
    if free is None:
        return
    if scope.names:
        # Projections whose blocks do not align with their matrix's have more scales.
        for module in outline.modules():
            if isinstance(module, Linear):
                module.placements()
    needed = outline.num_bytes
    if outline.host_bytes:
        _check_host(outline.host_bytes, beside=needed if scope.device == _HOST else 0)
    if needed > free:
        gc.collect()  # an engine that nobody holds any more may still exist, in reference cycles
        free = available_bytes(scope.device) or 0
    if needed > free:
        name = str(scope.dtype).removeprefix("torch.")
        name = "as they are quantised" if is_quantised else f"in {name}"
        advice = _advise(scope, needed, free, is_quantised=is_quantised)
        raise ConfigError(
            f"the weights take {needed / GIB:.1f} GiB {name} and {scope.device} has "
            f"{free / GIB:.1f} GiB free: {(needed - free) / GIB:.1f} GiB are missing; "
            f"{advice}use a smaller model or a device with more memory, or end what else uses it"
        )


def _check_host(num_bytes: int, *, beside: int) -> None:
    """Raises ConfigError if host memory has no room for `num_bytes` of tables beside weights that
    take `beside` bytes of it."""
    free = available_bytes(_HOST)
    if free is not None and num_bytes > free - beside:
        raise ConfigError(
            f"tables of n-grams take {num_bytes / GIB:.1f} GiB of host memory, and "
            f"{free / GIB:.1f} GiB are free: use a machine with more"
        )


def _advise(scope: ModuleScope, needed: int, free: int, *, is_quantised: bool) -> str:
    """Suggests ways to make the weights smaller, or to spread them over more GPUs."""
    advice = ""
    if not is_quantised and scope.dtype.itemsize >= 4:
        advice = "dtype='bfloat16' halves the weights, or "
    elif not is_quantised:
        advice = "quantization='fp8' halves the weights, or "
    if scope.device.type != "cuda":
        return advice
    least = math.ceil(needed * scope.ranks.size / (_WEIGHTS_SHARE * free))
    count = 1 << (least - 1).bit_length()
    return f"{advice}tensor_parallel_size={count} spreads them over as many such GPUs, or "


def available_bytes(device: torch.device) -> int | None:
    """Returns the memory that can be taken on a device; None if that is unknown."""
    if device.type == "cuda":
        collect_memory(device)  # also frees memory for the pools, which take all that is free
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="ascii"))
    return int(match[1]) * 1024 if match else None


def collect_memory(device: torch.device) -> None:
    """Returns a GPU's unreferenced memory to the system."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


REST, TOWER = "norms", "vision tower"
_PARTS: Mapping[type, str] = {
    Attention: "attention",
    MLA: "attention",
    MLP: "feed-forward",
    MoE: "experts",
}


def weigh(model: Decoder) -> dict[tuple[str, str], int]:
    """Returns the bytes of each part's weights by part and form, the largest first. A shared weight
    counts once."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    embedding = model.embedding
    num_bytes["embedding", _form(model, embedding)] = embedding.nbytes
    seen = {id(embedding)}
    for part, module in (*_parts(model), (REST, model)):
        for owner in module.modules():
            for parameter in owner.parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    num_bytes[part, _form(owner, parameter)] += parameter.nbytes
    return dict(num_bytes.most_common())


def _parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    for part in chain.from_iterable(model.parts_by_layer):
        assert isinstance(part, nn.Module), "a part is a module"
        yield _PARTS.get(type(part), "recurrences"), part
    if model.tower is not None:
        yield TOWER, model.tower
    if model.mtp is not None:
        yield "MTP head", model.mtp
    yield "lm_head", model.lm_head


def _form(owner: nn.Module, parameter: Tensor) -> str:
    """Returns the form for products, or the dtype of values that are stored as they are."""
    forms = getattr(owner, "forms", None) or (getattr(owner, "form", None),)
    names = {type(form).__name__.lower() for form in forms if form is not None}
    names -= {"raw", "packed"}
    if len(names) == 1:
        return names.pop()
    return str(parameter.dtype).removeprefix("torch.")
