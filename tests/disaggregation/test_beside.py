"""Prefill here and decode there beside the engine's other ways: drafts, float8 KV, host memory, one
memory for pages and states, and all of them."""

from __future__ import annotations

from random import Random

import pytest

from milepost.engine.prompts import Prompt
from tests.disaggregation.conftest import save_small
from tests.disaggregation.fleet import ONE_TOKEN, PREFILL, connector_of, open_engine, running
from tests.engines import Tiny, greedy, sampled, tokens
from tests.mtp import add_head

DRAFTS = {"speculative_config": {"method": "mtp", "adaptive": False}}
FLOAT8 = {"kv_cache_dtype": "fp8"}
HOST = {"cache_host_gib": 0.02, "num_pages": 24, "num_slots": 6}
ONE = {"cache_memory": "shared", "cpu_cache_gib": 0.001, "num_pages": None, "num_slots": None}
ONE |= {"page_size": 16}


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    """A model with a head that drafts."""
    tiny = save_small(tmp_path_factory.mktemp("headed"))
    add_head(tiny.folder)
    return tiny


@pytest.mark.parametrize(
    "options",
    [ONE, DRAFTS | FLOAT8 | HOST],
    ids=["one memory", "all others"],
)
def test_answers_are_those_of_one_plain_engine(headed, options):
    """With little memory, conversations that repeat themselves, and two tenants."""
    random, own = Random(4), {n: options[n] for n in FLOAT8 if n in options}
    reference = Tiny(headed.folder, headed.dtype, own)
    engines = [open_engine(headed.folder, "socket", **options) for _ in range(2)]
    with running(*engines) as fleet:
        first, second = engines
        histories = [tokens(9, number) * 14 for number in range(3)]
        for turn in range(2):
            for number, history in enumerate(histories):
                salt = "mine" if number % 2 else ""
                history += random.choices(history, k=random.randrange(10, 60))
                job = first.add(
                    Prompt(token_ids=history, cache_salt=salt, kv_transfer_params=PREFILL),
                    ONE_TOKEN,
                )
                fleet.run(job)
                params = job.kv_transfer_params
                sampling = sampled(9, temperature=0.7, seed=turn) if number % 3 else greedy(9)
                asked = Prompt(token_ids=history, cache_salt=salt, kv_transfer_params=params)
                job = second.add(asked, sampling)
                fleet.run(job)
                output = job.completions[0].request.output_token_ids
                assert output == reference.expected(history, sampling)
                history += output
        assert connector_of(second).num_fetched
        assert not connector_of(second).num_failed
        if "speculative_config" in options:
            assert second.scheduler.stats.num_draft_tokens
        fleet.check()
