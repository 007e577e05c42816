"""reStructuredText, HTML and manual pages to clean text.

Owns the conversion only: it knows no file names, licences or dialogues. `parse` turns the lines of
an .rst source into nodes, `render` turns nodes into text in the manner of Markdown. What carries no
meaning as plain text (indexes, images, tables of contents, labels) is dropped.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

OBJECTS = frozenset(
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
        "exception",
        "data",
        "attribute",
        "property",
        "describe",
        "option",
        "cmdoption",
        "envvar",
        "opcode",
        "pdbcommand",
        "object",
        "setting",
        "command",
    ]
)
CODE = frozenset(
    [
        "code-block",
        "sourcecode",
        "code",
        "doctest",
        "testcode",
        "productionlist",
        "parsed-literal",
        "ipython",
    ]
)
NOTES = {
    "note": "Note",
    "warning": "Warning",
    "tip": "Tip",
    "hint": "Hint",
    "important": "Important",
    "caution": "Caution",
    "attention": "Attention",
    "danger": "Danger",
    "seealso": "See also",
    "impl-detail": "CPython implementation detail",
    "versionadded": "Added in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since version",
    "versionremoved": "Removed in version",
}
TRANSPARENT = frozenset(
    ["glossary", "container", "highlights", "epigraph", "topic", "admonition", "rubric"]
)
CODE_ROLES = frozenset(
    [
        "mod",
        "class",
        "attr",
        "exc",
        "data",
        "const",
        "keyword",
        "envvar",
        "option",
        "program",
        "file",
        "kbd",
        "samp",
        "command",
        "opcode",
        "token",
        "type",
        "member",
        "macro",
        "obj",
        "dfn",
        "makevar",
        "mimetype",
        "code",
        "pdbcmd",
        "setting",
        "variable",
        "prop_tgt",
    ]
)
_DIRECTIVE = re.compile(r"^\.\. +([\w:+-]+)::(?:\s+(.*))?$")
_ITEM = re.compile(r"^([*+\-•]|\(?(?:\d+|#|[a-z])[.)])\s+(?=\S)")
_FIELD = re.compile(r"^:([\w][^:`]*):(?:\s+(.*))?$")
_PUNCTUATION = re.compile(r"^([=\-`:'\"~^_*+#<>.])\1{2,}$")
_SIMPLE_TABLE = re.compile(r"^=+(\s+=+)+\s*$")
_ROLE = re.compile(r":((?:[\w-]+:)*[\w+-]+):`([^`]+)`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?")
_REFERENCE = re.compile(r"`([^`]+)`__?(?![\w`])")


@dataclass(slots=True)
class Node:
    kind: str  # heading, para, item, field, code, table, object, note, define, indent, module, currentmodule  # noqa: E501
    text: str = ""
    name: str = ""
    args: tuple[str, ...] = ()
    children: list[Node] = field(default_factory=list)


def inline(text: str) -> str:
    """The text of one paragraph with its roles, links and literals made plain."""
    keep: list[str] = []

    def literal(match: re.Match[str]) -> str:
        keep.append(f"`{match[1]}`")
        return f"\x00{len(keep) - 1}\x00"

    text = re.sub(r"``(.+?)``", literal, text)
    text = _ROLE.sub(lambda match: _role(match[1], match[2], keep), text)
    text = _LINK.sub(lambda match: match[1], text)
    text = _REFERENCE.sub(lambda match: match[1], text)
    text = re.sub(r"(?<=\w)_(?=[\s.,;:)]|$)", "", text) if "_" in text else text
    text = re.sub(r"\s*\[(?:#[\w-]*|\d+)\]_?", "", text)
    text = re.sub(r"\|(\w[\w ]*)\|_?", r"\1", text)
    text = re.sub(r"\\ ", "", text)
    text = re.sub(r"\\([*_`|\\:])", r"\1", text)
    text = re.sub(r"\x00(\d+)\x00", lambda match: keep[int(match[1])], text)
    return re.sub(r"\s+", " ", text).strip()


def _role(role: str, body: str, keep: list[str]) -> str:
    role = role.rsplit(":", 1)[-1]
    shown = body.split("<")[0].strip() if body.endswith(">") and "<" in body else body
    if role in ("pep", "rfc"):
        return f"{role.upper()} {shown}"
    if shown.startswith("~"):
        shown = shown.rsplit(".", 1)[-1].lstrip("~")
    shown = shown.lstrip("!.")
    if role in ("func", "meth") and not shown.endswith(")"):
        shown += "()"
    if role in ("func", "meth", "literal") or role in CODE_ROLES:
        keep.append(f"`{shown}`")
        return f"\x00{len(keep) - 1}\x00"
    return shown


def _block(lines: list[str], start: int) -> tuple[list[str], int]:
    """The blank or indented lines from `start` on, dedented, and where they end."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end][0] == " "):
        end += 1
    body = lines[start:end]
    while body and not body[-1].strip():
        body.pop()
    widths = [len(line) - len(line.lstrip()) for line in body if line.strip()]
    margin = min(widths, default=0)
    return [line[margin:] for line in body], end


