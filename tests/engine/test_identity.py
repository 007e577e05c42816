"""The identity of a model as an engine runs it, which all keys of its cache depend on."""

from __future__ import annotations

from dataclasses import replace

import torch

from milepost.config import EngineConfig
from milepost.engine.assembly.rank import identity_of
from milepost.engine.assembly.sizing import pool_shape
from milepost.models.loading import LoadOptions, load_model
from tests.checkpoints import save
from tests.mtp import add_head


def identities(folder, head):
    """Identities with what the model's slots carry, and as if they carried nothing."""
    model, _ = load_model(folder, LoadOptions(head=head))
    shape = pool_shape(EngineConfig(), model, torch.device("cpu"), None)
    assert shape.carried_size
    return [
        identity_of(EngineConfig(), folder, model, each, {})
        for each in (shape, replace(shape, carried_size=0))
    ]


def test_a_head_is_part_of_it(tmp_path):
    save("qwen3_5", tmp_path)
    add_head(tmp_path)
    model, _ = load_model(tmp_path)
    shape = pool_shape(EngineConfig(), model, torch.device("cpu"), None)
    without = identity_of(EngineConfig(), tmp_path, model, shape, {})
    with_head, carrying_nothing = identities(tmp_path, "mtp")
    assert with_head == carrying_nothing != without


def test_states_of_n_grams_are_no_head(tmp_path):
    save("qwen4_exp", tmp_path)
    carrying, carrying_nothing = identities(tmp_path, "none")
    assert carrying == carrying_nothing
