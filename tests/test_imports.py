"""Imports go one way, and the pure parts stay pure."""

import ast
import re
import subprocess
import symtable
import sys
from pathlib import Path

import pytest

import milepost
from milepost import annexes
from milepost.errors import ConfigError

ROOT = Path(milepost.__file__).parent

_TENSORS = {"kernels", "parallel", "layers", "models"}
_BELOW = {"cache", "scheduler", "speculative", *_TENSORS, "images", "runner", "tiers"}

CORE = {
    "config": {"cache"},
    "cache": set(),
    "scheduler": {"cache"},
    "speculative": {"cache", "scheduler"},
    "kernels": set(),
    "parallel": {"kernels"},
    "layers": {"kernels", "parallel"},
    "models": {"kernels", "parallel", "layers"},
    "images": {"models"},
    "runner": {*_TENSORS, "images", "cache", "scheduler"},
    "tiers": {"cache", "scheduler", "runner"},
    "engine": _BELOW,
    "server": {*_BELOW, "engine"},
    "cli": {*_BELOW, "engine", "server"},
}
"""What each part of the core may use besides `SHARED`."""

ANNEXES = {
    "disaggregation": {"cache", "scheduler", "runner", "engine"},
    "kv_events": {"cache", "scheduler", "engine"},
    "page": {"cache", "scheduler", "engine", "server"},
    "ray": {*_BELOW, "engine", "server"},
    "simulator": {"cache", "scheduler", "tiers"},
    "load": set(),
}
"""What each annex may use besides `SHARED`."""

MAY_USE = {**CORE, **ANNEXES}

COMMANDS = {
    "bench": "load",
    "simulate": "simulator",
    "simulate_results": "simulator",
    "simulate_settings": "simulator",
}
"""Modules of `cli` that belong to an annex, and use it."""

FLOORS = {
    "cache": {
        "memory": set(),
        "tree": set(),
        "eviction": {"memory", "tree"},
        "allocation": {"memory", "tree", "eviction"},
    },
    "engine": {
        "text": set(),
        "media": set(),
        "constraints": set(),
        "assembly": {"text", "media", "constraints"},
        "loop": {"text", "media", "constraints", "assembly"},
        "processes": {"text", "media", "constraints", "assembly", "loop"},
    },
}
"""Folders inside a part, each used through its `__init__`, and what it may use."""

BESIDE_FLOORS = {
    "cache": {"events", "order", "placement", "plans", "report"},
    "engine": {
        *("child", "ending", "facts", "heap", "metrics", "off_device", "outputs", "parent"),
        *("prompts", "validation", "watcher"),
    },
}
"""Modules beside the folders that all of them may use."""

SHARED = {
    "annexes",
    "checks",
    "config",
    "errors",
    "frames",
    "image_config",
    "kv_config",
    "kv_transfer_params",
    "logs",
    "pictures",
    "progress",
    "sampling_params",
    "small_files",
    "speculative_config",
    "structured_outputs",
    "vllm_keywords",
    "zeromq",
}
"""Modules beside the parts that all of them may use, and that use only each other."""

ENTRY_POINTS = {"__init__", "__main__", "demo"}
"""Modules that may use every part."""

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors")


def part_of(path):
    """`cache` for cache/tree.py, `config` for config.py."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported_parts(tree, package):
    """The parts of milepost that a module imports; `package` is the module's own, for dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "milepost" and rest:
                yield rest.partition(".")[0], node.lineno


def violations(path):
    own = part_of(path)
    if own in ENTRY_POINTS:
        return []
    package = ["milepost", *path.relative_to(ROOT).parts[:-1]]
    allowed = {own, *SHARED, *MAY_USE.get(own, ()), "__version__"}
    if own == "cli":
        allowed.add(COMMANDS.get(path.stem))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"{path.relative_to(ROOT)}:{line} imports {part}"
        for part, line in imported_parts(tree, package)
        if part not in allowed
    ]


def test_imports_go_one_way():
    paths = sorted(ROOT.rglob("*.py"))
    assert len(paths) > 10
    assert [v for path in paths for v in violations(path)] == []


