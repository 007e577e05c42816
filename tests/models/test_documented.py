"""The architecture of docs/adding-a-model.md, as it is printed there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from milepost.models import architectures
from milepost.models.registry import known

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
CONFIG = {
    "model_type": "my_model",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.2,
    "intermediate_size": 40,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 1024,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "vocab_size": 101,
}


def test_the_printed_file_adds_a_model_that_hits(tmp_path, monkeypatch, capsys):
    file, use = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    folder = tmp_path / "architectures"
    folder.mkdir()
    (folder / "my_model.py").write_text(file)
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(folder)])
    monkeypatch.chdir(tmp_path)
    known.cache_clear()
    try:
        exec(use, {})
    finally:
        known.cache_clear()
    first, second = re.findall(r"^\[(.*)\] (\d+) of 100 ", capsys.readouterr().out, re.M)
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("0", "64")
