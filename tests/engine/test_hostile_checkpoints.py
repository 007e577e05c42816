"""Checkpoints that anybody may have written: read, or refused by an error that names the file."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost import LLM, SamplingParams
from milepost.engine.text.lengths import FewestTokens
from milepost.errors import ConfigError, MilepostError
from tests import chatmodel, checkpoints, mutations

HANG_S = 20
FILES = {
    "config.json": 8,
    "tokenizer.json": 4,
    "tokenizer_config.json": 3,
    "generation_config.json": 3,
    "model.safetensors.index.json": 3,
    "model-1.safetensors": 6,
    "chat_template.jinja": 1,
}
"""Name -> how many of 28 cases change it."""
FAMILIES = (
    *("qwen3_5_moe", "qwen3_5_multimodal", "nemotron_h", "lfm2_moe", "falcon_h1", "kimi_linear"),
)
CASES = [name for name, count in FILES.items() for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Small checkpoints, each with a file of everything that is read."""
    found = []
    tokenizer = chatmodel.make_tokenizer()
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        model = checkpoints.build(name)
        checkpoints.write(model, name, folder)
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = _names(folder / "model-1.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(chatmodel.TEMPLATE)
        own = {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.9}
        (folder / "generation_config.json").write_text(json.dumps(own))
        found.append(folder)
    return found


def _names(file: Path) -> list[str]:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


@pytest.fixture(autouse=True)
def _ends_what_hangs() -> Iterator[None]:
    """A test that is stuck in a library cannot be interrupted."""
    yield
    faulthandler.cancel_dump_traceback_later()


def read(folder: Path, **options: Any) -> str:
    """Read all of a checkpoint and answer with it; returns the error's message, if there is one."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
    try:
        llm = LLM(folder, num_pages=24, num_slots=8, max_num_seqs=2, **options)
    except MilepostError as error:
        return str(error)
    tokenizer = llm.get_tokenizer()
    assert FewestTokens(tokenizer)("some text") >= 0
    prompt = {"prompt_token_ids": [0] * 5}
    params = SamplingParams(max_tokens=2, logprobs=1, seed=1)
    llm.generate([prompt], params, use_tqdm=False)
    llm.llm_engine.close()
    return ""


def fuzz(folders: list[Path], tmp_path: Path, seeds: range) -> dict[str, int]:
    """Read a changed checkpoint for each seed; returns how many were refused for each file."""
    refused = dict.fromkeys(FILES, 0)
    for seed in seeds:
        name = CASES[seed % len(CASES)]
        folder = mutations.copy(folders[seed % len(folders)], tmp_path / str(seed))
        what = mutations.mutate(folder, name, seed)
        try:
            message = read(folder)
        except BaseException as error:
            error.add_note(f"{what}: {folder}")
            raise
        assert not message or str(folder) in message, (what, message)
        refused[name] += bool(message)
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_changed_checkpoints_are_read_or_refused_by_name(part, folders, tmp_path):
    refused = fuzz(folders, tmp_path, range(part * 150, part * 150 + 150))
    refused.pop("chat_template.jinja")  # almost any text is one
    assert all(refused.values()), refused


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_many_changed_checkpoints_are_read_or_refused_by_name(part, folders, tmp_path):
    fuzz(folders, tmp_path, range(1000 + part * 1000, 2000 + part * 1000))


@pytest.mark.parametrize(
    ("changes", "options", "word"),
    [
        ({}, {"max_model_len": 2000}, "max_model_len=2000: the model's own limit is 1024"),
        ({"max_position_embeddings": 0}, {}, "max_position_embeddings=0"),
        ({"quantization_config": {"quant_method": "gguf"}}, {}, "quant_method='gguf'"),
        ({}, {"quantization": "awq"}, "quantization='awq'"),
        ({}, {"tensor_parallel_size": 5}, "5"),
        ({"kv_cache_dtype": 1, "hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}},
            {},
            "kv_cache_quant_algo='INT8'",
        ),
    ],
    ids=str,
)
def test_what_settings_alone_are_refused_for_is_found_first(changes, options, word, tmp_path):
    """Before there is a tokenizer, weights or other ranks, none of which this folder has."""
    raw = json.loads(checkpoints.build("qwen3_next").config.to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ConfigError) as failure:
        LLM(tmp_path, load_format="dummy", **options)
    assert word in str(failure.value)
    assert "tokenizer" not in str(failure.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_default_that_no_request_could_have_is_found_before_weights_are(name, tmp_path):
    raw = checkpoints.build(name).config.to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(raw)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=7"):
        LLM(tmp_path)
