"""What waiting requests are due, what of a prompt is seen, and what a chain holds."""

from __future__ import annotations

from array import array

import pytest

from milepost.cache import Cache, Chain, Kind
from milepost.cache.tree import checkpoint_key
from tests.invariants import check

PAGE_SIZE = 16
NUM_SIBLINGS = 40


def run(cache, tokens, kind=None):
    """Admit and compute a prompt in one step, and release it."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    cache.release(allocation, kind)
    check(cache)


def test_a_state_is_due_when_the_first_that_waits_for_it_is():
    """Whoever asked first: an urgent request that comes later stands before it in the queue."""
    cache = Cache(num_pages=12, num_slots=40, page_size=PAGE_SIZE)
    for seed in (1, 2, 3):
        run(cache, [seed] * 64, Kind.ANSWER_END)
    for num_ahead, seed in ((4, 1), (3, 2), (1, 3)):
        cache.expect(cache.chain([*[seed] * 64, 0]), num_ahead)
    cache.expect(cache.chain([*[1] * 64, 0]), 0)
    gone = cache.expect(cache.chain([*[2] * 64, 0]), 0)
    cache.forget(gone)
    run(cache, [4] * 64)
    kept = [cache.match(cache.chain([*[seed] * 64, 0])).state_length for seed in (1, 2, 3)]
    assert kept == [64, 0, 64], "nobody waits any more for the second but who came last"


def test_a_state_that_gives_way_to_the_request_itself_counts_as_evicted():
    """Not as one that was never kept."""
    cache = Cache(num_pages=8, num_slots=4, page_size=PAGE_SIZE, grid=PAGE_SIZE)
    run(cache, [1] * 64, Kind.ANSWER_END)
    chain = cache.chain([1] * 100)
    assert cache.match(chain).state_length == 64
    cold = cache.match(chain, limit=0).report
    assert cold.lost == {"checkpoint_evicted": 64, "unseen": 36}


def test_tokens_shared_with_any_sibling_inside_a_page_were_seen():
    """With the oldest of many too, however they end."""
    cache = Cache(num_pages=200, num_slots=4, page_size=PAGE_SIZE, grid=PAGE_SIZE)
    siblings = [[*[9] * 16, *[seed] * 12, *[7] * 6] for seed in range(NUM_SIBLINGS)]
    for prompt in siblings:
        run(cache, prompt)
    for prompt in siblings:
        report = cache.match(cache.chain([*prompt[:26], *[77] * 10])).report
        assert report.prompt_tokens - report.lost["unseen"] == 26
    assert not cache.match(cache.chain([*[9] * 16, *[99] * 16])).report.lost.get("grid")


@pytest.mark.parametrize("left", [0, 5, NUM_SIBLINGS - 1])
def test_a_fork_forgets_children_that_go(left):
    cache = Cache(num_pages=NUM_SIBLINGS + 2, num_slots=4, page_size=PAGE_SIZE)
    siblings = [[*[9] * 16, *[seed] * 16] for seed in range(NUM_SIBLINGS)]
    for prompt in siblings:
        run(cache, prompt)
    run(cache, siblings[left])
    for seed in range(100, 110):
        run(cache, [seed] * 16 * 10)
    cache.reset()
    run(cache, siblings[left])
    node = cache.match(cache.chain(siblings[left])).path.nodes[0]
    assert [child.content for child in node.children] == [array("I", siblings[left][16:]).tobytes()]
    assert node.last_child is node.children[0]


@pytest.mark.parametrize("typecode", ["I", "i", "q", "L", "H"])
def test_a_chain_holds_tokens_of_its_own(typecode):
    tokens = array(typecode, range(40))
    chain = Chain(tokens, PAGE_SIZE, salt="a")
    same = Chain(list(tokens), PAGE_SIZE, salt="a")
    assert chain.full_digests() == same.full_digests()
    assert chain.token_bytes(16, 40) == array("I", range(16, 40)).tobytes()
    tokens[0] = 7
    chain.extend((3,))
    assert chain.tokens.tolist() == [*range(40), 3]
    assert len(tokens) == 40


def test_a_chain_refuses_what_is_no_token():
    for tokens in (array("q", [-1]), array("q", [2**32]), [2**32]):
        with pytest.raises(OverflowError):
            Chain(tokens, PAGE_SIZE)


def test_a_short_prefix_that_others_share_gets_a_state_at_its_very_end():
    """Off the grid, which would round off a third of it."""
    cache = Cache(num_pages=20, num_slots=8, page_size=PAGE_SIZE)
    run(cache, [*[1] * 100, *[2] * 40])
    chain = cache.chain([*[1] * 100, *[3] * 40])
    match = cache.match(chain)
    assert (match.state_length, match.branch_points) == (0, (64, 100))
    allocation = cache.admit(chain, match)
    positions = [export.position for export in cache.take_exports(allocation, len(chain))]
    assert positions == [64, 100, 128]


def test_kv_that_is_shared_is_not_written_again():
    """Where it goes on behind the state that a request resumes from."""
    cache = Cache(num_pages=20, num_slots=8, page_size=PAGE_SIZE)
    run(cache, [*[1] * 100, *[2] * 60])
    allocation = cache.admit(chain := cache.chain([*[1] * 100, *[2] * 30, 3]), cache.match(chain))
    assert (allocation.committed, allocation.write_from) == (128, 128)
    allocation = cache.admit(chain := cache.chain([*[1] * 100, *[2] * 20, 3]), cache.match(chain))
    assert (allocation.committed, allocation.write_from) == (0, 112)


def test_keys_are_the_same_in_every_process():
    """Written down once: files, events and other engines name pages and states by them."""
    chain = Chain(range(40), 16, salt="tenant", identity=bytes(range(16)))
    assert chain.root.hex() == "c0bd5a34e046e2bc72abde39693501a2"
    assert [digest.hex() for digest in chain.full_digests()] == [
        "ed2e3da82d71252df425f9424fc64f3e",
        "5f245a3d94906cd3dc80452ff8f2714f",
    ]
    inside = checkpoint_key(chain.digests(2)[1], chain.token_bytes(32, 40))
    assert inside.hex() == "e57340ebdf9bbe4a60bb0f5f66b26211"
    assert checkpoint_key(chain.digests(2)[1], b"") == chain.digests(2)[1]


def test_two_models_share_no_key():
    one, other = (Cache(num_pages=4, num_slots=2, identity=bytes([n] * 16)) for n in (1, 2))
    tokens = range(200)
    assert one.chain(tokens).full_digests() != other.chain(tokens).full_digests()
