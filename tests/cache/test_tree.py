"""The walk along a prompt finds what hashing all its pages finds, and learns the same digests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from milepost.cache.tree import Chain, Node, Outbox, Tree
from milepost.cache.tree.path import Path

PAGE = 2

prompts = st.lists(st.integers(0, 1), max_size=12)
"""Of two tokens, so that they part and meet at many places."""
salts = st.sampled_from(["", "a"])


def walk(tree: Tree, chain: Chain) -> list[Node]:
    end = tree.deepest(chain)
    return [] if end is None else list(end.ancestors())[-2::-1]


class Planted:
    """A tree that grows and loses leaves; pages are numbered as they come."""

    def __init__(self) -> None:
        self.tree = Tree(max_history=8, outbox=Outbox(PAGE, needs_states=True))
        self.num_pages = 0

    def plant(self, chain: Chain) -> None:
        path = walk(self.tree, chain)
        num_new = len(chain) // PAGE - len(path)
        if not num_new:
            return
        parent = path[-1] if path else self.tree.root(chain)
        self.tree.insert(chain, parent, range(self.num_pages, self.num_pages + num_new))
        self.num_pages += num_new

    def cut(self, chain: Chain) -> None:
        """Take out the deepest node of a path, if nothing hangs on it."""
        path = walk(self.tree, chain)
        if path and not path[-1].children:
            self.tree.remove(path[-1:])


def by_digest(tree: Tree, chain: Chain) -> list[Node]:
    found = [tree.nodes.get(digest) for digest in chain.full_digests()]
    return found[: found.index(None)] if None in found else found


def num_known(chain: Chain, depth: int, *places) -> int:
    """Found one page after the other."""
    digests = chain.full_digests()
    while depth < len(digests) and any(digests[depth] in place for place in places):
        depth += 1
    return depth


@given(st.lists(st.tuples(st.booleans(), prompts, salts), max_size=20))
def test_walk(events):
    planted = Planted()
    for is_cut, prompt, salt in events:
        fresh, walked, again = (Chain(prompt, PAGE, salt) for _ in range(3))
        expected = by_digest(planted.tree, fresh)
        again.full_digests()
        assert walk(planted.tree, walked) == expected == walk(planted.tree, again)
        assert walked.full_digests() == fresh.full_digests() == again.full_digests()
        tree, depth = planted.tree, len(expected)
        num_seen = num_known(fresh, depth, tree.nodes, tree._history)
        assert tree.num_seen(fresh, depth) == num_seen
        (planted.cut if is_cut else planted.plant)(Chain(prompt, PAGE, salt))


@given(
    st.sets(st.lists(st.integers(0, 1), max_size=5).map(tuple), max_size=30),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
    st.integers(0, 10),
)
def test_the_deepest_checkpoint_inside_a_page(tails, prompt, limit):
    """Whether a page has fewer checkpoints than tokens or more: these are looked up differently."""
    node = Node(b"", 0, None, b"")
    node.checkpoints = {Chain(tail, 6).content(0, len(tail)): tail for tail in tails}
    matching = [t for t in tails if len(t) <= limit and t == tuple(prompt[: len(t)])]
    found = Path(Chain(prompt, 6), node).deepest_on(node, limit)
    assert found == max(matching, key=len, default=None)
