"""What a scrape shows, and that it agrees with what was asked."""

import re
from pathlib import Path

import pytest

import milepost
from milepost.server.vllm_metrics import SAME

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "iteration_tokens_total_bucket",
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
    "request_prefill_kv_computed_tokens_bucket",
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
    pairs = 0
    for (name, labels), value in sample.items():
        key = "vllm:" + name.removeprefix("milepost:"), labels
        if name.startswith("milepost:") and key in sample:
            assert sample[key] == value, name
            pairs += 1
    assert pairs > 100


def test_all_of_ours_say_which_model_and_engine(sample):
    ours = [labels for name, labels in sample if name.startswith("milepost:")]
    assert len(ours) > 100
    assert all(labels >= BOTH for labels in ours)


BOTH = frozenset({"model_name": "tiny", "engine": "0"}.items())


def gained(before, after, name, **labels):
    """What a metric has gained between two scrapes, where it may have appeared."""
    key = name, frozenset(labels.items())
    return after[key] - before.get(key, 0)


def of_model(before, after, name, **labels):
    return gained(before, after, f"vllm:{name}", model_name="tiny", engine="0", **labels)


def test_prompt_tokens_are_counted_by_source(client, http):
    before = scraped(http)
    cached = []
    for _ in range(2):
        done = client.completions.create(model="tiny", prompt=[7] * 200, max_tokens=1)
        cached.append(done.usage.prompt_tokens_details.cached_tokens)
    after = scraped(http)
    assert cached[1] >= 128
    num_cached = sum(cached)

    def source(name):
        return of_model(before, after, "prompt_tokens_by_source_total", source=name)

    assert source("local_cache_hit") == num_cached
    assert source("local_compute") == 400 - num_cached
    assert source("external_kv_transfer") == 0
    assert of_model(before, after, "prefix_cache_hits_total") == num_cached
    assert of_model(before, after, "external_prefix_cache_queries_total") == 0
    computed = "request_prefill_kv_computed_tokens"
    assert of_model(before, after, f"{computed}_sum") == 400 - num_cached
    assert of_model(before, after, f"{computed}_count") == 2


def test_steps_are_counted_by_their_tokens(client, http):
    before = scraped(http)
    client.completions.create(model="tiny", prompt=[9] * 40, max_tokens=3, temperature=0)
    after = scraped(http)

    def steps(le):
        return of_model(before, after, "iteration_tokens_total_bucket", le=le)

    assert of_model(before, after, "iteration_tokens_total_sum") == 42
    assert steps("1.0") == steps("32.0") == 2
    assert steps("64.0") == steps("+Inf") == 3


def test_requests_are_counted_by_route(client, http):
    before = scraped(http)
    client.completions.create(model="tiny", prompt=[9] * 40, max_tokens=1)
    for path in ("/v1/models/tiny", "/nowhere/1", "/nowhere/2", "/health"):
        http.get(path)
    http.request("PROPFIND", "/v1/models")
    after = scraped(http)

    def requests(method, status, handler):
        labels = {"method": method, "status": status, "handler": handler}
        return gained(before, after, "http_requests_total", **labels)

    assert requests("POST", "2xx", "/v1/completions") == 1
    assert requests("GET", "2xx", "/v1/models/{name:path}") == 1
    assert requests("GET", "4xx", "none") == 2
    assert requests("other", "4xx", "/v1/models") == 1
    handlers = {dict(labels).get("handler") for name, labels in after if name.startswith("http_")}
    assert not handlers & {"/health", "/metrics", "/nowhere/1"}
    asked = {"method": "POST", "handler": "/v1/completions"}
    duration = "http_request_duration_seconds_count"
    assert gained(before, after, duration, **asked) == 1
    assert gained(before, after, "http_request_duration_highr_seconds_count") == 5
    sizes = [f"http_{side}_size_bytes_sum" for side in ("request", "response")]
    assert all(gained(before, after, name, handler="/v1/completions") > 100 for name in sizes)


def test_what_runs_is_said(sample):
    (labels,) = [dict(labels) for name, labels in sample if name == "milepost:build_info"]
    assert labels["version"] == milepost.__version__
    assert labels["device"].startswith("CPU")
    assert all(labels[name][0].isdigit() for name in ("python", "torch", "transformers"))


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


DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"^\| (?:only )?under `milepost:`.*?\n(?=\n)", re.S | re.M)
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def documented():
    """The metrics of the page's two tables: under both prefixes, and under ours alone."""
    tables = TABLE.findall((DOCS / "server.md").read_text(encoding="utf-8"))
    assert len(tables) == 2
    columns = [[line.split("|")[1] for line in table.splitlines()[2:]] for table in tables]
    return [set(re.findall(r"`(\w+)`", " ".join(column))) for column in columns]


def test_the_page_lists_every_metric(client, http):
    http.get("/nowhere")
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    both, alone = documented()
    assert both == SAME | {"prefix_cache_hits"}
    names = [name for name, _ in scraped(http) if name.startswith("milepost:")]
    found = {stem(name.removeprefix("milepost:")) for name in names}
    listed = {stem(name) for name in both | alone}
    assert found - listed == set()
    assert listed - found == {"spec_decode_num_accepted_tokens_per_pos"}, "once drafts are verified"


def stem(name):
    """A metric's name without what samples of its kind end with."""
    return SUFFIX.sub("", SUFFIX.sub("", name))
