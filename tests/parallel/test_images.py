"""Images on several ranks: the answers, hits and encoder work of one."""

from __future__ import annotations

import pytest
import torch

from milepost import SamplingParams
from milepost.engine.assembly import setup
from tests import pictured
from tests.parallel.team import ThreadTeam
from tests.pictured_prompts import DIVIDES, answer, asked, image, open_llm, save_folder

PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, logit_bias={pictured.IMAGE: -100}
)
"""An answer is sent again, where an image token would stand for an image."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(setup, "Team", ThreadTeam)


@pytest.mark.parametrize(
    "options",
    [{}, {"encoder_cache_size": 128}, {"speculative_config": {"method": "mtp", "adaptive": False}}],
    ids=["plain", "encoded again", "drafts"],
)
def test_two_ranks_answer_as_one(options, tmp_path):
    """Images are encoded by each rank, and once; the text part is split between them."""
    save_folder(tmp_path, torch.float64, has_head="speculative_config" in options, **DIVIDES)
    with (
        open_llm(tmp_path, **options) as alone,
        open_llm(tmp_path, tensor_parallel_size=2, **options) as several,
    ):
        first, second = image(8, 8, 1), image(4, 12, 2)
        parts = [40, first, [5, 6] * 10, second, [7] * 9]
        for _ in range(3):
            expected, found = (answer(each, asked(*parts), PARAMS) for each in (alone, several))
            assert found == expected
            parts += [found[0], [8] * 5, image(8, 4, len(parts))]
            parts += [[9] * 8]
        stats = [each.llm_engine.scheduler.stats for each in (alone, several)]
        assert stats[0].num_encoded == stats[1].num_encoded >= 4
