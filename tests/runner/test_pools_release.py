"""What a sleeping engine's pools take."""

import torch

from milepost.config import EngineConfig
from milepost.engine.loop.core import Engine
from milepost.engine.prompts import Prompt
from milepost.sampling_params import SamplingParams


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_released_pools_are_zero_and_serve_again():
    engine = Engine(EngineConfig(cpu_cache_gib=0.05, max_num_seqs=2, max_model_len=1024))
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = Prompt(token_ids=list(range(5, 700)))

    def answer():
        job = engine.add(prompt, params)
        while engine.has_work:
            assert not engine.release_cache(), "not while requests are running"
            engine.step()
        return job.completions[0].request.output_token_ids

    first = answer()
    pools = engine.runner.pools
    assert pools.all_kv.any()
    before = resident()
    assert engine.release_cache()
    assert resident() < before
    assert not pools.all_kv.any()
    assert not any(torch.any(state.recurrent) for state in pools.states.values())
    assert answer() == first