def parse(lines: list[str]) -> list[Node]:
    """Nodes of an .rst document, given its lines without tabs."""
    nodes: list[Node] = []
    start = 0
    while start < len(lines):
        line = lines[start]
        if not line.strip():
            start += 1
        elif line[0] == " ":
            body, start = _block(lines, start)
            nodes.append(Node("indent", children=parse(body)))
        elif line.startswith(".. ") or line.rstrip() == "..":
            start = _explicit(lines, start, nodes)
        else:
            start = _body(lines, start, nodes)
    return nodes


def _explicit(lines: list[str], start: int, nodes: list[Node]) -> int:
    match = _DIRECTIVE.match(lines[start].rstrip())
    body, end = _block(lines, start + 1)
    if match:
        nodes.extend(_directive(match[1].split(":")[-1], (match[2] or "").strip(), body, match[1]))
    return end


def _directive(name: str, argument: str, body: list[str], full_name: str) -> list[Node]:
    options = {}
    signatures = [argument] if argument else []
    while body and body[0].strip() and (name in OBJECTS or _FIELD.match(body[0])):
        line = body.pop(0).strip()
        found = _FIELD.match(line)
        if found:
            options[found[1]] = found[2] or ""
        else:
            signatures.append(line)
    if name in OBJECTS:
        kind = full_name if full_name.startswith("c:") else name
        joined = "\n".join(signatures).replace("\\\n", " ")
        signatures = [re.sub(r"\\([*_`])", r"\1", form) for form in joined.split("\n")]
        return [Node("object", name=kind, args=tuple(signatures), children=parse(body))]
    if name in CODE:
        language = argument if name in ("code-block", "sourcecode", "code") else ""
        return [Node("code", "\n".join(body), name=language)]
    if name in NOTES:
        label, children = NOTES[name], parse(body)
        if name.startswith(("version", "deprecated")):
            version, _, rest = argument.partition(" ")
            label = f"{label} {version}"
            argument = "" if name == "deprecated-removed" else rest
        if argument:
            children = [Node("para", inline(argument)), *children]
        return [Node("note", label, children=children)]
    if name == "module":
        return [Node("module", inline(options.get("synopsis", "")), name=argument)]
    if name == "currentmodule":
        return [Node("currentmodule", name=argument)]
    if name in TRANSPARENT:
        title = [Node("para", inline(argument))] if argument and name != "glossary" else []
        return title + parse(body)
    return parse(body) if name == "only" and "html" in argument else []


def _body(lines: list[str], start: int, nodes: list[Node]) -> int:
    line = lines[start].rstrip()
    following = lines[start + 1].rstrip() if start + 1 < len(lines) else ""
    if _PUNCTUATION.match(line):
        third = lines[start + 2].rstrip() if start + 2 < len(lines) else ""
        if third == line and following:
            nodes.append(Node("heading", inline(following)))
            return start + 3
        return start + 1
    if _PUNCTUATION.match(following) and len(following) >= len(line) - 2:
        nodes.append(Node("heading", inline(line), name=following[0]))
        return start + 2
    if _SIMPLE_TABLE.match(line) or line.startswith("+-"):
        return _table(lines, start, nodes)
    if line.startswith(">>>"):
        return _doctest(lines, start, nodes)
    item = _ITEM.match(line)
    if item:
        body, end = _block(lines, start + 1)
        nodes.append(Node("item", item[1], children=parse([line[item.end() :], *body])))
        return end
    named = _FIELD.match(line)
    if named:
        body, end = _block(lines, start + 1)
        nodes.append(Node("field", named[1], children=parse([named[2] or "", *body])))
        return end
    return _paragraph(lines, start, nodes)


def _table(lines: list[str], start: int, nodes: list[Node]) -> int:
    simple = lines[start].startswith("=")
    end, borders = start, 0
    while end < len(lines):
        line = lines[end].rstrip()
        borders += bool(_SIMPLE_TABLE.match(line))
        if not line and (not simple or borders >= 3 or end - start > 200):
            break
        end += 1
    rows = [
        line for line in lines[start:end] if line.strip() and not re.match(r"^[=+\-\s]+$", line)
    ]
    cells = [re.split(r"\s{2,}|\s*\|\s*", row.strip().strip("|").strip()) for row in rows]
    text = "\n".join(" | ".join(inline(cell) for cell in row) for row in cells)
    nodes.append(Node("table", text))
    return end


def _doctest(lines: list[str], start: int, nodes: list[Node]) -> int:
    end = start
    while end < len(lines) and lines[end].strip():
        end += 1
    nodes.append(Node("code", "\n".join(line.rstrip() for line in lines[start:end]), name=">>>"))
    return end


def _paragraph(lines: list[str], start: int, nodes: list[Node]) -> int:
    end = start
    while end < len(lines) and lines[end].strip() and lines[end][0] != " ":
        end += 1
    text = " ".join(line.strip("| ").rstrip() for line in lines[start:end])
    if end < len(lines) and lines[end].strip() and not text.endswith("::"):
        body, end = _block(lines, end)
        nodes.append(Node("define", inline(text), children=parse(body)))
        return end
    literal = text.endswith("::")
    if literal:
        text = text[:-2].rstrip() + ("" if text[:-2].endswith((" ", ":")) or text == "::" else ":")
    if text:
        nodes.append(Node("para", inline(text)))
    if literal:
        body, end = _block(lines, end)
        nodes.append(Node("code", "\n".join(body)))
    return end


