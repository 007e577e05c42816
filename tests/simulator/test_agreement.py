"""The simulator and the engine, side by side on the same requests: the same plans and counters.

A trace cannot show that prompts agree inside a page. So here they part where pages end, and what
follows an answer fills its last page.
"""

from __future__ import annotations

import random
from array import array

import pytest

from milepost.cache import Cache
from milepost.cache.memory import Split, UnifiedPool
from milepost.config import EngineConfig
from milepost.engine.loop.core import Engine
from milepost.engine.prompts import Prompt
from milepost.sampling_params import SamplingParams
from milepost.simulator.cost import read_cost
from milepost.simulator.fleet import EngineLimits
from milepost.simulator.trace import Trace, TraceRequest
from tests.checkpoints import save
from tests.simulator.traces import one_engine

POOLS = {"num_pages": 40, "num_slots": 5}
ONE_MEMORY = {"cpu_cache_gib": 0.001, "cache_memory": "shared"}
"""Room for 18 states, or two pages in the place of each: states and pages go, and pages move."""
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 192}


def tokens(num, seed):
    return random.Random(seed).choices(range(101), k=num)


def first_prompts():
    shared = tokens(192, 0)
    return [[*shared, i, *tokens(70 + 9 * i, 1 + i)] for i in range(5)] + [tokens(300, 9)]


def recorded(scheduler, plans):
    """Note what each step plans, without object identities."""
    schedule = scheduler.schedule

    def noting():
        plan = schedule()
        plans.append((plan.moves, plan.ended))
        plans.append(
            [
                (
                    *(s.number, s.start, s.end, s.new_pages, s.write_from),
                    *(s.slot_in, s.slot_out, s.exports, s.page_copy, s.samples),
                )
                for s in plan.sequences
            ]
        )
        return plan

    scheduler.schedule = noting


def run_engine(folder, memory):
    """Two waves of prompts: the second continues what the first got for answers."""
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, device="cpu", **memory, **LIMITS
    )
    engine, plans, asked = Engine(config), [], []
    recorded(engine.scheduler, plans)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = first_prompts()
    for _ in range(2):
        jobs = [engine.add(Prompt(token_ids=prompt), params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        asked += [job.completions[0].request for job in jobs]
        prompts = [
            [*r.chain.tokens, *tokens(70, 50 + i)] for i, r in enumerate(asked[: len(prompts)])
        ]
    return plans, asked, engine.scheduler.cache


def trace_of(asked, wave):
    """The same requests as a trace tells them: ids for the pages."""
    ids: dict[bytes, int] = {}
    requests = []
    for number, request in enumerate(asked):
        digests = request.chain.full_digests()
        pages = array("I", [ids.setdefault(d, len(ids)) for d in digests])
        full = request.num_prompt_tokens // 64
        requests.append(
            TraceRequest(
                arrival_s=0.0 if number < wave else 1e6,
                input_length=request.num_prompt_tokens,
                output_length=request.num_output_tokens,
                page_ids=pages[:full],
            )
        )
    trace = Trace(
        name="made", page_size=64, requests=requests, num_page_ids=len(ids) + 200 * len(requests)
    )
    for number, request in enumerate(requests):
        request.own_id = len(ids) + 100 * number
    trace.link_answers()
    return trace


@pytest.mark.parametrize("memory", [POOLS, ONE_MEMORY], ids=["two pools", "one memory"])
def test_the_simulator_plans_what_the_engine_plans(tmp_path, memory):
    save("qwen3_next", tmp_path, linear_value_head_dim=64)
    plans, asked, engines = run_engine(tmp_path, memory)
    stats, storage = engines.stats, Split(**POOLS)
    if memory is ONE_MEMORY:
        storage = UnifiedPool(engines.slots.capacity, engines.storage.pages_a_slot)
    cache = Cache(storage=storage)
    replay = one_engine(
        trace_of(asked, 6),
        cache,
        read_cost("hybrid-35b-a3b-h200"),
        closed=False,
        limits=EngineLimits(**LIMITS),
    )
    simulated: list = []
    recorded(replay.engines[0].scheduler, simulated)
    replay.run()
    assert stats.hits > 0
    assert simulated == plans
    assert cache.stats == stats
