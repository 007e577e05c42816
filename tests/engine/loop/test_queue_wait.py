"""Jobs that have waited too long for their turn."""

import pytest

from milepost import LLM
from milepost.config import EngineConfig
from milepost.engine.loop.core import Engine
from milepost.engine.prompts import Prompt
from milepost.errors import ConfigError
from milepost.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(
        cpu_cache_gib=0.01, max_num_seqs=1, max_queue_wait_s=60.0, disable_log_stats=True
    )
    made = Engine(config)
    yield made
    made.close()


def added(engine, num_answers=1, max_tokens=8):
    params = SamplingParams(n=num_answers, max_tokens=max_tokens, ignore_eos=True)
    return engine.add(Prompt(token_ids=[1, 2, 3, 4]), params)


def pass_time(engine, seconds):
    engine.scheduler._admission.now_s += seconds


def test_a_job_that_has_not_begun_is_ended_and_frees_what_it_held(engine):
    first = added(engine)
    engine.step()
    late, soon = added(engine, num_answers=2), None
    pass_time(engine, 50.0)
    soon = added(engine)
    pass_time(engine, 15.0)
    ((ended, error),) = engine.end_late()
    assert ended is late
    assert error.retry_after_s >= 1
    assert not engine.end_late()
    while engine.has_work:
        engine.step()
    assert (first.is_finished, soon.is_finished) == (True, True)
    assert not engine.scheduler.waiting
    assert {m.labels["when"]: m.value for m in engine.get_metrics() if "when" in m.labels} == {
        "arrival": 0,
        "waiting": 2,
    }


def test_a_job_of_which_one_answer_has_begun_goes_on(engine):
    job = added(engine, num_answers=2)
    engine.step()
    pass_time(engine, 100.0)
    assert not engine.end_late()
    while engine.has_work:
        engine.step()
    assert job.is_finished


def test_prompts_of_one_call_wait_for_each_other():
    with pytest.raises(ConfigError, match="other; set it on a server"):
        LLM(max_queue_wait_s=5.0)
