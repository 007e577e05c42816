import json

import pytest

from milepost.engine.tokenizer import end_token_ids, load_tokenizer
from milepost.errors import ConfigError


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def test_a_saved_tokenizer_is_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("fox <|im_end|>") == tokenizer.encode("fox <|im_end|>")


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


def test_end_ids_come_from_the_generation_config_and_the_tokenizer(tokenizer, tmp_path):
    assert end_token_ids(tmp_path, None) == ()
    assert end_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id,)
    write(tmp_path, "config.json", {"eos_token_id": 90})
    assert end_token_ids(tmp_path, None) == (90,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [70, 60]})
    assert end_token_ids(tmp_path, None) == (60, 70)
    assert end_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id, 60, 70)


def test_end_ids_of_a_multimodal_checkpoint_are_its_texts(tmp_path):
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 5}})
    assert end_token_ids(tmp_path, None) == (5,)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        end_token_ids(tmp_path, None)
