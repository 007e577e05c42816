"""Adds up the bytes of a model's weights, by the part that they belong to and by their form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from torch import Tensor, nn

from milepost.layers.attention import Attention
from milepost.layers.mla import MLA
from milepost.layers.mlp import MLP
from milepost.layers.moe import MoE
from milepost.models.decoder import Decoder

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
