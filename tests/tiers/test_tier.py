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


def evicted(tier, num_pages, num_states, keep):
    """Keys of what went for so much room, which was to be had."""
    gone = []
    assert tier.make_room(num_pages, num_states, keep, gone)
    return [item.key for item in gone]


def test_a_state_that_a_deeper_one_has_superseded_goes_first():
    tier = filled()
    tier.touch(tier.get("state", b"A2"))
    assert evicted(tier, 0, 1, ROOT) == [b"A2"]
    tier.touch(tier.get("state", b"B1"))
    assert evicted(tier, 0, 3, ROOT) == [b"A4", b"B1"]


def test_a_state_above_a_fork_is_not_superseded():
    tier = Tier(num_pages=10, num_states=4)
    put(tier, "page", b"a1", ROOT, 16)
    put(tier, "state", b"A1", b"a1", 16)
    put(tier, "page", b"x", b"a1", 32)
    put(tier, "page", b"y", b"a1", 32)
    put(tier, "state", b"X", b"x", 32)
    tier.touch(tier.get("state", b"A1"))
    assert evicted(tier, 0, 3, ROOT) == [b"X"]


def test_a_state_at_which_something_parts_later_is_no_longer_superseded():
    tier = filled()
    put(tier, "page", b"c3", b"a2", 48)
    assert evicted(tier, 0, 1, ROOT) == [b"B1"], "used longest ago"


def test_no_page_goes_before_what_hangs_on_it():
    tier = filled(num_pages=5)
    assert evicted(tier, 1, 0, b"a4") == [b"A2", b"B1", b"b1"]
    assert evicted(tier, 2, 0, ROOT) == [b"A4", b"a4"]
    assert evicted(tier, 3, 0, ROOT) == [b"a3"]


def test_what_is_pinned_or_is_to_be_hung_on_stays():
    tier = filled(num_pages=5, num_states=3)
    state = tier.get("state", b"B1")
    tier.pin((state,))
    assert evicted(tier, 0, 2, ROOT) == [b"A2", b"A4"]
    assert not tier.make_room(0, 3, ROOT, [])
    gone = []
    assert not tier.make_room(3, 0, b"a2", gone)
    assert [item.key for item in gone] == [b"a4", b"a3"], "who deletes files has to know"
    assert tier.get("page", b"a2") is not None
    tier.unpin((state,))
    assert not tier.make_room(0, 4, ROOT, []), "more than there are places"
    assert tier.get("state", b"B1") is not None, "and nothing goes for it"


def test_a_state_goes_with_its_tail():
    tier = Tier(num_pages=2, num_states=1)
    put(tier, "tail", b"S", ROOT, 5)
    put(tier, "state", b"S", ROOT, 5)
    tail = tier.get("tail", b"S")
    tier.pin((tail,))
    assert not tier.make_room(0, 1, ROOT, []), "somebody reads its tail"
    tier.unpin((tail,))
    gone = []
    assert tier.make_room(0, 1, ROOT, gone)
    assert [item.what for item in gone] == ["state", "tail"]
    assert [budget.num_used for budget in tier.budgets.values()] == [0, 0]


def test_a_tail_whose_state_is_gone_makes_room():
    """An engine that was killed between the two leaves one, and a state may be damaged."""
    tier = Tier(num_pages=2, num_states=1)
    put(tier, "tail", b"S", ROOT, 5)
    assert evicted(tier, 2, 0, ROOT) == [b"S"]
    put(tier, "state", b"S", ROOT, 5)
    put(tier, "tail", b"S", ROOT, 5)
    tier.remove(tier.get("state", b"S"))
    assert evicted(tier, 2, 0, ROOT) == [b"S"]


def test_pages_that_nothing_hangs_on_go_in_the_order_of_their_use():
    """As all do in a model without states in slots."""
    tier = Tier(num_pages=3, num_states=0)
    for key in (b"x", b"y", b"z"):
        put(tier, "page", key, ROOT, 16)
    tier.touch(tier.get("page", b"x"))
    assert evicted(tier, 2, 0, ROOT) == [b"y", b"z"]


class Position(int):
    """Counts how often one is compared."""

    num_compared = 0

    def __lt__(self, other):
        Position.num_compared += 1
        return int(self) < other


def test_states_that_hang_on_one_page_are_not_gone_through_with_each_that_comes():
    """The first turns of all chats that share a system prompt end within one page."""
    tier = Tier(num_pages=200, num_states=400)
    for index in range(400):
        put(tier, "state", f"s{index}".encode(), ROOT, Position(1 + index % 15))
    assert Position.num_compared < 10
    state = tier.get("state", b"s0")
    moved, tier._reorder = [], lambda *args: moved.append(args)
    for index in range(200):
        put(tier, "page", f"p{index}".encode(), ROOT, 16)
    assert not moved, "that something parts there was seen when the third came"
    assert tier.get("state", b"s0") is state


def test_a_state_is_no_longer_superseded_once_anything_else_parts_there():
    tier = filled(num_states=4)
    put(tier, "state", b"other", b"a2", 40)
    assert evicted(tier, 0, 1, ROOT) == [b"B1"], "used longest ago"
