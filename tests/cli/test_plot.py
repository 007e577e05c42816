"""Lines of a plot are told apart by what differs between them."""

from types import SimpleNamespace

from milepost.cli.simulate_results import _lines


class Axes:
    """Keeps what is drawn."""

    def __init__(self):
        self.drawn = []

    def plot(self, xs, _ys, *, color, linestyle, label, **_options):
        self.drawn.append((label, color, linestyle, xs))

    def ignore(self, *arguments, **keywords):
        pass

    set_xscale = set_xticks = set_xlabel = set_ylabel = ignore


def test_a_fleet_has_a_colour_for_each_routing_and_a_style_for_each_size():
    rows = [
        SimpleNamespace(policy="auto", routing=routing, gib=gib, engines=engines, hit_rate=0.5)
        for gib in (4.0, 8.0)
        for routing in ("session", "events")
        for engines in (4, 2)
    ]
    axes = Axes()
    _lines(axes, rows, "hits", lambda row: row.hit_rate)
    assert axes.drawn == [
        ("session, 4 GiB", "C0", "-", [2, 4]),
        ("events, 4 GiB", "C1", "-", [2, 4]),
        ("session, 8 GiB", "C0", "--", [2, 4]),
        ("events, 8 GiB", "C1", "--", [2, 4]),
    ]


def test_what_all_lines_share_is_not_in_their_names():
    rows = [
        SimpleNamespace(policy=policy, routing="events", gib=4.0, engines=2, hit_rate=0.5)
        for policy in ("auto", "marks")
    ]
    axes = Axes()
    _lines(axes, rows, "hits", lambda row: row.hit_rate)
    assert [label for label, *_ in axes.drawn] == ["auto", "marks"]
    axes = Axes()
    _lines(axes, rows[:1], "hits", lambda row: row.hit_rate)
    assert [label for label, *_ in axes.drawn] == ["auto"]
