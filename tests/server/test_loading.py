"""What stands above the address when a server has started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from milepost.config import EngineConfig
from milepost.engine.facts import Facts
from milepost.server.config import ServerConfig
from milepost.server.loading import describe, size

FACTS = {
    "device": "NVIDIA H200",
    "dtype": "bfloat16",
    "state_dtype": "float32",
    "weights_bytes": 65 * 2**30,
    "page_bytes": 2**20,
    "slot_bytes": 50 * 2**20,
    "cache_bytes": 40 * 2**30,
    "num_graphs": 51,
    "num_positions": 262_144,
    "step_tokens": 8192,
}


def service(num_ranks=1, config=None, **facts):
    info = SimpleNamespace(
        facts=Facts(**{**FACTS, **facts}),
        num_pages=20_000,
        num_slots=400,
        page_size=64,
    )
    limits = SimpleNamespace(max_model_len=262_144)
    form = SimpleNamespace(calls="qwen3_xml", reasoning="qwen3")
    client = SimpleNamespace(
        info=info, limits=limits, config=EngineConfig(tensor_parallel_size=num_ranks)
    )
    config = config or ServerConfig()
    return SimpleNamespace(client=client, config=config, names=["a", "b"], format=form)


def test_two_pools():
    assert describe(service(is_shared=False)) == [
        ("model", "a, b, up to 262,144 tokens"),
        ("device", "NVIDIA H200, bfloat16, recurrent states in float32"),
        ("graphs", "51 captured steps"),
        ("memory", "weights 65 GiB, cache 40 GiB"),
        ("pages", "20,000 of 64 tokens (1,280,000 tokens), 20 GiB"),
        ("state slots", "400, 20 GiB"),
        ("parsers", "tool calls qwen3_xml, reasoning qwen3"),
    ]


def test_one_memory():
    rows = dict(describe(service(is_shared=True)))
    assert rows["pages"] == "up to 20,000 of 64 tokens (1,280,000 tokens)"
    assert rows["state slots"] == "up to 400, in the same memory as the pages"


def test_a_small_memory_says_what_fits():
    rows = dict(describe(service(is_shared=True, num_positions=2**20, step_tokens=2048)))
    limits = "262,144 tokens (of its 1,048,576, as many as fit the memory), 2,048 a step"
    assert rows["model"] == f"a, b, up to {limits}"


def test_a_server_that_others_reach_says_that_it_has_no_key():
    """An empty MILEPOST_API_KEY sets none."""

    def rows(**options):
        return dict(describe(service(config=ServerConfig(**options), is_shared=True)))

    assert "whoever reaches the address" in rows(host="0.0.0.0")["keys"]
    assert "keys" not in rows(host="127.0.0.2")
    assert "keys" not in rows(host="0.0.0.0", api_key=["one"])
    assert "keys" not in rows(host="0.0.0.0", key_file="keys")
    assert "keys" not in rows(host="0.0.0.0", uds="socket")


def test_of_several_ranks_each_has_as_much():
    rows = dict(describe(service(is_shared=False, num_ranks=2)))
    assert rows["memory"] == "weights 65 GiB, cache 40 GiB on each device"


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**52, "4096 TiB")],
)
def test_size(num_bytes, words):
    assert size(num_bytes) == words


def test_the_block_stands_before_the_address(server):
    lines = [line.split()[0] for line in server.log[:10] if line.strip()]
    assert lines[:4] == ["model", "device", "memory", "pages"]


def test_the_process_that_speaks_http_has_no_torch(server):
    """It would cost seconds of a start, and memory."""

    def libraries(pid):
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in libraries(server.engine_pid)
    assert "libtorch" not in libraries(server.process.pid)
    assert not [line for line in server.log if "PyTorch" in line]