def names_an_annex(path):
    """The imports, and texts of a module's code, that name an annex; `annexes` may."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    commands = {f"milepost.cli.{name}" for name in COMMANDS}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) if name.startswith("milepost."):
                names = [name]
            case ast.ImportFrom(module=str(module), names=imported):
                names = [f"{module}.{alias.name}" for alias in imported]
            case _:
                continue
        for name in names:
            _, part, *_ = name.split(".")
            if part in ANNEXES or any(f"{name}.".startswith(f"{one}.") for one in commands):
                yield f"{path.relative_to(ROOT)}:{node.lineno} names {name}"


def test_nothing_of_the_core_names_an_annex():
    """Each is reached through a protocol, and by name through `milepost.annexes`."""
    assert not CORE.keys() & ANNEXES.keys()
    assert [(part, uses) for part, uses in CORE.items() if uses & ANNEXES.keys()] == []
    paths = [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if part_of(path) not in ANNEXES and path.stem not in COMMANDS
    ]
    assert len(paths) > 200
    assert [line for path in paths for line in names_an_annex(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from milepost.disaggregation.exchange import Access",
        "from milepost import page",
        "from milepost.cli.bench import command",
        "from milepost.cli import simulate",
        "def f():\n    from milepost.kv_events import EventPublisher",
        "import_module('milepost.simulator.fleet')",
        "import_module('milepost.cli.simulate')",
    ],
)
def test_every_way_to_name_an_annex_is_seen(tmp_path, monkeypatch, line):
    path = tmp_path / "engine.py"
    path.write_text(line)
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    assert len(list(names_an_annex(path))) == 1


def test_each_annex_is_installed_and_asked_for_by_name():
    folders = {known.folder for known in annexes.ANNEXES.values()}
    assert folders == ANNEXES.keys() - {"ray"}
    for name, known in annexes.ANNEXES.items():
        assert annexes.is_installed(name)
        assert is_there("milepost", known.module.partition(".")[0])


def test_what_asks_for_an_annex_that_is_not_there_is_told_so(monkeypatch):
    monkeypatch.setattr(annexes, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"x needs the annex milepost\.load, which is not instal"):
        annexes.annex("bench", wanted_by="x")


def reaches_past(path):
    """Imports of an inner module of a part's folder, or of a folder above one's own."""
    inside = path.relative_to(ROOT).parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        root, part, *rest = [*node.module.split("."), "", ""]
        rest = [name for name in rest if name] or [node.names[0].name]
        if root != "milepost" or part not in FLOORS:
            continue
        floors, beside = FLOORS[part], BESIDE_FLOORS[part]
        own = inside[1] if inside[:1] == (part,) and len(inside) > 1 else None
        floor = rest[0]
        is_past = floor in floors and len(rest) > 1 and floor != own
        is_above = own is not None and floor not in {own, *floors[own], *beside}
        if is_past or is_above:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}")
    return found


@pytest.mark.parametrize("part", FLOORS)
def test_every_folder_of_a_part_has_a_door(part):
    folders = {path.name for path in (ROOT / part).iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == FLOORS[part].keys()


def test_nobody_reaches_past_a_door():
    assert [line for path in sorted(ROOT.rglob("*.py")) for line in reaches_past(path)] == []


@pytest.mark.parametrize(
    ("folder", "line", "is_allowed"),
    [
        ("scheduler", "from milepost.cache.tree import Chain", True),
        ("scheduler", "from milepost.cache.tree.chain import Chain", False),
        ("cache/tree", "from milepost.cache.tree.chain import Chain", True),
        ("cache/tree", "from milepost.cache.eviction import Reclaimer", False),
        ("cache/tree", "from milepost.cache.cache import Cache", False),
        ("cache/eviction", "from milepost.cache.report import Stats", True),
        ("server", "from milepost.engine.text import chat", True),
        ("server", "from milepost.engine.text.chat import Composed", False),
        ("engine/loop", "from milepost.engine.text import chat", True),
        ("engine/text", "from milepost.engine.loop import Engine", False),
        ("engine/text", "from milepost.engine import llm", False),
        ("engine/text", "from milepost.engine import heap", True),
    ],
)
def test_a_door_is_seen(tmp_path, monkeypatch, folder, line, is_allowed):
    path = tmp_path / folder / "other.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    assert (reaches_past(path) == []) is is_allowed


def test_every_part_has_its_place():
    parts = {part_of(path) for path in ROOT.rglob("*.py")}
    assert parts - MAY_USE.keys() - SHARED - ENTRY_POINTS == set()


def test_the_design_lists_the_parts_in_the_order_of_their_imports():
    design = (ROOT.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    parts = re.findall(r"^    (\w+)/ +\S", design, re.MULTILINE)
    assert set(parts) == {part for part in MAY_USE if (ROOT / part).is_dir()}
    for number, part in enumerate(parts):
        assert MAY_USE[part] <= set(parts[:number]), part


@pytest.mark.parametrize(
    ("line", "package", "found"),
    [
        ("import milepost.engine.llm", ["milepost", "cache"], ["engine"]),
        ("from milepost.engine import llm", ["milepost", "cache"], ["engine"]),
        ("from milepost import LLM, config", ["milepost", "cache"], ["LLM", "config"]),
        ("from ..engine import llm", ["milepost", "cache"], ["engine"]),
        ("from . import pages", ["milepost", "cache"], ["cache"]),
        ("def f():\n    import milepost.cli", ["milepost", "cache"], ["cli"]),
        ("import math, milepost", ["milepost", "cache"], []),
    ],
)
def test_every_kind_of_import_is_seen(line, package, found):
    assert [part for part, _ in imported_parts(ast.parse(line), package)] == found


@pytest.mark.parametrize("part", ["cache", "scheduler", "simulator", "speculative"])
def test_pure_parts_import_no_heavy_library(part):
    modules = [
        ".".join(["milepost", *path.relative_to(ROOT).with_suffix("").parts])
        for path in sorted((ROOT / part).rglob("*.py"))
    ]
    assert_light(modules)


@pytest.mark.parametrize("module", ["milepost", *(f"milepost.{name}" for name in sorted(SHARED))])
def test_importing_the_surface_is_light(module):
    assert_light([module])


def test_a_server_starts_its_engine_before_it_imports_anything_heavy():
    assert_light(["milepost.cli.main", "milepost.server.run"], heavy=("torch", "transformers"))


def assert_light(modules, heavy=HEAVY):
    """Import the modules in a fresh interpreter and look for heavy libraries."""
    script = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


TAKEN_TWICE = {
    *(
        "Cut",
        "Event",
        "Family",
        "MixerLayout",
        "Reading",
        "Where",
    ),
}
"""Aliases whose name another type has. The list only shrinks."""


def named_types(tree):
    """The names of a module's classes, of its aliases of types, and of types that it renames."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(names=imported):
                renamed = (a.asname for a in imported if a.name[:1].isupper() and a.asname)
                yield from (name for name in renamed if not name.isupper())
    for node in tree.body:
        for statement in [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                    pass
                case _:
                    continue
            is_type = name.lstrip("_")[:1].isupper() and not name.isupper()
            is_variable = isinstance(value, ast.Call) and "Var" in ast.unparse(value.func)
            if is_type and not is_variable:
                yield name


def test_no_two_types_have_one_name():
    homes = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name in set(named_types(ast.parse(path.read_text()))):
            homes.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in TAKEN_TWICE} == {}


