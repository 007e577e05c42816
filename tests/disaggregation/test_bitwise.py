"""In the bitwise mode engines exchange what prefills left on the grid, and bits stay the same."""

from __future__ import annotations

import pytest
import torch

from tests.disaggregation.conftest import SMALL
from tests.disaggregation.fleet import connector_of, open_engine, running
from tests.engines import answer, ask, greedy, sampled, save_tiny, tokens

GRID = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("fleet"), "qwen3_next", torch.float32, **SMALL)


def test_what_another_engine_computed_has_the_same_bits(folder):
    same = {"enable_prefix_caching": False, "cache_memory": "split", "max_num_seqs": 1}
    cold = folder.open(batch_invariant=True, **same)
    engines = [open_engine(folder.folder, "socket", batch_invariant=True) for _ in range(2)]
    with running(*engines) as fleet:
        first, second = engines
        for number, length in enumerate((300, 64, 65, 129, 40)):
            prompt = tokens(length, number)
            params = fleet.prefill(first, prompt)
            position = (length - 1) // GRID * GRID
            assert (params or {"remote_num_tokens": 0})["remote_num_tokens"] == position
            wish = sampled(20, temperature=1.0) if number % 2 else greedy(20)
            output = fleet.decode(second, prompt, params, wish).output()
            (expected,) = ask(cold, prompt, params=wish)
            assert output.num_cached_tokens == position
            assert output.outputs[0].logprobs == expected.outputs[0].logprobs
            # The next turn finds on the first engine what was sent, and no answer.
            chat = [*prompt, *answer(output), *tokens(30, number)]
            back = fleet.decode(first, chat, None, wish).output()
            (expected,) = ask(cold, chat, params=wish)
            assert back.outputs[0].logprobs == expected.outputs[0].logprobs
        assert connector_of(second).num_fetched == 3
        fleet.check()


def test_an_engine_in_the_default_mode_is_refused(folder):
    first = open_engine(folder.folder, "socket", batch_invariant=True)
    second = open_engine(folder.folder, "socket")
    with running(first, second) as fleet:
        prompt = tokens(300)
        output = fleet.decode(second, prompt, fleet.prefill(first, prompt)).output()
        assert output.num_cached_tokens == 0
        assert connector_of(second).num_bytes == 0
