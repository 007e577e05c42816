"""Spans of requests as a collector receives them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from milepost.errors import ConfigError
from milepost.server import spans, tracing
from milepost.server.config import ServerConfig
from milepost.server.tracing import TraceContext, parsed, read
from tests.server import conftest
from tests.server.collector import collecting
from tests.server.conftest import serving
from tests.waiting import until

PARENT = "00f067aa0ba902b7"
SERVER, ERROR = 2, 2
"""Numbers of OTLP's span kind and status."""
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_SERVICE_NAME": "mine"}


def traceparent(trace_id, flags="01"):
    return {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}


@pytest.fixture(scope="module")
def collector():
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def traced(folder, collector):
    flags = ("--otlp-traces-endpoint", collector.url, "--log-format", "json")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setitem(conftest.ENVIRONMENT, name, value)
        with serving(folder, *flags) as server:
            yield server


def ask(server, trace_id, body=None, **parent):
    body = body or {"prompt": [5] * 150, "max_tokens": 4, "temperature": 0}
    with server.http() as http:
        return http.post("/v1/completions", json=body, headers=traceparent(trace_id, **parent))


def test_a_request_has_a_span_with_its_phases(traced, collector):
    trace_id = "1" * 32
    answer = ask(traced, trace_id).json()
    found = collector.trace(trace_id)
    assert set(found) == {"llm_request", "queue", "prefill", "decode"}
    own = found.pop("llm_request")
    assert (own.parent_id, own.kind, own.status) == (PARENT, SERVER, 0)
    assert {span.parent_id for span in found.values()} == {own.span_id}
    assert own.start_ns == found["queue"].start_ns
    for before, after in (("queue", "prefill"), ("prefill", "decode")):
        assert found[before].start_ns <= found[before].end_ns == found[after].start_ns
    assert found["decode"].end_ns <= own.end_ns
    assert abs(own.end_ns - time.time_ns()) < 60e9, "in the system's time"
    has = own.attributes
    assert has["gen_ai.usage.input_tokens"] == has["gen_ai.usage.prompt_tokens"] == 150
    assert has["gen_ai.usage.output_tokens"] == 4
    assert has["gen_ai.operation.name"] == "text_completion"
    assert has["gen_ai.response.model"] == "tiny"
    assert has["gen_ai.response.id"] == answer["id"]
    assert has["gen_ai.response.finish_reasons"] == ["length"]
    assert has["gen_ai.latency.time_to_first_token"] <= has["gen_ai.latency.e2e"]
    assert has["http.response.status_code"] == 200
    assert has["http.route"] == "/v1/completions"
    assert collector.resources[-1]["service.name"] == "mine"


def test_the_cache_report_is_among_the_attributes(traced, collector):
    answers = [ask(traced, digit * 32).json() for digit in "23"]
    details = answers[1]["usage"]["prompt_tokens_details"]
    has = collector.trace("3" * 32)["llm_request"].attributes
    assert has["milepost.cache.reused"] == details["cached_tokens"] > 0
    assert has["gen_ai.usage.cache_read.input_tokens"] == details["cached_tokens"]
    lost = {name.rpartition(".")[2]: num for name, num in has.items() if "cache.lost" in name}
    assert lost == details["lost_tokens"]


def test_a_request_that_is_refused_has_a_span(traced, collector):
    for trace_id, body, status in (
        ("4" * 32, {"prompt": "a", "max_tokens": -1}, 400),
        ("5" * 32, {"prompt": "a", "model": "other"}, 404),
    ):
        assert ask(traced, trace_id, body).status_code == status
        own = collector.trace(trace_id)["llm_request"]
        assert own.attributes["error.type"] == str(status)
        assert own.status == 0, "a client's mistake"


def test_a_trace_that_is_not_sampled_is_not_sent(traced, collector):
    ask(traced, "6" * 32, flags="00")
    ask(traced, "7" * 32)
    assert collector.trace("7" * 32)
    assert not [span for span in collector.spans if span.trace_id == "6" * 32]


