"""What a scrape shows, and that it agrees with what was asked."""

import re

import pytest

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "cache_config_info",
    "engine_sleep_state",
]
"""As vLLM's own dashboards ask for them."""

SAMPLE = re.compile(r"^([a-z_:A-Z0-9]+)(?:\{(.*)\})? (\S+)$")


def scraped(http):
    """(name, labels) -> value."""
    found = {}
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = SAMPLE.match(line).groups()
        found[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))] = float(value)
    return found


@pytest.fixture
def sample(client, http):
    client.completions.create(model="tiny", prompt="the quick brown", max_tokens=3, temperature=0)
    return scraped(http)


@pytest.mark.parametrize("name", NAMES)
def test_vllms_names_have_its_labels(sample, name):
    labels = [dict(labels) for found, labels in sample if found == f"vllm:{name}"]
    assert labels
    for own in labels:
        assert own["engine"] == "0"
        assert name == "cache_config_info" or own["model_name"] == "tiny"
    if name == "request_success_total":
        assert {own["finished_reason"] for own in labels} >= {"stop", "length", "abort"}
    if name == "cache_config_info":
        assert labels[0]["block_size"] == "64"
        assert int(labels[0]["num_gpu_blocks"]) > 0


def test_both_names_say_the_same(sample):
    theirs = {"model_name": "tiny", "engine": "0"}
    pairs = 0
    for (name, labels), value in sample.items():
        if name.startswith("milepost:"):
            twin = "vllm:" + name.removeprefix("milepost:")
            key = twin, labels | frozenset(theirs.items())
            if key in sample:
                assert sample[key] == value, name
                pairs += 1
    assert pairs > 100


def test_counters_count_what_was_asked(client, http):
    def deltas(before, after):
        vllm = {"model_name": "tiny", "engine": "0"}
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        keys = [(name, frozenset(vllm.items())) for name in names]
        ended = (
            "vllm:request_success_total",
            frozenset({**vllm, "finished_reason": "length"}.items()),
        )
        return [after[key] - before[key] for key in (*keys, ended)]

    before = scraped(http)
    client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=3, n=2, seed=1)
    assert deltas(before, scraped(http)) == [4, 6, 2]


def test_processes_are_watched(sample):
    for name in ("process_resident_memory_bytes", "milepost_engine_process_resident_memory_bytes"):
        assert sample[name, frozenset()] > 2**20
    assert sample["milepost_engine_process_cpu_seconds_total", frozenset()] > 0
    assert sample["process_open_fds", frozenset()] > 3
