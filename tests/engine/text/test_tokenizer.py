import json
import os
import sys
import threading

import pytest
from transformers import tokenization_utils_base

from milepost.engine.text import text_of
from milepost.engine.text.tokenizer import load_tokenizer
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


def changed(tokenizer, folder, name, change):
    """A saved tokenizer, one of whose files is changed."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / name).read_text())
    change(content)
    write(folder, name, content)
    return folder


def test_what_a_vocabulary_would_cut_off_or_fill_up_is_not(tokenizer, tmp_path):
    """Filling up to 2**40 tokens would end the process with the first text."""

    def change(content):
        content["truncation"] = {"max_length": 2, "stride": 0} | {
            "direction": "Right",
            "strategy": "LongestFirst",
        }
        content["padding"] = {"strategy": {"Fixed": 2**40}, "direction": "Right"} | {
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    loaded = load_tokenizer(changed(tokenizer, tmp_path, "tokenizer.json", change))
    text = "the quick brown fox " * 5
    assert loaded.backend_tokenizer.encode(text).ids == tokenizer.encode(text)
    assert loaded.encode(text) == tokenizer.encode(text)


BROKEN = {
    "huge id": ("tokenizer.json", lambda own: own["model"]["vocab"].update(zq=2**31), "has id"),
    "id that no file holds": (
        "tokenizer.json",
        lambda own: own["added_tokens"][0].update(id=2**40),
        "expected u32",
    ),
    "panic": (
        "tokenizer.json",
        lambda own: own.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "PanicException",
    ),
    "no model": ("tokenizer.json", lambda own: own.pop("model"), "Model missing"),
    "template": ("tokenizer_config.json", lambda own: own.update(chat_template=7), "chat_template"),
    "templates": (
        "tokenizer_config.json",
        lambda own: own.update(chat_template=[{"name": "default", "template": [1]}]),
        "chat_template is list",
    ),
    "class": ("tokenizer_config.json", lambda own: own.update(tokenizer_class=[1]), "cannot be"),
    "code": (
        "tokenizer_config.json",
        lambda own: own.update(auto_map={"AutoTokenizer": ["a.B", None]}, tokenizer_class="B"),
        "contains custom code",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_tokenizer_that_cannot_be_used_is_refused(what, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", pytest.fail)  # nobody is asked
    name, change, why = BROKEN[what]
    folder = changed(tokenizer, tmp_path, name, change)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(folder)
    for word in (str(folder), why, "skip_tokenizer_init=True"):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"]
)
@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000])
def test_files_beside_a_vocabulary_are_named(name, content, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        load_tokenizer(tmp_path)


def test_the_models_sizes_are_nothing_to_the_tokenizer(tokenizer, tmp_path):
    """transformers would list all of the layers to find the tokenizer's class."""
    tokenizer.save_pretrained(tmp_path)
    write(tmp_path, "config.json", {"model_type": "qwen3_next", "num_hidden_layers": 10**12})
    assert load_tokenizer(tmp_path).encode("fox") == tokenizer.encode("fox")
    write(tmp_path, "config.json", {"model_type": ["x"], "tokenizer_class": 3})
    assert load_tokenizer(tmp_path).encode("fox") == tokenizer.encode("fox")


def test_a_pipe_is_not_waited_for(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    os.mkfifo(tmp_path / "added_tokens.json")
    with pytest.raises(ConfigError, match=r"added_tokens\.json: is no regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("cleans", [False, True])
def test_the_text_of_many_tokens_is_the_tokenizers(tokenizer, cleans, monkeypatch):
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", cleans)
    token_ids = [*range(len(tokenizer)), *tokenizer.encode("naïve 日本 🙂 . <|im_end|>")]
    for given in (token_ids, token_ids[::-1], [], [len(tokenizer) - 1]):
        assert text_of(tokenizer, given) == tokenizer.decode(given)


def test_other_threads_run_while_many_tokens_become_text(tokenizer):
    """The interpreter does not take the lock from this thread: decoding has to give it away."""
    token_ids = list(range(3, len(tokenizer))) * 3000
    begun, seen = threading.Event(), []
    other = threading.Thread(target=lambda: begun.wait() and seen.append(1))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        begun.set()
        assert seen == []
        text_of(tokenizer, token_ids)
        has_run = seen == [1]
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert has_run
