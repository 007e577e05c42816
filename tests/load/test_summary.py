from milepost.load.client import RequestResult
from milepost.load.drive import percentiles, summarize

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 60},
}


def result(start=0.0, **changes):
    options = {"first": start + 0.1, "end": start + 0.5, "finish_reason": "length"}
    arrivals = [start + 0.1, start + 0.2, start + 0.5]
    return RequestResult(start=start, arrivals=arrivals, usage=USAGE, **(options | changes))


def test_percentiles():
    assert percentiles([]) is None
    found = percentiles([i / 1000 for i in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0}


def test_sums_and_latencies():
    row = summarize([result(), result(1.0), result(2.0, error="500: no")], 2.0)
    assert (row["requests"], row["failed"], row["errors"]) == (3, 1, ["500: no"])
    assert (row["hit_rate"], row["cached_tokens"], row["prompt_tokens"]) == (0.6, 120, 200)
    assert row["output_tokens_per_s"] == 3.0
    assert row["ttft_ms"]["p50"] == 100.0
    assert row["tpot_ms"]["p50"] == 200.0
    assert row["itl_ms"]["p99"] == 300.0
    assert row["e2e_ms"]["mean"] == 500.0


def test_an_answer_without_an_end_is_a_failure():
    assert summarize([result(finish_reason=None)], 1.0)["failed"] == 1


def test_a_server_that_reports_no_cache():
    row = summarize([result()], 1.0)
    assert row["hit_rate"] == 0.6
    bare = RequestResult(
        start=0, first=0.1, end=0.2, finish_reason="stop", usage={"prompt_tokens": 5}
    )
    row = summarize([bare], 1.0)
    assert (row["hit_rate"], row["cached_tokens"], row["prompt_tokens"]) == (None, None, 5)
    assert row["completion_tokens"] is row["output_tokens_per_s"] is None
