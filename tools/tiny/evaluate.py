"""Measures a finished Milepost-tiny folder and writes `evaluation.json` and `samples.md`.

    python tools/tiny/evaluate.py --model src/milepost/tiny --data build/tiny --out build/tiny

Everything is computed with the stored (bfloat16) weights, in float32, on a CPU: bits per byte of
the held-out documents beside xz and a 5-gram model, how often the first draft token is the main
model's own greedy token (on the held-out text, and along greedy continuations of it), the load
time, and ten sample answers.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import ngram
import numpy as np
import torch
import torch.nn.functional as F
from model import CHUNK, Tiny, load
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = "You are Milepost-tiny, an assistant for Python's standard library."
QUESTIONS = [
    ["What does `str.partition` do?", "What arguments does it take?"],
    ["what does os.path.join do"],
    ["What is the module `json` for?"],
    ["How do I use `textwrap.dedent`?"],
    ["What is a generator?"],
    ["What does `collections.Counter.most_common` do?", "Show an example."],
    ["When is `KeyError` raised?"],
    ["How does `functools.lru_cache` work?", "When was it added?"],
    ["How can I copy a whole folder with its files?"],
    ["Who are you?", "Can you write a poem about the sea?"],
]


def documents(data: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (data / "heldout.jsonl").read_text().splitlines()]


def rows(texts: list[str], tokenizer: Any, length: int) -> list[torch.Tensor]:
    """Token ids of each document after <|endoftext|>, cut where the context ends."""
    found = []
    for text in texts:
        ids = [0, *tokenizer(text)["input_ids"]]
        found += [torch.tensor([ids[i : i + length + 1]]) for i in range(0, len(ids) - 1, length)]
    return found


@torch.no_grad()
def score(model: Tiny, row: torch.Tensor) -> tuple[float, int, int]:
    """(bits, agreeing drafts, drafts) of one row [1, L]; the padding to whole chunks is not
    counted."""
    real = row.shape[1] - 1
    padded = F.pad(row, (0, -real % CHUNK))
    ids, targets = padded[:, :-1], padded[:, 1:]
    hidden = model.hidden(ids)
    main = model.logits(hidden)[:, :real]
    bits = F.cross_entropy(main[0], targets[0, :real], reduction="sum").item() / math.log(2)
    if real < 2:
        return bits, 0, 0
    draft = model.logits(model.draft_hidden(hidden, targets))[:, : real - 1].argmax(-1)
    return bits, int((draft == main[:, 1:].argmax(-1)).sum()), real - 1


def language(model: Tiny, texts: list[str], tokenizer: Any) -> dict[str, float]:
    bits, agreed, drafts = 0.0, 0, 0
    for row in tqdm(
        rows(texts, tokenizer, model.config.max_position_embeddings - 1), desc="held-out text"
    ):
        part = score(model, row)
        bits, agreed, drafts = bits + part[0], agreed + part[1], drafts + part[2]
    size = sum(len(text.encode()) for text in texts)
    return {
        "bits_per_byte": bits / size,
        "acceptance": agreed / drafts,
        "drafts": drafts,
        "bytes": size,
    }


def compressors(texts: list[str], data: Path, tokenizer: Any) -> dict[str, float]:
    """Bits per byte of xz -9e (all documents as one file) and of the 5-gram model."""
    joined = "\n".join(texts).encode()
    base = len(tokenizer)
    arrays = np.load(data / "train.npz")
    tables = ngram.train(np.concatenate([arrays["python"], arrays["other"], arrays["chat"]]), base)
    ids = [0, 0, 0, 0]
    for text in texts:
        ids += [*tokenizer(text)["input_ids"], 0]
    size = sum(len(text.encode()) for text in texts)
    xz = lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)
    return {
        "xz_bits_per_byte": 8 * len(xz) / len(joined),
        "five_gram_bits_per_byte": ngram.bits(tables, np.array(ids[:-1]), base) / size,
    }


@torch.no_grad()
def along_greedy(
    model: Tiny, main: Any, texts: list[str], tokenizer: Any, count: int = 40
) -> dict[str, float]:
    """Acceptance along greedy continuations (96 tokens) of the first 64 tokens of `count`
    documents."""
    agreed, drafts = 0, 0
    for text in tqdm([text for text in texts if len(text) > 1000][:count], desc="greedy text"):
        prompt = torch.tensor([[0, *tokenizer(text[:2000])["input_ids"][:64]]])
        row = main.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=96, do_sample=False
        )
        padded = F.pad(row, (0, -(row.shape[1] - 1) % CHUNK))
        hidden = model.hidden(padded[:, :-1])
        draft = model.logits(model.draft_hidden(hidden, padded[:, 1:])).argmax(-1)
        first, last = prompt.shape[1], row.shape[1]  # draft[t] is for the token at t + 2
        agreed += (draft[0, first - 2 : last - 2] == row[0, first:last]).sum().item()
        drafts += last - first
    return {"greedy_acceptance": agreed / drafts, "greedy_drafts": drafts}


def answer(main: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = main.generate(**ids, max_new_tokens=200, do_sample=False)
    text: str = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def samples(main: Any, tokenizer: Any) -> str:
    """The ten dialogues as Markdown, unedited."""
    parts = []
    for number, questions in enumerate(QUESTIONS, 1):
        messages = [{"role": "system", "content": SYSTEM}]
        lines = [f"{number}."]
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer(main, tokenizer, messages)})
            said = messages[-1]["content"].replace("\n", "\n   > ")
            lines.append(f"   **{question}**\n\n   > {said}\n")
        parts.append("\n".join(lines).replace(".\n   **", ". **", 1))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("src/milepost/tiny"))
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny"))
    args = parser.parse_args()
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    loaded = time.perf_counter() - began
    model = load(args.model)
    texts = documents(args.data)
    (args.out / "samples.md").write_text(samples(reference, tokenizer))
    result = {
        "parameters": sum(value.numel() for value in model.parameters()),
        "draft_parameters": sum(value.numel() for value in model.mtp.parameters()),
        "folder_bytes": sum(path.stat().st_size for path in args.model.iterdir()),
        "transformers_load_s": loaded,
        **compressors(texts, args.data, tokenizer),
        **language(model, texts, tokenizer),
        **along_greedy(model, reference, texts, tokenizer),
    }
    (args.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
