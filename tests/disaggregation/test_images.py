"""Prefill here and decode there, with images: what moves holds their tokens, and another image of
the same size is never taken for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.engine.media import Embedded, Given, MediaRules
from milepost.engine.media.facts import ImageFacts
from milepost.engine.prompts import Prompt
from tests import pictured
from tests.disaggregation.fleet import ONE_TOKEN, PREFILL, connector_of, open_engine, running
from tests.engines import greedy
from tests.pictured_prompts import asked, image, save_folder

FACTS = ImageFacts(settings=pictured.SETTINGS, token_id=pictured.IMAGE, text="")
DRAFTS = {"speculative_config": {"method": "mtp", "adaptive": False}}
PARTS = (30, image(8, 8, 1), [5, 6] * 20, image(4, 12, 2), [7] * 40)


def prompt(*parts, **own):
    made = asked(*parts)
    plain = Prompt(token_ids=made["prompt_token_ids"], **own)
    images = [Given(each) for each in made["multi_modal_data"]["image"]]
    media = Embedded(FACTS, MediaRules(), 99).prepare(images)
    assert media is not None
    return media.put_in(plain)


def answered(fleet, engine, given, params=None):
    job = engine.add(replace(given, kv_transfer_params=params), greedy(12))
    fleet.run(job)
    request = job.completions[0].request
    return request.output_token_ids, request.report


@pytest.mark.parametrize("options", [{}, DRAFTS], ids=["plain", "drafts"])
def test_the_decoder_encodes_nothing_that_was_prefilled(options, tmp_path):
    save_folder(tmp_path, torch.float64, has_head=bool(options))
    engines = [open_engine(tmp_path, "socket", **options) for _ in range(3)]
    with running(*engines) as fleet:
        first, second, alone = engines
        given = prompt(*PARTS)
        expected, _ = answered(fleet, alone, given)
        job = first.add(replace(given, kv_transfer_params=PREFILL), ONE_TOKEN)
        fleet.run(job)
        ids, report = answered(fleet, second, given, job.kv_transfer_params)
        assert ids == expected
        assert report.reused == len(given.token_ids) - 1
        assert (report.images_reused, second.scheduler.stats.num_encoded) == (2, 0)
        assert connector_of(second).num_fetched
        assert not connector_of(second).num_failed
        other = prompt(*PARTS[:3], image(4, 12, 3), PARTS[-1])
        expected, _ = answered(fleet, alone, other)
        # What these parameters name is no prompt with this image.
        ids, report = answered(fleet, second, other, job.kv_transfer_params)
        assert ids == expected
        assert report.reused <= other.pictures[1].offset
        assert second.scheduler.stats.num_encoded == 2 - report.images_reused
        fleet.check()
