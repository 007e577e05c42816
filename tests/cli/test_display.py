import io
from itertools import count

import pytest
from rich.console import Console

from milepost.cli.display import Screen, ending, seconds, snippet
from milepost.engine.outputs import CacheReport, CompletionOutput, RequestOutput
from milepost.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0.0004, "0 ms"), (0.42, "420 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"), (340.2, "340 s")],
)
def test_seconds_have_digits_that_mean_something(duration, text):
    assert seconds(duration) == text


def test_snippet_is_one_short_line():
    assert snippet("a\n  b\tc") == "a b c"
    assert len(snippet("word " * 1000)) == 48
    assert snippet("x" * 49).endswith("x…")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"finish_reason": "stop"}, "complete"),
        ({"finish_reason": "stop", "stop_reason": "END"}, "ended by the stop string 'END'"),
        ({"finish_reason": "stop", "stop_reason": 7}, "ended by token 7"),
        ({"finish_reason": "length", "token_ids": [1, 2]}, "cut off by --max-tokens 2"),
        ({"finish_reason": "length"}, "cut off by --max-model-len"),
        ({"finish_reason": "abort"}, "aborted"),
    ],
)
def test_endings_have_words(answer, text):
    answer = CompletionOutput(**{"index": 0, "text": "", "token_ids": [1], **answer})
    assert ending(answer, SamplingParams(max_tokens=2)) == text


@pytest.mark.parametrize(
    ("drafts", "line"), [((0, 0), None), ((8, 6), "6 of 8 drafted tokens accepted (75%)")]
)
def test_a_report_says_how_many_drafts_were_accepted(drafts, line):
    verified, accepted = drafts
    answer = CompletionOutput(
        index=0,
        text="a",
        token_ids=[1],
        finish_reason="stop",
        num_draft_tokens=verified,
        num_accepted_tokens=accepted,
    )
    output = RequestOutput(
        request_id="0", prompt="p", prompt_token_ids=[1], outputs=[answer], finished=True
    )
    reports, ticks = io.StringIO(), count()
    screen = Screen(answers=io.StringIO(), reports=Console(file=reports), clock=lambda: next(ticks))
    screen.show("p", [output], SamplingParams())
    assert ("drafted" in reports.getvalue()) is (line is not None)
    assert line is None or line in reports.getvalue()


def test_a_report_says_what_came_from_host_memory_and_from_disk():
    def answered(loaded):
        report = CacheReport(
            prompt_tokens=100, reused=90, kv_length=90, state_length=90,
            lost={"unseen": 10}, loaded=loaded,
        )  # fmt: skip
        return RequestOutput(
            request_id="0", prompt="p", prompt_token_ids=[1] * 100,
            outputs=[CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="stop")],
            finished=True, num_cached_tokens=90, cache_report=report,
        )  # fmt: skip

    reports, ticks = io.StringIO(), count()
    console = Console(file=reports, width=200)
    screen = Screen(answers=io.StringIO(), reports=console, clock=lambda: next(ticks))
    shown = [
        screen.show("p", [answered(loaded)], SamplingParams())
        for loaded in ({}, {"host": 64, "disk": 16}, {"host": 6})
    ]
    screen.summary(shown)
    lines = reports.getvalue()
    assert lines.count("90 of 100 prompt tokens from the cache;") == 1
    assert "90 of 100 prompt tokens from the cache (64 from host memory, 16 from disk);" in lines
    assert "(90%) came from the cache, 70 from host memory, 16 from disk" in lines
