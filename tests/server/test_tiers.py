"""A server that is ended, or killed, leaves to the next one what it has written."""

from __future__ import annotations

import os
import re
import signal

from tests.server.collector import collecting
from tests.server.conftest import get, serving
from tests.waiting import until


def ask(server, messages):
    with server.client() as client:
        return client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0
        )


def said(text):
    return [{"role": "user", "content": text}]


def details(answer):
    return answer.usage.prompt_tokens_details.model_dump()


def num_files(folder):
    return sum(path.is_file() for path in folder.rglob("*.*"))


def num_on_disk(server):
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    items = [line for line in lines if line.startswith("milepost:tier_items{")]
    (line,) = (line for line in items if 'tier="disk"' in line)
    return float(line.rsplit(" ", 1)[1])


def spans_of(collector):
    """The spans of the one request so far: queue, load and prefill follow each other."""
    until(lambda: any(span.name == "llm_request" for span in collector.spans))
    found = {span.name: span for span in collector.spans}
    assert found["queue"].end_ns == found["load"].start_ns
    assert found["load"].end_ns == found["prefill"].start_ns
    return collector.spans


def vllms_hits(server):
    text = get(f"{server.url}/metrics").text
    (line,) = re.findall(r"(?m)^vllm:prefix_cache_hits_total\S* (\S+)$", text)
    return float(line)


def test_what_was_written_outlives_the_server(folder, tmp_path):
    flags = ("--cache-dir", str(tmp_path / "kept"), "--cache-host-gib", "0.05")
    fox, weather = said("the quick brown fox " * 40), said("what is the weather like " * 40)
    with serving(folder, *flags) as server:
        before = ask(server, fox)
        assert "loaded_tokens" not in details(before)
    num_kept = num_files(tmp_path)
    assert num_kept > 3, "who is told to end writes first what is ready"
    with (
        collecting() as collector,
        serving(folder, *flags, "--otlp-traces-endpoint", collector.url) as server,
    ):
        assert num_on_disk(server) == num_kept
        after = ask(server, fox)
        loads = [span for span in spans_of(collector) if span.name == "load"]
        num_loaded = details(after)["cached_tokens"]
        assert [span.attributes["milepost.cache.loaded.disk"] for span in loads] == [num_loaded]
        assert details(after)["loaded_tokens"] == {"disk": num_loaded}
        assert after.choices[0].message.content == before.choices[0].message.content
        assert server.metric("external_prefix_cache_hits_total") == num_loaded
        assert server.metric("external_prefix_cache_queries_total") == after.usage.prompt_tokens
        assert server.metric("prefix_cache_hits_total") == num_loaded
        assert server.metric("prefix_cache_local_hits_total") == 0
        assert vllms_hits(server) == 0, "what a connector brings counts apart"
        before = ask(server, weather)
        until(lambda: server.metric("tier_written_items_total") >= 4)
        for pid in (server.process.pid, server.engine_pid):
            os.kill(pid, signal.SIGKILL)
        until(lambda: server.process.poll() is not None)
    num_kept = num_files(tmp_path)
    with serving(folder, *flags) as server:
        assert num_on_disk(server) >= 0.95 * num_kept
        after = ask(server, weather)
        assert details(after)["loaded_tokens"] == {"disk": details(after)["cached_tokens"]}
        assert after.choices[0].message.content == before.choices[0].message.content