def render(nodes: Iterable[Node], indent: str = "") -> str:
    """The nodes as text: one line a paragraph, a blank line between blocks."""
    out: list[tuple[str, str]] = []
    for node in nodes:
        text = _render_one(node, indent)
        if text:
            tight = node.kind in ("item", "field") and out and out[-1][0] == node.kind
            out.append((node.kind, ("\n" if tight else "\n\n") + text))
    return "".join(text for _, text in out).strip("\n")


def _render_one(node: Node, indent: str) -> str:
    if node.kind == "heading":
        return f"{indent}# {node.text}"
    if node.kind in ("para", "table"):
        return "\n".join(indent + line for line in node.text.split("\n")) if node.text else ""
    if node.kind == "code":
        fence = f"{indent}```"
        code = node.text.strip("\n").split("\n")
        body = "\n".join((indent + line).rstrip() for line in code)
        return f"{fence}\n{body}\n{fence}" if node.text.strip() else ""
    if node.kind in ("module", "currentmodule"):
        return f"{indent}Module `{node.name}`: {node.text}" if node.text else ""
    inner = render(
        node.children, indent + ("  " if node.kind in ("item", "define", "indent") else "")
    )
    if node.kind == "object":
        heads = "\n".join(f"{indent}### `{signature}`" for signature in node.args)
        return f"{heads}\n\n{inner}" if inner else heads
    if node.kind == "note":
        separator = "." if not inner else ": "
        return f"{indent}{node.text}{separator}{inner.lstrip()}"
    if node.kind == "item":
        return f"{indent}{node.text} {inner.lstrip()}"
    if node.kind == "field":
        return f"{indent}{node.text}: {inner.lstrip()}"
    return f"{indent}{node.text}\n{inner}" if node.text else inner


def rst_nodes(source: str) -> list[Node]:
    return parse(source.expandtabs(8).split("\n"))


class _Page(HTMLParser):
    """Collects the text of a page's body, one line a paragraph, `pre` as fenced code."""

    BLOCKS = frozenset(
        [
            "p",
            "div",
            "li",
            "ul",
            "ol",
            "dl",
            "dt",
            "dd",
            "table",
            "tr",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "section",
            "br",
            "hr",
            "blockquote",
        ]
    )
    SKIPPED = frozenset(["script", "style", "nav", "header", "footer", "head", "title", "svg"])
    CODE = frozenset(("code", "tt", "kbd"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.skip: list[str] = []
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        if self.skip:
            self.skip += [tag] * (tag == self.skip[0])
        elif tag in self.SKIPPED or re.search(
            r"headerlink|navheader|navfooter|sidebar|nosearch|menu|toc|related|footer|linenos",
            classes,
        ):
            if tag not in ("br", "hr", "img", "input", "link", "meta"):
                self.skip = [tag]
        elif tag == "pre":
            self.pre += 1
            self.out.append("\n\n```\n")
        elif tag in self.CODE and not self.pre:
            self.out.append("`")
        elif tag in self.BLOCKS and not self.pre:
            mark = {"li": "* ", "tr": "| "}.get(
                tag, "# " if tag[0] == "h" and tag[1:].isdigit() else ""
            )
            self.out.append("\n\n" + mark)
        elif tag in ("td", "th"):
            self.out.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.skip:
            if tag == self.skip[0]:
                self.skip.pop()
        elif tag == "pre":
            self.pre = max(0, self.pre - 1)
            self.out.append("\n```\n\n")
        elif tag in self.CODE and not self.pre:
            self.out.append("`")
        elif tag in self.BLOCKS and not self.pre:
            self.out.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_text(source: str) -> str:
    page = _Page()
    main = re.search(r'<div[^>]*(?:role="main"|id="docs-content"|class="body")', source)
    page.feed(source[main.start() :] if main else source)
    text = re.sub(r"[ \t]+\n", "\n", "".join(page.out).replace("¶", ""))
    pieces = re.split(r"(\n```\n.*?\n```\n)", text, flags=re.DOTALL)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = "\n```\n" + piece[5:-5].strip("\n") + "\n```\n"
        else:
            pieces[index] = re.sub(r"(?m)^(\*|\||#+)\s+", r"\1 ", re.sub(r"(?m)^ +", "", piece))
    text = "".join(pieces)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def man_text(path: Path) -> str:
    """A manual page as text, without hyphenation, justification or its running header and
    footer."""
    shown = subprocess.run(
        ["man", "--nj", "--nh", "-l", str(path)],
        env={"MANWIDTH": "1000", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    shown = re.sub(r".\x08|\x1b\[[0-9;]*m", "", shown)
    lines = shown.strip().split("\n")[1:-1]
    lines = [
        re.sub(r"^ {7}", "", line) if line.startswith(" ") else f"# {line}" if line else ""
        for line in lines
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()
