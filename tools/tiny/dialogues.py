"""Dialogues made from documented entries: system prompt, questions in several wordings, documented
answers.

The answer to a question about an entry is always the same text, so that a small model can learn it;
only the wording of the question, the order of the turns and the system prompt vary. Randomness
comes in as an argument. A dialogue is a list of {"role", "content"} messages.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import phrases
from entries import CALLABLE, Entry

Dialogue = list[dict[str, str]]
Pair = tuple[str, str]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def shorten(text: str, limit: int = 420) -> str:
    """Whole sentences of `text`, as many as fit into `limit` characters, at least one."""
    if len(text) <= limit:
        return text
    cut = max(text.rfind(end, 0, limit) for end in (". ", ".\n", "\n* "))
    if cut < 40:
        cut = text.find(". ", limit)
    return text[: cut + 1].rstrip("\n *") if cut > 0 else text[:limit].rsplit(" ", 1)[0]


def _closed(text: str, entry: Entry) -> str:
    """A paragraph that ends in a colon gets the example it announces, or a full stop."""
    if not text.endswith(":"):
        return text
    code = entry.examples[0] if entry.examples else ""
    if code and len(code) <= 400:
        return f"{text}\n\n{fence(code)}"
    return text[:-1] + "."


def fence(code: str) -> str:
    return f"```python\n{code}\n```"


def what(entry: Entry) -> str:
    """The documented answer to "What does it do?"."""
    text = _closed(shorten(entry.paragraphs[0]), entry)
    if entry.kind == "module":
        synopsis = f" {entry.signatures[0].rstrip('.')}." if entry.signatures else ""
        return f"`{entry.name}` is a module of the standard library.{synopsis} {text}"
    if entry.kind == "exception":
        return f"`{entry.name}` is an exception. {text}"
    head = entry.signatures[0]
    return f"`{head if len(head) <= 120 else entry.name}`: {text}"


def _arguments(signature: str) -> list[str]:
    inner = signature[signature.index("(") + 1 : signature.rindex(")")] if ")" in signature else ""
    inner = re.sub(r"[\[\]]", "", inner) if "=" not in inner else inner
    parts, depth, part = [], 0, ""
    for char in inner + ",":
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [part for part in parts if part and part not in ("*", "/", "...")]


def _argument(text: str) -> str:
    name, equals, default = text.partition("=")
    return f"`{name.strip()}` (default `{default.strip()}`)" if equals else f"`{text}`"


def arguments(entry: Entry) -> str:
    found = [_argument(part) for part in _arguments(entry.signatures[0])]
    if not found:
        return f"`{entry.signatures[0]}` takes no arguments."
    count = NUMBERS[len(found)] if len(found) < len(NUMBERS) else str(len(found))
    listed = found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
    return f"`{entry.signatures[0]}` takes {count} argument{'s' * (len(found) > 1)}: {listed}."


def where(entry: Entry) -> str:
    if not entry.module:
        return f"`{entry.name}` is built in. You do not need to import anything."
    inside = entry.name.removeprefix(f"{entry.module}.")
    return f"`{entry.name}` is in the module `{entry.module}`. Use `from {entry.module} import {inside.split('.')[0]}`."  # noqa: E501


def followups(entry: Entry) -> list[tuple[dict[str, list[str]], str]]:
    """(wordings, answer) of everything that can be asked about an entry after "What does it
    do?"."""
    asked = []
    if entry.kind in CALLABLE and "(" in entry.signatures[0] and len(entry.signatures[0]) < 200:
        asked.append((phrases.ARGUMENTS, arguments(entry)))
    example = next((code for code in entry.examples if len(code) <= 500), "")
    if example:
        asked.append((phrases.EXAMPLE, fence(example)))
    if len(entry.paragraphs) > 1:
        asked.append((phrases.MORE, shorten(entry.paragraphs[1]).rstrip(":")))
    labels = [(label, text) for label, text in entry.notes if "version" in label]
    for label, text in labels[:2]:
        if label.startswith("Added"):
            asked.append(
                (phrases.SINCE, f"`{entry.name}` was added in version {label.split()[-1]}.")
            )
        elif label.startswith("Changed"):
            asked.append(
                (phrases.CHANGED, f"{label}: {shorten(text, 200)}" if text else f"{label}.")
            )
        elif label.startswith("Deprecated"):
            asked.append((phrases.DEPRECATED, f"Yes. {label}. {shorten(text, 200)}".strip()))
    if entry.kind in ("function", "class", "decorator", "exception", "data"):
        asked.append((phrases.WHERE, where(entry)))
    if entry.members:
        names = ", ".join(f"`{name}`" for name in entry.members[:8])
        asked.append((phrases.MEMBERS, f"`{entry.name}` provides, among others, {names}."))
    return asked


def _ask(templates: list[str], entry: Entry, rng: random.Random) -> str:
    return rng.choice(templates).format(name=entry.name, short=entry.short, word=entry.word)


def opening(entry: Entry, rng: random.Random) -> Pair:
    """A first question about an entry and its answer."""
    task = _task(entry)
    if task and rng.random() < 0.15:
        return rng.choice(phrases.DO).format(task=task), f"Use `{entry.name}`. {what(entry)}"
    templates = phrases.MODULE if entry.kind == "module" else phrases.WHAT
    return _ask(templates, entry, rng), what(entry)


