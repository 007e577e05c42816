"""LFM3, whose sliding windows lie beside full attention with other rotary positions: logits beside
transformers', wherever they resume, and what would be ignored refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from milepost.errors import UnsupportedModelError
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, open_llm
from tests.models.resuming import Resuming

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_full_attention": {
        "layer_types": ["sliding_attention", "conv", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 17,
        "use_attention_gate": False,
    },
    "odd_sizes": {
        "conv_L_cache": 3,
        "conv_bias": True,
        "head_dim": 12,
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "sliding_window": 1,
        "tie_word_embeddings": True,
        "use_sandwich_norm": False,
    },
    "a_window_longer_than_a_step": {"num_key_value_heads": 1, "sliding_window": 150},
    "other_positions": {
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.3,
                "factor": 2.0,
            },
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("lfm3", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_pages=256)
    Resuming.beside(llm, reference).run_through_pages()


@pytest.mark.parametrize("changes", [{"use_sliding_window": False}, {"sliding_window": None}])
def test_a_window_that_is_switched_off_is_full_attention(changes, tmp_path):
    reference = save("lfm3", tmp_path, vocab_size=VOCAB_SIZE, sliding_window=1024)
    change_config(tmp_path, **changes)
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_pages=256)
    Resuming.beside(llm, reference).run_through_pages()


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"use_sliding_window": "no"}, "use_sliding_window='no'"),
        ({"layer_types": ["conv", "chunked_attention"] * 2 + ["conv"]}, "chunked_attention"),
        ({"rope_parameters": {"full_attention": ROPE}}, "rope_parameters.sliding_attention"),
        (
            {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_theta": -1}}},
            "rope_theta=-1",
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": ROPE,
                    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
                }
            },
            "rope_parameters.full_attention with rope_type='yarn'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_ignored_is_refused(changes, named, tmp_path):
    save("lfm3", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(tmp_path, LoadOptions(load_format="dummy"))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
