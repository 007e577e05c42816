"""Writes a model folder that transformers and the engine load: configuration, tokenizer, template,
weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from model import Tiny
from safetensors.torch import save_file

GENERIC = frozenset(
    [
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "output_attentions",
        "problem_type",
        "transformers_version",
    ]
)
TEMPLATE = Path(__file__).parents[2] / "src/milepost/tiny/chat_template.jinja"


def write_tokenizer(tokenizer: Path, folder: Path, context: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        data = json.loads(tokenizer.read_text(encoding="utf-8"))
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    template = TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_configuration(model: Tiny, folder: Path) -> None:
    config = model.config.to_dict()
    keep = {k: v for k, v in config.items() if v is not None and k not in GENERIC and k[0] != "_"}
    (folder / "config.json").write_text(json.dumps(keep, indent=2) + "\n")
    generation = {
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 200,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write(model: Tiny, tokenizer: Path, folder: Path) -> None:
    """The whole folder but the model card; weights are rounded to bfloat16."""
    write_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    write_configuration(model, folder)
    weights = {
        name: value.to(torch.bfloat16).contiguous().cpu()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def copy(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, folder / path.name)