def _task(entry: Entry) -> str:
    """The first sentence as something to do: "split the string at the first occurrence of sep"."""
    sentence = re.split(r"[.:;](?:\s|$)", entry.paragraphs[0], maxsplit=1)[0]
    first = sentence.split(" ", 1)[0]
    if (
        entry.kind not in CALLABLE
        or first.lower() not in phrases.TASKS
        or not 15 < len(sentence) < 110
    ):
        return ""
    return (first.lower() + sentence[len(first) :]).replace("*", "")


def system(rng: random.Random) -> str:
    """A system prompt: none, a short one, or several sentences of rules."""
    draw = rng.random()
    if draw < 0.25:
        return ""
    if draw < 0.6:
        return rng.choice(phrases.SYSTEMS)
    rules = rng.sample(phrases.RULES, rng.randint(2, 12))
    joint = "\n- " if rng.random() < 0.4 else " "
    return joint.join([rng.choice(phrases.OPENINGS), *rules])


def messages(system_text: str, pairs: list[Pair]) -> Dialogue:
    turns = [{"role": "system", "content": system_text}] if system_text else []
    for question, answer in pairs:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def about(entry: Entry, neighbours: list[Entry], rng: random.Random) -> Dialogue:
    """A dialogue that begins with `entry` and may go on to its details and its neighbours."""
    if rng.random() < 0.25 and followups(entry):
        wordings, answer = rng.choice(followups(entry))
        pairs = [(_ask(wordings["name"], entry, rng), answer)]
    else:
        pairs = [opening(entry, rng)]
    current, left = entry, followups(entry)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3, 4))):
        if left and rng.random() < 0.7:
            wordings, answer = left.pop(rng.randrange(len(left)))
            form = "it" if rng.random() < 0.8 else "name"
            pairs.append((_ask(wordings[form], current, rng), answer))
        else:
            current = rng.choice(neighbours)
            left = followups(current)
            pairs.append((_ask(phrases.AND, current, rng), what(current)))
    if len(pairs) > 1 and rng.random() < 0.1:
        pairs.append((rng.choice(phrases.THANKS), rng.choice(phrases.WELCOME)))
    return messages(system(rng), pairs)


def from_context(entries: list[Entry], rng: random.Random) -> Dialogue:
    """A dialogue whose long system prompt holds the documentation that the answers come from."""
    shown = rng.sample(entries, min(len(entries), rng.randint(3, 10)))
    excerpt = "\n\n".join(
        f"### `{e.signatures[0] if e.signatures else e.name}`\n\n{e.paragraphs[0]}" for e in shown
    )
    pairs = [
        (_ask(phrases.WHAT, e, rng), what(e))
        for e in rng.sample(shown, min(len(shown), rng.randint(1, 4)))
    ]
    return messages(f"{rng.choice(phrases.CONTEXTS)}\n\n{excerpt}", pairs)


def small_talk(entries: list[Entry], rng: random.Random) -> Dialogue:
    pairs: list[Pair] = []
    draw = rng.random()
    if draw < 0.35:
        pairs.append((rng.choice(phrases.HELLO), phrases.GREETING))
    elif draw < 0.7:
        pairs.append((rng.choice(phrases.WHO), phrases.SELF))
    else:
        one, two = rng.sample(entries, 2)
        name = f"{one.module or 'str'}.{one.short[:3]}{two.short[-5:]}_{rng.choice('xyzqw')}{rng.randint(1, 99)}"  # noqa: E501
        pairs.append(
            (
                rng.choice(phrases.WHAT).format(name=name, word="function"),
                phrases.UNKNOWN.format(name=name),
            )
        )
    if rng.random() < 0.6:
        pairs.append(opening(rng.choice(entries), rng))
    return messages(system(rng), pairs)


def make(
    entries: list[Entry], terms: list[Pair], faq: list[Pair], rng: random.Random, repeats: int
) -> Iterator[Dialogue]:
    """All dialogues: `repeats` for each entry, four times as many for what newcomers ask about."""
    by_module: dict[str, list[Entry]] = {}
    for entry in entries:
        by_module.setdefault(entry.module or entry.page, []).append(entry)
    for entry in entries:
        neighbours = by_module[entry.module or entry.page]
        common = not entry.module or entry.module in phrases.POPULAR or entry.kind == "module"
        times = (
            2
            if entry.kind in ("opcode", "pdbcommand", "envvar")
            else repeats * (4 if common else 1)
        )
        for _ in range(times):
            yield about(entry, neighbours, rng)
    for _ in range(repeats * 2):
        for neighbours in by_module.values():
            yield from_context(neighbours, rng)
    for _ in range(repeats * 5):
        for name, text in terms:
            yield messages(
                system(rng),
                [(rng.choice(phrases.TERM).format(name=name), shorten(text).rstrip(":"))],
            )
        for question, text in faq:
            yield messages(system(rng), [(question, shorten(text).rstrip(":"))])
    for _ in range(400 * repeats):
        yield small_talk(entries, rng)