@pytest.mark.parametrize(
    "line",
    [
        "class Order: pass",
        "Order = Stored | Bring",
        "Order: TypeAlias = Stored",
        "if True:\n    Order = Stored",
        "from elsewhere import Stored as Order",
    ],
)
def test_every_way_to_name_a_type_is_seen(line):
    assert list(named_types(ast.parse(line))) == ["Order"]


SERVERS_OWN = (
    "aiohttp fastapi httptools llguidance nixl prometheus_client pydantic ray starlette uvicorn zmq"
)
PLAIN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from milepost import LLM, SamplingParams

llm = LLM(max_model_len=256)
(output,) = llm.generate(["Once upon"], SamplingParams(max_tokens=2, ignore_eos=True))
print(len(output.outputs[0].token_ids))
"""


def test_python_needs_nothing_that_only_a_server_does():
    command = [sys.executable, "-c", PLAIN, SERVERS_OWN]
    assert subprocess.check_output(command, text=True).split()[-1] == "2"


def test_benchmarks_import_what_there_is():
    """Few of them run in tests: a name that has moved would be missed on the next GPU only."""
    found = {
        (node.module, alias.name)
        for path in (Path(__file__).parents[1] / "bench").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "milepost"
        for alias in node.names
    }
    assert len(found) > 20
    assert [pair for pair in sorted(found) if not is_there(*pair)] == []


def is_there(module, name):
    path = ROOT.parent.joinpath(*module.split("."))
    if path.is_dir():
        if (path / name).is_dir() or (path / f"{name}.py").exists():
            return True
        path /= "__init__"
    path = path.with_suffix(".py")
    if not path.exists():
        return False
    names = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    try:
        symbol = names.lookup(name)
    except KeyError:
        return False
    return symbol.is_assigned() or symbol.is_imported()
