"""What all tests share: one thread for tiny tensors, and the tables that tests print at the end."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tiny tensors gain nothing from threads, and threads that share few cores stall each other. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Without a GPU Triton's interpreter runs the kernels. Before triton is imported, by any test.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# An example may take as long as a busy machine needs.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

TABLES = pytest.StashKey[dict[str, list[tuple[str, ...]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures", metavar="FOLDER", help="keep the pictures of the page there (docs/images)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLES] = {}
    gc.disable()  # while tests are imported, which stay


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of tools first: single commands of ten seconds and more. Files are handed out
    in this order, and long ones that come last leave the other cores with nothing to do."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/tools/"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Takes modules and tests, a million objects, from the garbage collector: it would look at all
    of them again and again, for a twentieth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # by default 700, 10, 10, for 3 % of an engine's tests


@pytest.fixture(scope="session")
def tables(request: pytest.FixtureRequest) -> dict[str, list[tuple[str, ...]]]:
    """Title -> rows, the first of them the heads of the columns; shown when all tests are over."""
    return request.config.stash[TABLES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process that ran some of the tests is done, or broke down: its tables are shown by this."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[TABLES].update(output.get("tables", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tables"] = session.config.stash[TABLES]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for title, rows in config.stash[TABLES].items():
        terminalreporter.section(title)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            terminalreporter.write_line("  ".join(cells).rstrip())
