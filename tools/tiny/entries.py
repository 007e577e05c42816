"""The documented objects of Python's library, read from the nodes of its .rst pages.

Owns the step from a page to `Entry` records (name, signatures, paragraphs, examples, notes); it
knows nothing of dialogues. Names are qualified the way a reader would say them: `bisect.insort`,
`str.split`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from markup import Node

CALLABLE = frozenset(
    [
        "function",
        "method",
        "classmethod",
        "staticmethod",
        "coroutinefunction",
        "coroutinemethod",
        "decorator",
        "awaitablefunction",
        "awaitablemethod",
        "decoratormethod",
        "class",
    ]
)
METHODS = frozenset(["method", "classmethod", "staticmethod", "coroutinemethod", "attribute"])
WORDS = {
    "coroutinefunction": "coroutine function",
    "coroutinemethod": "coroutine method",
    "awaitablefunction": "awaitable function",
    "awaitablemethod": "awaitable method",
    "classmethod": "class method",
    "staticmethod": "static method",
    "decoratormethod": "decorator",
    "data": "constant",
    "envvar": "environment variable",
    "pdbcommand": "debugger command",
}
KINDS = CALLABLE | {"exception", "data", "attribute", "property", "envvar", "opcode", "pdbcommand"}


@dataclass(slots=True)
class Entry:
    name: str
    kind: str
    module: str
    page: str
    signatures: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)  # ("Added in version 3.9", text)
    members: list[str] = field(default_factory=list)

    @property
    def short(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def word(self) -> str:
        return WORDS.get(self.kind, self.kind)


def read_page(nodes: list[Node], page: str) -> list[Entry]:
    """Entries of one page: its module first, then its objects in order, members after their
    class."""
    found: list[Entry] = []
    module = _module_entry(nodes, page)
    if module:
        found.append(module)
    current = module.name if module else ""
    stack = [(node, "") for node in reversed(nodes)]
    while stack:
        node, owner = stack.pop()
        if node.kind in ("module", "currentmodule"):
            current = "" if node.name in ("builtins", "__main__") else node.name
        elif node.kind == "object" and node.name in KINDS:
            entry = _entry(node, current, owner, page)
            found.append(entry)
            if module and not owner:
                module.members.append(entry.name)
            inner = entry.name if node.name in ("class", "exception") else owner
            stack.extend((child, inner) for child in reversed(node.children))
        else:
            stack.extend((child, owner) for child in reversed(node.children))
    return [entry for entry in found if entry.paragraphs]


def _module_entry(nodes: list[Node], page: str) -> Entry | None:
    module = next((node for node in nodes if node.kind == "module" and node.name), None)
    if module is None or module.name == "__main__":
        return None
    entry = Entry(module.name, "module", module.name, page)
    if module.text:
        entry.signatures.append(module.text)
    for node in nodes[nodes.index(module) :]:
        if (
            node.kind == "para"
            and "Source code:" not in node.text
            and not node.text.startswith("**Platform")
        ):
            entry.paragraphs.append(node.text)
        elif entry.paragraphs and node.kind in ("heading", "object"):
            break
    return entry


def _entry(node: Node, module: str, owner: str, page: str) -> Entry:
    bare = re.sub(r"^(async|abstractmethod|@)\s*", "", node.args[0]).lstrip("@ ")
    bare = re.split(r"[(\s\[=:]", bare, maxsplit=1)[0].strip(".")
    tail = bare
    if module and (node.name not in METHODS or bare.count(".") > module.count(".") + 1):
        tail = bare.removeprefix(f"{module}.")
    if owner:
        last = owner.rsplit(".", 1)[-1]
        name = f"{owner}.{tail.removeprefix(f'{last}.')}"
    elif node.name in ("envvar", "opcode", "pdbcommand"):
        name = bare
    else:
        name = f"{module}.{tail}" if module else bare
    entry = Entry(name, node.name, module, page, signatures=_signatures(node.args, name))
    for child in node.children:
        _add(entry, child)
    return entry


def _signatures(args: tuple[str, ...], name: str) -> list[str]:
    """The forms of a call, each under the qualified name."""
    prefix = name.rsplit(".", 1)[0] + "." if "." in name else ""
    forms = []
    for form in args:
        head, bracket, rest = form.replace("async ", "").lstrip("@").partition("(")
        forms.append(prefix + head.strip().rsplit(".", 1)[-1] + bracket + rest)
    return forms


def _add(entry: Entry, node: Node) -> None:
    if node.kind == "para":
        entry.paragraphs.append(node.text)
    elif node.kind == "item" and entry.paragraphs:
        text = " ".join(child.text for child in node.children if child.kind == "para")
        entry.paragraphs[-1] += f"\n* {text}"
    elif node.kind == "define" and entry.paragraphs:
        text = " ".join(child.text for child in node.children if child.kind == "para")
        entry.paragraphs[-1] += f"\n* {node.text}: {text}"
    elif node.kind == "code" and node.text.strip():
        entry.examples.append(node.text.strip("\n"))
    elif node.kind == "note":
        text = " ".join(child.text for child in node.children if child.kind == "para")
        entry.notes.append((node.text, text))


def glossary(nodes: list[Node]) -> list[tuple[str, str]]:
    """(term, first paragraph) of each definition in the glossary."""
    terms = []
    for node in nodes:
        text = next((child.text for child in node.children if child.kind == "para"), "")
        if node.kind == "define" and text:
            terms.append((node.text, text))
    return terms


def questions(nodes: list[Node]) -> list[tuple[str, str]]:
    """(question, first paragraph of the answer) of each heading in a page of frequent questions."""
    pairs = []
    for index, node in enumerate(nodes[:-1]):
        answer = nodes[index + 1]
        if node.kind == "heading" and node.text.endswith("?") and answer.kind == "para":
            pairs.append((node.text, answer.text))
    return pairs
