"""The design page tells the way of a request from its endpoint to a plan, and it is short."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import milepost

SOURCE = Path(milepost.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
STEP = re.compile(r"^    ( *)([\w.]+) +([\w/]+\.py)$", re.M)
TYPES = re.compile(r"On this way the request is one object after the other:(.*?)\. It has", re.S)

MAX_NAMES = 35
MAX_RETURNS = 8
MAX_MODULES = 12


def function_of(name, file):
    """The definition that a step names."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    *owner, last = name.split(".")
    body = tree.body
    if owner:
        (body,) = [n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner[0]]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    (found,) = [node for node in body if isinstance(node, kinds) and node.name == last]
    return found


def calls(function):
    """The names that a function calls, a class by its own."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def way(begin="A test follows these calls", end="On this way"):
    """(Depth, name, file) of each step."""
    block = PAGE.partition(begin)[2].partition(end)[0]
    return [(len(indent) // 2, name, file) for indent, name, file in STEP.findall(block)]


def planning():
    """(Depth, name, file) of each step from where `way` ends to the plan."""
    return way("A waiting request passes through", "| question")


def test_each_step_of_a_request_is_called_by_the_one_above_it():
    assert planning()[0][1:] == way()[-1][1:]
    above = []
    for depth, name, file in way() + planning():
        function = function_of(name, file)
        above[depth:] = [function]
        owner, _, called = name.rpartition(".")
        if depth:
            expected = owner if called == "__init__" else called
            assert expected in set(calls(above[depth - 1])), name


def test_the_way_of_a_request_is_short():
    steps = way()
    (types,) = TYPES.findall(PAGE)
    named = re.findall(r"`([A-Z]\w+)`", types)
    returns = sum(depth <= before for (before, *_), (depth, *_) in pairwise(steps))
    assert steps[0][1] == "chat"
    assert steps[-1][1] == "Scheduler.schedule"
    assert len(steps) + len(set(named)) <= MAX_NAMES
    assert returns <= MAX_RETURNS
    assert len({file for _, _, file in steps}) <= MAX_MODULES


def test_the_types_on_the_way_exist():
    (types,) = TYPES.findall(PAGE)
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)`", types):
        assert f"class {name}" in text, name


ROW = re.compile(r"^\| [^|]+\? \| (.*) \|$", re.M)
FILE = re.compile(r"[\w/]+\.py")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?")


def defines(name, file):
    """Whether a module defines a name, or a class in it the method."""
    body = ast.parse((SOURCE / file).read_text(encoding="utf-8")).body
    owner, _, last = name.rpartition(".")
    if owner:
        body = [n for top in body if getattr(top, "name", "") == owner for n in top.body]
    targets = [n.target.id for n in body if isinstance(n, ast.AnnAssign)]
    return last in (*targets, *(getattr(node, "name", None) for node in body))


def places(answer):
    """(Name, files) of each name in an answer: the files that are named next after it."""
    found, names, files = [], [], []
    for code in re.findall(r"`([^`]+)`", answer):
        if FILE.fullmatch(code):
            files.append(code)
        elif NAME.fullmatch(code):
            if files:
                found += [(name, files) for name in names]
                names, files = [], []
            names.append(code)
    return [*found, *((name, files) for name in names)]


def test_what_answers_a_strangers_questions_is_where_the_page_says():
    answers = ROW.findall(PAGE)
    assert len(answers) == 15
    for answer in answers:
        assert places(answer)
        for file in re.findall(r"`([\w/]+\.py)`", answer):
            assert (SOURCE / file).is_file(), file
        for name, files in places(answer):
            assert any(defines(name, file) for file in files), f"{name} is not in {files}"


def test_a_name_stands_in_the_file_named_next_after_it():
    answer = (
        "`a` and `B.c` (`x.py`) call `d` in `y.py`, `z.py`; `milepost kernels MODEL` prints `e`"
    )
    others = ["y.py", "z.py"]
    assert places(answer) == [("a", ["x.py"]), ("B.c", ["x.py"]), ("d", others), ("e", [])]
