"""Makes the training data of Milepost-tiny: fetch, clean, hold out, make dialogues, train the
tokenizer.

    python tools/tiny/prepare.py --out build/tiny

Writes into the folder: `tokenizer.json`, `train.npz` (token streams `python`, `other`, `chat` with
the starts of their documents), `heldout.jsonl` (documents that the model never sees),
`entries.json` (what can be asked about) and `sources.json` (package, version, licence,
characters). Needs a Debian 12 system for apt-get, dpkg-deb and man, and the project's environment
for the docstrings.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import dialogues
import entries
import markup
import numpy as np
import phrases
import sources
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HELD_OUT = 0.025
Document = tuple[str, str]


def usable(text: str) -> bool:
    """Long enough, and mostly English prose or code rather than tables of numbers or other
    scripts."""
    letters = sum(char.isascii() and (char.isalpha() or char in " \n") for char in text)
    return len(text) > 300 and letters > 0.7 * len(text)


def collect(cache: Path) -> tuple[list[Document], list[dict[str, object]]]:
    """All documents of all sources, in order, and one record a source."""
    cache.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    records: list[dict[str, object]] = []

    def add(source: sources.Source, version: str, found: Iterable[Document]) -> None:
        kept = [(identifier, text) for identifier, text in found if usable(text)]
        documents.extend(kept)
        size = sum(len(text) for _, text in kept)
        records.append(
            {**asdict(source), "version": version, "documents": len(kept), "characters": size}
        )

    for source in tqdm(sources.DEBIAN, desc="packages"):
        folder, version = sources.fetch(source, cache)
        add(
            source,
            version,
            (
                (name, sources.page_text(source, path))
                for name, path in sources.pages(source, folder)
            ),
        )
    standard = sources.Source(package="stdlib", licence="PSF-2.0", form="docstrings")
    add(standard, sys.version.split()[0], sources.stdlib_docstrings())
    for source in tqdm(sources.INSTALLED, desc="docstrings"):
        add(source, sources.installed_version(source.package), sources.docstrings(source.package))
    return documents, records


def is_common(identifier: str) -> bool:
    """Pages that dialogues must cover are never held out."""
    page = re.search(r"library/([\w.]+?)\.rst", identifier)
    core = ("stdtypes", "functions", "exceptions", "constants", "glossary")
    return bool(page and (page[1] in phrases.POPULAR or page[1] in core)) or "faq/" in identifier


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out): whole documents by a hash of their id, then near copies are sorted out.

    A candidate stays held out only if at most a tenth of its long lines also stands in a training
    document; a training document that copies a tenth of its own long lines from the held-out ones
    is dropped.
    """
    chosen = [sources.fraction(name) < HELD_OUT and not is_common(name) for name, _ in documents]
    train = [document for document, held in zip(documents, chosen, strict=True) if not held]
    seen = {line for _, text in train for line in long_lines(text)}
    held: list[Document] = []
    for document, is_held in zip(documents, chosen, strict=True):
        if is_held:
            (held if overlap(document[1], seen) <= 0.1 else train).append(document)
    kept = {line for _, text in held for line in long_lines(text)}
    return [document for document in train if overlap(document[1], kept) <= 0.1], held


def long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if len(line) > 40]


def overlap(text: str, lines: set[str]) -> float:
    own = long_lines(text)
    return sum(line in lines for line in own) / max(1, len(own))


def read_entries(
    cache: Path, held: set[str]
) -> tuple[list[entries.Entry], list[Document], list[Document]]:
    """Entries, glossary terms and frequent questions of the Python documentation, without held-out
    pages."""
    source = sources.DEBIAN[0]
    folder, _ = sources.fetch(source, cache)
    found: dict[str, entries.Entry] = {}
    terms: list[Document] = []
    faq: list[Document] = []
    for name, path in sources.pages(source, folder):
        if name in held or not re.search(r"/(library|faq)/|glossary|tutorial/datastructures", name):
            continue
        nodes = markup.rst_nodes(path.read_text(encoding="utf-8"))
        if "/faq/" in name:
            faq += entries.questions(nodes)
        elif "glossary" in name:
            terms += entries.glossary(nodes)
        else:
            for entry in entries.read_page(nodes, name):
                found.setdefault(entry.name, entry)
    return list(found.values()), terms, faq


def chat_text(dialogue: dialogues.Dialogue) -> str:
    """What the chat template renders; tests compare the two."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in dialogue)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], name: str) -> dict[str, np.ndarray]:
    """Token ids of all texts, each followed by <|endoftext|>, and the starts of the texts."""
    pieces, starts, position = [], [], 0
    for first in tqdm(range(0, len(texts), 512), desc=f"encode {name}"):
        for encoding in tokenizer.encode_batch(texts[first : first + 512]):
            ids = np.array([*encoding.ids, 0], dtype=np.uint16)
            pieces.append(ids)
            starts.append(position)
            position += len(ids)
    return {name: np.concatenate(pieces), f"{name}_starts": np.array(starts, dtype=np.int64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny"))
    parser.add_argument("--cache", type=Path, default=Path("build/tiny/packages"))
    parser.add_argument("--vocab-size", type=int, default=6144)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)

    documents, records = collect(args.cache)
    train, held = split(documents)
    found, terms, faq = read_entries(args.cache, {name for name, _ in held})
    chats = [chat_text(d) for d in dialogues.make(found, terms, faq, rng, args.repeats)]
    rng.shuffle(chats)
    rng.shuffle(train)
    is_python = [name.startswith((sources.PYTHON_DOC, "stdlib/")) for name, _ in train]
    python = [text for (_, text), own in zip(train, is_python, strict=True) if own]
    other = [text for (_, text), own in zip(train, is_python, strict=True) if not own]

    sample = [*python, *other[::3], *chats[::5]]
    tokenizer = train_tokenizer(iter(sample), args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"))
    streams: dict[str, np.ndarray] = {}
    for name, texts in (("python", python), ("other", other), ("chat", chats)):
        streams |= encode(tokenizer, texts, name)
        print(
            f"{name}: {len(texts)} texts, {sum(map(len, texts)):,} characters, {len(streams[name]):,} tokens"  # noqa: E501
        )
    np.savez_compressed(args.out / "train.npz", allow_pickle=True, **streams)
    with (args.out / "heldout.jsonl").open("w") as file:
        for name, text in held:
            file.write(json.dumps({"id": name, "text": text}) + "\n")
    (args.out / "sources.json").write_text(json.dumps(records, indent=1))
    (args.out / "entries.json").write_text(json.dumps([asdict(entry) for entry in found]))
    print(f"held out: {len(held)} documents, {sum(len(text) for _, text in held):,} characters")


if __name__ == "__main__":
    main()
