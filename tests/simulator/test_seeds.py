from milepost.simulator import read_trace
from milepost.simulator.seeds import reseeded
from tests.simulator.traces import DATA, Maker


def test_sessions_exchange_their_starts_and_keep_their_own_times():
    trace = read_trace(DATA / "agent-excerpt.jsonl.gz")
    moved = reseeded(trace, 1)
    assert reseeded(trace, 0) is trace
    for session in {r.session for r in trace.requests}:
        before = [r.arrival_s for r in trace.requests if r.session == session]
        after = [r.arrival_s for r in moved.requests if r.session == session]
        gaps = [round(b - a, 6) for a, b in zip(before, after, strict=True)]
        assert len(set(gaps)) == 1
    starts = [r.arrival_s for r in moved.requests]
    assert starts == sorted(starts)


def test_without_sessions_requests_keep_their_order():
    maker = Maker()
    for arrival_s in (0.0, 1.0, 5.0, 20.0, 21.0):
        maker.ask(maker.pages(2), arrival_s=arrival_s)
    trace = maker.trace()
    moved = reseeded(trace, 3)
    assert [r.page_ids for r in moved.requests] == [r.page_ids for r in trace.requests]
    assert moved.requests[-1].arrival_s == 21.0
    assert [r.arrival_s for r in moved.requests] != [r.arrival_s for r in trace.requests]
