import dataclasses

import pytest

from milepost.cache import Cache
from milepost.errors import TraceError
from milepost.pictures import Picture
from milepost.scheduler.plans import SequencePlan, StepPlan
from milepost.simulator import read_trace
from milepost.simulator.cost import SHIPPED, read_cost, shipped_costs
from milepost.simulator.results import MemoryGib, percentile, run_row
from tests.simulator.traces import DATA, Maker, one_engine

COST = read_cost("hybrid-35b-a3b-h200")


def run(trace, *, closed=False, num_pages=2000, num_slots=32, **options):
    cache = Cache(num_pages=num_pages, num_slots=num_slots, page_size=trace.page_size)
    return one_engine(trace, cache, COST, closed=closed, **options).run()


def decodes(count, start):
    """A step of `count` decodes, each behind `start` tokens."""
    one = SequencePlan(
        number=0,
        start=start,
        num_tokens=1,
        tokens=b"",
        new_pages=(),
        write_from=start,
        slot_in=1,
        slot_out=1,
        samples=True,
    )
    return StepPlan(sequences=(one,) * count)


def test_a_decode_costs_what_it_reads():
    """Its own step, its sequences, and the KV before each of them."""
    short, long = (decodes(3, start) for start in (0, 100_000))
    assert COST.step_time_s(short) == pytest.approx(COST.decode_step_s + 3 * COST.decode_seq_s)
    extra = COST.step_time_s(long) - COST.step_time_s(short)
    assert extra == pytest.approx(300_000 * COST.decode_context_s)
    # At about what an H200 can read.
    assert 3e12 < COST.page_token_bytes / COST.decode_context_s < 4.8e12


def test_a_first_token_takes_one_prefill_step():
    maker = Maker()
    maker.ask(maker.pages(4), arrival_s=3.0)
    done = run(maker.trace())
    tokens = 257
    expected = COST.step_s + tokens * COST.prefill_token_s + tokens**2 / 2 * COST.attention_pair_s
    assert done.ttft_s == [pytest.approx(expected)]
    assert done.end_s == pytest.approx(3.0 + expected)


def shown(offset, num_tokens, name):
    return Picture(
        identity=name.encode() * 16,
        offset=offset,
        num_tokens=num_tokens,
        grid=(1, 1, num_tokens),
        num_positions=num_tokens,
    )


def test_pictures_take_the_time_of_the_encoder_and_hits_save_it():
    """Beside nobody's tokens a picture is encoded at once; a prompt that goes on behind it needs
    no encoder, one with another picture does."""
    maker = Maker()
    first = maker.pages(40)
    pictures = (shown(100, 2040, "a"),)
    maker.ask(first, pictures=pictures)
    maker.ask([*first, *maker.pages(2)], pictures=pictures)
    other = maker.pages(40)
    maker.ask([*other, *maker.pages(2)], pictures=(shown(100, 2040, "b"),))
    plain = [dataclasses.replace(each, pictures=()) for each in maker.requests]
    found = run(maker.trace())
    without = Maker()
    without.requests, without.num_ids = plain, maker.num_ids
    expected = 2040 * COST.encoder_token_s + 2040**2 * COST.encoder_pair_s
    assert expected == pytest.approx(0.0388, rel=0.01)
    more = [own - text for own, text in zip(found.ttft_s, run(without.trace()).ttft_s, strict=True)]
    assert more == [pytest.approx(expected), pytest.approx(0.0), pytest.approx(expected)]


def test_each_further_token_takes_one_decode_step():
    maker = Maker()
    maker.ask(maker.pages(4), output_length=11)
    done = run(maker.trace())
    steps_s = 10 * (COST.decode_step_s + COST.decode_seq_s)
    context_s = sum(257 + step for step in range(10)) * COST.decode_context_s
    assert done.end_s == pytest.approx(done.ttft_s[0] + steps_s + context_s)


def test_a_closed_session_thinks_after_its_answer():
    maker = Maker()
    pages = maker.pages(4)
    maker.ask(pages, session="a", output_length=100)
    maker.ask(pages + maker.pages(4), session="a", think_s=5.0, arrival_s=0.0)
    maker.ask(pages + maker.pages(4), session="a", arrival_s=7.0)
    closed, recorded = run(maker.trace(), closed=True), run(maker.trace())
    assert closed.end_s > 12 > recorded.end_s


def test_a_request_that_never_fits_is_refused_and_its_session_goes_on():
    maker = Maker()
    maker.ask(maker.pages(40), session="a")
    maker.ask(maker.pages(4), session="a", think_s=1.0)
    done = run(maker.trace(), closed=True, num_pages=20)
    assert (done.num_refused, len(done.ttft_s)) == (1, 1)


def test_the_state_at_an_answers_end_is_used_by_the_next_turn():
    trace = read_trace(DATA / "agent-excerpt.jsonl.gz")
    unseen = run(trace, closed=True, num_pages=20_000).only.cache.stats
    trace.link_answers()
    seen = run(trace, closed=True, num_pages=20_000).only.cache.stats
    assert seen.hits > unseen.hits
    assert seen.queries == unseen.queries == trace.input_tokens


def test_a_row_adds_up():
    trace = read_trace(DATA / "agent-excerpt.jsonl.gz")
    sizes = {"num_pages": 3000, "num_slots": 8}
    memory = MemoryGib(device=4.0)
    row = run_row(trace, "auto", run(trace, **sizes), trace.bound(), **sizes, memory=memory)
    assert row.hits + sum(row.lost.values()) == row.queries
    assert row.ttft_p50_s <= row.ttft_p90_s <= row.ttft_p99_s
    assert row.prefill_tokens >= row.queries - row.hits


def test_percentile_is_a_value_that_occurred():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([], 0.5) is None


def test_shipped_costs_are_whole():
    assert shipped_costs() == ["hybrid-35b-a3b-h200", "qwen3-next-80b-h200"]
    assert all(read_cost(name).step_s > 0 for name in shipped_costs())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step_s = 1", "missing or unknown: .*attention_pair_s"),
        ("step_s =", "cost model"),
        ("{}", "cost model"),
    ],
)
def test_a_bad_cost_model_is_refused(tmp_path, text, message):
    path = tmp_path / "cost.toml"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_cost(str(path))


@pytest.mark.parametrize("size", ["0", "nan", "1e300", "'a'"])
def test_a_size_that_no_state_has_is_refused(tmp_path, size):
    text = (SHIPPED / "hybrid-35b-a3b-h200.toml").read_text()
    path = tmp_path / "cost.toml"
    path.write_text(text.replace("state_bytes = 64389120", f"state_bytes = {size}"))
    with pytest.raises(TraceError, match=r"state_bytes=.* is not a number from 1 up"):
        read_cost(str(path))


def test_a_missing_cost_model_names_those_there_are():
    with pytest.raises(TraceError, match="qwen3-next-80b-h200"):
        read_cost("nowhere")


def test_costs_in_json_are_read(tmp_path):
    import json

    path = tmp_path / "cost.json"
    path.write_text(json.dumps(dataclasses.asdict(COST)))
    assert read_cost(str(path)) == COST