def test_a_request_without_a_valid_parent_begins_a_trace(traced, collector):
    with traced.http() as http:
        before = len(collector.spans)
        body = {"prompt": [6, 7], "max_tokens": 1, "stream": True}
        http.post("/v1/completions", json=body, headers={"traceparent": "00-0-0-01"})
    until(lambda: any(span.name == "llm_request" for span in collector.spans[before:]))
    (own,) = [span for span in collector.spans[before:] if span.name == "llm_request"]
    assert own.parent_id == ""
    assert set(collector.trace(own.trace_id)) == {"llm_request", "queue", "prefill", "decode"}


def test_log_lines_name_the_span(traced, collector):
    ask(traced, "8" * 32)
    own = collector.trace("8" * 32)["llm_request"]
    until(lambda: any("8" * 32 in line for line in traced.log))
    (line,) = [json.loads(line) for line in traced.log if "8" * 32 in line]
    assert (line["logger"], line["span_id"]) == ("milepost.access", own.span_id)


def test_polls_have_no_spans(traced, collector):
    before = len(collector.spans)
    with traced.http() as http:
        http.get("/health", headers=traceparent("9" * 32))
        http.get("/metrics")
    ask(traced, "a" * 32)
    collector.trace("a" * 32)
    assert {span.trace_id for span in collector.spans[before:]} == {"a" * 32}


# --- a collector that is gone ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_without_a_collector_spans_are_dropped_and_nothing_waits(monkeypatch):
    monkeypatch.setattr(spans, "FLUSH_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and no more
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        found = tracing.open_tracing(url, "tiny")
        scope = {"method": "POST", "milepost.record": {}}
        for _ in range(5000):
            span = found.begin("POST", "/v1/completions", time.monotonic(), None)
            span.end(scope, 200)
        (processor,) = found._provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= 2048
        found.close()


# --- what comes from outside ----------------------------------------------------------------------

VALID = f"00-{'ab' * 16}-{PARENT}-01"


def test_a_traceparent_is_read():
    expected = TraceContext(trace_id="ab" * 16, span_id=PARENT, flags=1, state="a=1,b=2")
    headers = [(b"traceparent", VALID.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    assert read(headers) == expected
    assert expected.traceparent == VALID
    assert parsed(f"01-{'ab' * 16}-{PARENT}-01-more").trace_id == "ab" * 16, "of a later version"
    assert parsed(f"00-{'ab' * 16}-{PARENT}-ff").flags == 1, "of which only `sampled` is known"


@pytest.mark.parametrize(
    "value",
    [
        "",
        VALID.upper(),
        VALID + "-more",
        VALID + "\n",
        " " + VALID,
        VALID[:-1],
        VALID.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        VALID.replace("ab", "\u0664\u0664"),
        f"01-{'ab' * 16}-{PARENT}-01-" + "x" * 300,
    ],
)
def test_what_is_no_traceparent_is_ignored(value):
    assert parsed(value) is None


def test_more_than_one_traceparent_is_none():
    assert read([(b"traceparent", VALID.encode())] * 2) is None


def test_a_long_tracestate_is_dropped():
    found = read([(b"traceparent", VALID.encode()), (b"tracestate", b"a=" + b"1" * 600)])
    assert (found.trace_id, found.state) == ("ab" * 16, "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:4318", "use a URL such as http://localhost:4318/v1/traces"),
        ("grpc://localhost:4317", "use a URL"),
        ("http://localhost:4317", "at port 4317 collectors expect gRPC"),
        ("http://localhost:x", "otlp_traces_endpoint='http://localhost:x'"),
    ],
)
def test_an_endpoint_that_gets_no_traces_is_refused(url, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(otlp_traces_endpoint=url)


def test_a_collectors_address_gets_the_path():
    assert tracing.read_endpoint("http://a:4318") == "http://a:4318/v1/traces"
    assert tracing.read_endpoint("https://a/otlp/v1/traces") == "https://a/otlp/v1/traces"


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "milepost.server.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        tracing.open_tracing("http://a:4318", "tiny")


def test_without_an_endpoint_no_library_is_imported():
    script = (
        "import sys; from milepost.server import app, tracing; tracing.open_tracing(None, 'm');"
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], env=os.environ).returncode == 0
