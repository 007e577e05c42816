"""Engines of a module's checkpoint, its fixture `folder`, with its OPTIONS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost import LLM


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, **request.module.OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def cold(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, enable_prefix_caching=False, **request.module.OPTIONS) as llm:
        yield llm
