"""Order inside kernels/: imports go up one list, and an operation is entered by its door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import milepost.kernels

ROOT = Path(milepost.kernels.__file__).parent
LOWER = ("platform", "layout")
"""Rooms that know no operation, in order. All their modules may be imported by those above."""
OPERATIONS: tuple[str, ...] = (
    "norm",
    "products",
    "recurrent",
    "conv",
    "short_conv",
    "attention",
    "mtp",
    "sampling",
    "vision",
    "rows",
    "comm",
    "ngrams",
    "residual",
)
DEVICE = ("triton.jit", "triton.constexpr_function", "gluon.jit", "gluon.constexpr_function")
"""Decorators of functions in Triton's language, whose arguments have no types."""
BEFORE = (*LOWER, *OPERATIONS)
MIXERS = {"recurrent", "conv"}
"""One operation in several rooms."""


def breaches(path: Path) -> list[str]:
    """What a module imports that it may not, as 'from room: module'."""
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for module in modules_of(node):
            room, *inner = module.split(".")
            if room == own or {room, own} <= MIXERS or room in LOWER[: rank(own) + 1]:
                continue
            is_before = room in BEFORE and BEFORE.index(room) < BEFORE.index(own)
            if inner or not is_before:
                found.append(f"{own}: {module}")
    return found


def untyped(path: Path) -> list[str]:
    """The functions of a module, but for those of the device, with an argument or a result that has
    no type. mypy could only demand types of device functions too."""
    text = path.read_text(encoding="utf-8")
    return [f"{path.name}: {name}" for name in _untyped_in(ast.parse(text))]


def _untyped_in(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(ast.unparse(each).startswith(DEVICE) for each in child.decorator_list):
                continue
            given, more = child.args, (child.args.vararg, child.args.kwarg)
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, more)]
            typed = (each.annotation or each.arg in ("self", "cls") for each in every)
            if child.returns is None or not all(typed):
                yield child.name
        yield from _untyped_in(child)


def rank(room: str) -> int:
    return LOWER.index(room) if room in LOWER else len(LOWER)


def modules_of(node: ast.ImportFrom) -> set[str]:
    """The modules below kernels/ that a line imports."""
    root, part, *rest = [*node.module.split("."), ""]
    if (root, part) != ("milepost", "kernels"):
        return set()
    rest = [name for name in rest if name]
    found = set()
    for alias in node.names:
        path = ROOT.joinpath(*rest, alias.name)
        is_module = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
        found.add(".".join([*rest, alias.name] if is_module else rest))
    return found - {""}


def test_imports_in_kernels_go_up_and_through_doors() -> None:
    assert [each for path in sorted(ROOT.rglob("*.py")) for each in breaches(path)] == []


def test_every_room_has_its_place() -> None:
    rooms = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    rooms -= {"__pycache__", "__init__"}
    assert rooms <= set(BEFORE)
    text = (ROOT / "__init__.py").read_text(encoding="utf-8")
    assert all(room in text for room in rooms)


def test_all_functions_but_the_devices_have_types() -> None:
    assert [each for path in sorted(ROOT.rglob("*.py")) for each in untyped(path)] == []


def test_a_function_without_types_is_seen(tmp_path) -> None:
    path = tmp_path / "a.py"
    for line, names in (
        ("def f(a: int, *b: int, c: int, **d: int) -> None: ...", []),
        ("def f(a: int): ...", ["f"]),
        ("def f(a, /, b: int) -> None: ...", ["f"]),
        ("def f(*a) -> None: ...", ["f"]),
        ("def f(**a) -> None: ...", ["f"]),
        ("class A:\n    async def f(self, *, a) -> None: ...", ["f"]),
        ("def f() -> None:\n    def g(a): ...", ["g"]),
        ("@quick\n@triton.jit(do_not_specialize=('a',))\ndef f(a, B: tl.constexpr): ...", []),
        ("@gluon.jit\ndef f(a): ...", []),
        ("@cache\ndef f(a): ...", ["f"]),
    ):
        path.write_text(line, encoding="utf-8")
        assert untyped(path) == [f"a.py: {name}" for name in names], line


def test_a_breach_is_seen(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tests.kernels.test_rooms.ROOT", tmp_path)
    for name, line, is_fine in (
        ("attention/a.py", "from milepost.kernels.platform.device import Chip", True),
        ("attention/a.py", "from milepost.kernels.products import multiply", True),
        ("products/a.py", "from milepost.kernels.attention import attend", False),
        ("attention/a.py", "from milepost.kernels.products.table import choose", False),
        ("attention/a.py", "from milepost.kernels.attention.table import choose", True),
        ("layout/a.py", "from milepost.kernels.attention import attend", False),
        ("platform/a.py", "from milepost.kernels.layout.batch import Batch", False),
        ("conv.py", "from milepost.kernels.recurrent.structures import Mixer", True),
        ("ngrams.py", "from milepost.kernels.mtp import Carried", True),
        ("ngrams.py", "from milepost.kernels.mtp.triton import keep", False),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line, encoding="utf-8")
        assert (breaches(path) == []) is is_fine, line
