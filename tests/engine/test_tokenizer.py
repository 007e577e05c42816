import json

import pytest
from transformers import tokenization_utils_base

from milepost.engine.tokenizer import load_tokenizer
from milepost.errors import ConfigError


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def test_a_saved_tokenizer_is_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("fox <|im_end|>") == tokenizer.encode("fox <|im_end|>")


def test_a_long_prompt_is_no_matter_of_the_tokenizers(tokenizer, tmp_path, monkeypatch):
    """The engine knows how far a model reaches."""
    tokenizer.save_pretrained(tmp_path)
    change = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(tmp_path, "tokenizer_config.json", change | {"model_max_length": 8})
    loaded = load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", pytest.fail)
    assert len(loaded.encode("fox " * 20)) > loaded.model_max_length == 8


@pytest.mark.parametrize("source", ["/no/such/folder", "./no/such/folder"])
def test_a_missing_folder_is_named_and_the_way_out_too(source):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(source)
    assert source in str(caught.value)
    assert "skip_tokenizer_init=True" in str(caught.value)


def test_a_folder_without_vocabulary_is_refused(tmp_path):
    write(tmp_path, "config.json", {"model_type": "qwen3_next"})
    with pytest.raises(ConfigError, match=r"none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_vocabulary_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"broken')
    with pytest.raises(ConfigError, match="Unterminated string"):
        load_tokenizer(tmp_path)
