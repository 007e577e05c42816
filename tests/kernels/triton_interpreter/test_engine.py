"""An engine whose steps run on the fused kernels: the same answers as on the reference ones."""

import pytest
import torch

from milepost.kernels.attention.portable import prepare
from milepost.kernels.layout.batch import Capacity
from milepost.layers.parts import ResidualBlock
from milepost.runner import arrays
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import Graphs, largest_step
from milepost.runner.pools import Pools
from tests.engines import ask, cached, greedy, num_held, save_tiny, tokens
from tests.kernels.triton_interpreter.fused import run_fused
from tests.shared import share_memory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    shapes = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return save_tiny(tmp_path_factory.mktemp("fused"), "qwen3_next", torch.float32, **shapes)


@pytest.fixture(params=["plain", "ahead in one memory"])
def llm(request, tiny, monkeypatch):
    # The interpreter's time goes by programs. A GPU has one for each token of so few.
    monkeypatch.setattr(prepare, "_FEW_TOKENS", 4)
    is_plain = request.param == "plain"
    llm = tiny.open(async_scheduling=not is_plain, num_pages=64, num_slots=16, page_size=64)
    runner = llm.llm_engine.runner
    model = runner.executor.model

    def make(pools: Pools, num_slots: int) -> DeviceExecutor:
        largest = largest_step(max_num_seqs=64, max_num_batched_tokens=8192)
        return DeviceExecutor(
            model, pools, num_requests=num_slots, max_model_len=1024, largest=largest
        )

    if is_plain:
        runner.executor = make(runner.pools, 16)
    else:
        share_memory(llm, 3, make)
    return llm


class Launched(Graphs):
    """Graphs that are no records: each replay launches what was to be recorded."""

    def capture(self, capacity, run):
        self._graphs[capacity] = [], run

    def replay(self, capacity, between=None):
        assert not capacity.decodes
        return self._graphs[capacity][1](between)


def test_a_step_in_two_pieces(tiny, llm):
    """What the second reads comes once the first is launched; the padding was there before."""
    executor, params = llm.llm_engine.runner.executor, greedy(2)
    executor._graphs = Launched()
    executor.capture([Capacity(num_tokens=48, num_sequences=3, num_exports=4)])
    assert [executor._pieces.num_first, len(executor._pieces.second)] == [1, 2]
    for prompts, expected in (([40], [0]), ([100], [0]), ([100], [64]), ([20, 28], [0, 0])):
        outputs = ask(llm, *(tokens(num, num) for num in prompts), params=params)
        tiny.check(outputs, params)
        assert cached(outputs) == expected


def test_a_step_that_is_no_graph_is_laid_out_beside_its_first_layers(tiny, llm, monkeypatch):
    executor, params, order = llm.llm_engine.runner.executor, greedy(1), []
    pieces, lay_out, run = executor._pieces, arrays.lay_out, ResidualBlock.run

    def laid_out(batch, operations):
        order.append(operations)
        return lay_out(batch, operations)

    def ran(block, *args, **options):
        order.append(block)
        return run(block, *args, **options)

    monkeypatch.setattr(arrays, "lay_out", laid_out)
    monkeypatch.setattr(ResidualBlock, "run", ran)
    executor._second_staging._device_buffer.fill_(0x3F)
    outputs = ask(llm, tokens(40, 40), params=params)
    tiny.check(outputs, params)
    first, second = (list(layer.blocks) for layer in executor.model.layers)
    expected = [pieces.first, *first, pieces.second, *second]
    assert order[: len(expected)] == expected


def test_kimi_linear_cold_and_hit(tmp_path):
    """KDA, latents in pages and a sigmoid router, one memory for pages and slots."""
    shapes = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "hidden_size": 16,
        "linear_num_heads": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
    }
    tiny = save_tiny(tmp_path, "kimi_linear", torch.float32, **shapes)
    llm = tiny.open(num_pages=64, num_slots=16, page_size=64)
    model = llm.llm_engine.runner.executor.model

    def make(pools: Pools, num_slots: int) -> DeviceExecutor:
        largest = largest_step(max_num_seqs=64, max_num_batched_tokens=8192)
        return DeviceExecutor(
            model, pools, num_requests=num_slots, max_model_len=1024, largest=largest
        )

    share_memory(llm, 3, make)
    params = greedy(2)
    for expected in (0, 64):
        outputs = ask(llm, tokens(66), params=params)
        tiny.check(outputs, params)
        assert cached(outputs) == [expected]
    assert num_held(llm) == (0, 0)


def test_cold_and_hit(tiny, llm):
    params = greedy(4)
    prompt = tokens(100)
    for expected in (0, 64):
        outputs = ask(llm, prompt, params=params)
        tiny.check(outputs, params)
        assert cached(outputs) == [expected]
    assert num_held(llm) == (0, 0)


def test_batch_with_shared_prefix(tiny, llm):
    params = greedy(3)
    shared = tokens(66, 5)
    tiny.check(ask(llm, *([*shared, *tokens(20, i)] for i in range(2)), params=params), params)
    tiny.check(ask(llm, tokens(10, 9), [*shared, *tokens(30, 3)], params=params), params)


def test_next_turn_resumes_inside_a_page(tiny, llm):
    params = greedy(5)
    prompt = tokens(90, 2)
    (first,) = ask(llm, prompt, params=params)
    turn = [*prompt, *first.outputs[0].token_ids, *tokens(9, 4)]
    (second,) = ask(llm, turn, params=params)
    tiny.check([second], params)
    assert second.num_cached_tokens == 94


def test_windows_have_tables_of_their_own(tmp_path, monkeypatch):
    """Beside full attention and convolutions with states in slots; at a page, inside one, and where
    an answer ended."""
    monkeypatch.setattr(prepare, "_FEW_TOKENS", 4)
    shapes = {
        "head_dim": 16,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "sliding_window": 20,
    }
    tiny = save_tiny(tmp_path, "lfm3", torch.float32, **shapes)
    llm = tiny.open(num_pages=64, num_slots=16, page_size=16, max_num_batched_tokens=64)
    run_fused(llm)
    params = greedy(3)
    outputs = ask(llm, tokens(70), tokens(30, 1), params=params)
    tiny.check(outputs, params)
    longer = [*tokens(70), *outputs[0].outputs[0].token_ids, *tokens(9, 2)]
    for prompt, expected in ((tokens(70), 64), (longer, 72), ([*tokens(30, 1), 5], 0)):
        (output,) = ask(llm, prompt, params=params)
        tiny.check([output], params)
        assert cached([output]) == [expected]
