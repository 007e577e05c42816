"""Engines of the tiny checkpoint that takes images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost import LLM
from tests.pictured_prompts import open_llm, save_folder


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="package")
def cold(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm
