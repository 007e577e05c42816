"""Modules and classes stay small enough to read at once."""

import ast
from pathlib import Path

import milepost

ROOT = Path(milepost.__file__).parent
MAX_LINES, MAX_METHODS = 300, 15

LARGER = {"cache/cache.py:Cache": 20}
"""Classes with more public methods, without properties, each with its limit."""


def is_public_method(node):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
        return False
    return not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def num_methods():
    """Yields each class with its number of public methods."""
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                name = f"{file.relative_to(ROOT)}:{node.name}"
                yield name, sum(map(is_public_method, node.body))


def test_a_module_is_at_most_a_few_screens_long():
    files = {str(file.relative_to(ROOT)): file for file in ROOT.rglob("*.py")}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    assert not {name: n for name, n in lines.items() if n > MAX_LINES}


def test_a_class_has_no_more_public_methods_than_can_be_remembered():
    assert not {name: n for name, n in num_methods() if n > LARGER.get(name, MAX_METHODS)}


MAX_PARAMETERS = {"host": 8, "device": 20}
"""Parameters of a function in kernels: more are passed as structures."""


def num_parameters(root):
    """Yields where each function runs, its name, and its number of parameters."""
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                own = node.args
                names = [each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
                names = names[1:] if names[:1] in (["self"], ["cls"]) else names
                number = len(names) + sum(each is not None for each in (own.vararg, own.kwarg))
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                place = "device" if ".jit" in decorators else "host"
                yield place, f"{file.relative_to(root)}:{node.name}", number


def test_functions_of_kernels_take_structures_instead_of_many_parameters():
    functions = list(num_parameters(ROOT / "kernels"))
    assert {place for place, _, _ in functions} == set(MAX_PARAMETERS)
    assert not {name: n for place, name, n in functions if n > MAX_PARAMETERS[place]}
