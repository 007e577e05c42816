"""What goes first from a tier that is full, and what stays."""

from milepost.tiers.tier import Tier

ROOT = b"root"


def filled(num_pages=10, num_states=3):
    """A path of four pages with states behind the second and the fourth, used before another path
    of one page with a state."""
    tier = Tier(num_pages=num_pages, num_states=num_states)
    put(tier, "page", b"a1", ROOT, 16)
    put(tier, "page", b"a2", b"a1", 32)
    put(tier, "state", b"A2", b"a2", 32)
    put(tier, "page", b"b1", ROOT, 16)
    put(tier, "state", b"B1", b"b1", 16)
    put(tier, "page", b"a3", b"a2", 48)
    put(tier, "page", b"a4", b"a3", 64)
    put(tier, "state", b"A4", b"a4", 64)
    return tier


def put(tier, what, key, parent, position):
    tier.fill(tier.add(what, key, parent, b"", position))


def gone(items):
    return None if items is None else [item.key for item in items]


def test_a_state_that_a_deeper_one_has_superseded_goes_first():
    tier = filled()
    tier.touch(tier.get("state", b"A2"))
    assert gone(tier.make_room(0, 1, ROOT)) == [b"A2"]
    tier.touch(tier.get("state", b"B1"))
    assert gone(tier.make_room(0, 3, ROOT)) == [b"A4", b"B1"]


def test_a_state_above_a_fork_is_not_superseded():
    tier = Tier(num_pages=10, num_states=4)
    put(tier, "page", b"a1", ROOT, 16)
    put(tier, "state", b"A1", b"a1", 16)
    put(tier, "page", b"x", b"a1", 32)
    put(tier, "page", b"y", b"a1", 32)
    put(tier, "state", b"X", b"x", 32)
    tier.touch(tier.get("state", b"A1"))
    assert gone(tier.make_room(0, 3, ROOT)) == [b"X"]


def test_a_state_at_which_something_parts_later_is_no_longer_superseded():
    tier = filled()
    put(tier, "page", b"c3", b"a2", 48)
    assert gone(tier.make_room(0, 1, ROOT)) == [b"B1"], "used longest ago"


def test_no_page_goes_before_what_hangs_on_it():
    tier = filled(num_pages=5)
    assert gone(tier.make_room(1, 0, b"a4")) == [b"A2", b"B1", b"b1"]
    assert gone(tier.make_room(2, 0, ROOT)) == [b"A4", b"a4"]
    assert gone(tier.make_room(3, 0, ROOT)) == [b"a3"]


def test_what_is_pinned_or_is_to_be_hung_on_stays():
    tier = filled(num_pages=5, num_states=3)
    state = tier.get("state", b"B1")
    tier.pin((state,))
    assert gone(tier.make_room(0, 2, ROOT)) == [b"A2", b"A4"]
    assert tier.make_room(0, 3, ROOT) is None
    assert gone(tier.make_room(3, 0, b"a2")) == [b"a4", b"a3"] or tier.get("page", b"a2")
    assert tier.get("page", b"a2") is not None
    tier.unpin((state,))
    assert tier.make_room(0, 4, ROOT) is None, "more than there are places"
    assert tier.get("state", b"B1") is not None, "and nothing goes for it"


def test_a_state_goes_with_its_tail():
    tier = Tier(num_pages=2, num_states=1)
    put(tier, "tail", b"S", ROOT, 5)
    put(tier, "state", b"S", ROOT, 5)
    tail = tier.get("tail", b"S")
    tier.pin((tail,))
    assert tier.make_room(0, 1, ROOT) is None, "somebody reads its tail"
    tier.unpin((tail,))
    assert sorted(item.what for item in tier.make_room(0, 1, ROOT)) == ["state", "tail"]
    assert [budget.num_used for budget in tier.budgets.values()] == [0, 0]
