"""The prefix tree: nodes, found by their chained digests, and the history of evicted keys.

Knows nothing of pools: callers keep the reference counts up to date. The tree itself records every
change that affects eviction, and the events in the outbox. Every walk is a loop, since
a path may be 100,000 nodes deep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from milepost.cache.plans import PageMove
from milepost.cache.tree.chain import Chain
from milepost.cache.tree.links import follow, link, unlink
from milepost.cache.tree.nodes import NO_CHECKPOINTS, Checkpoint, End, Node
from milepost.cache.tree.outbox import Outbox

MAX_ANSWERS = 256


class Tree:
    """Nodes by digest and page, checkpoints by slot and tail page, roots by salt, and up to
    `max_history` evicted keys.

    `leaves` are the nodes without children, by page. `changed_nodes` have won or lost their only
    child or a checkpoint. `changed_checkpoints` were added, removed or used, or their links have
    changed, or their tail page has become a node's or ceased to be one. Their reader empties both.
    """

    def __init__(self, max_history: int, outbox: Outbox) -> None:
        self.outbox = outbox
        self.nodes: dict[bytes, Node] = {}
        self.at_page: dict[int, Node] = {}
        self.leaves: dict[int, Node] = {}
        self.at_slot: dict[int, Checkpoint] = {}
        self.at_tail: dict[int, list[Checkpoint]] = {}
        self.changed_nodes: dict[Node, None] = {}
        self.changed_checkpoints: dict[Checkpoint, None] = {}
        self.roots: dict[bytes, Node] = {}
        self._history: OrderedDict[bytes, None] = OrderedDict()
        self._answered: OrderedDict[bytes, None] = OrderedDict()
        """Digests of pages that finished requests computed but did not share."""
        self.answers: deque[tuple[Chain, End]] = deque(maxlen=MAX_ANSWERS)
        """Finished requests, the newest last, whose answers may be computed again as prompts."""
        self._max_history = max_history

    def deepest(self, chain: Chain) -> Node:
        """Returns the end of the longest known prefix, or a root if nothing matches. Costs the
        logarithm of the number of known digests, plus the other matching pages, whose digests are
        copied from the tree instead of being computed."""
        known, num_pages = chain.known_digests(), chain.num_pages
        num_known = min(len(known), num_pages)
        # Only leaves are evicted, so all pages after a missing one are missing too.
        depth = bisect_left(known, True, hi=num_known, key=lambda key: key not in self.nodes)
        node = self.nodes[known[depth - 1]] if depth else self._known_root(chain)
        if depth < num_known:
            return node
        run = []
        for content in chain.page_contents(depth, num_pages):
            child = node.last_child  # usually the one that matches
            if child is None or child.content != content:
                child = node.child(content)
                if child is None:
                    break
            run.append(child)
            node = child
        chain.learn([child.digest for child in run])
        return node

    def root(self, chain: Chain) -> Node:
        """Returns the root of a chain, which is made if there is none."""
        return self.roots.setdefault(chain.root, self._known_root(chain))

    def _known_root(self, chain: Chain) -> Node:
        """Returns the root of a chain, or one that nothing hangs on if none is known."""
        return self.roots.get(chain.root) or Node.root(chain)

    def insert(self, chain: Chain, parent: Node, pages: Sequence[int]) -> list[Node]:
        """Adds nodes below `parent` for the chain's next pages, whose digests are new."""
        first = parent.depth
        if self.leaves.pop(parent.page, None) is not None:
            self.changed_nodes[parent] = None
        self._changed(self.at_tail.get(pages[0], ()))
        digests = chain.digests(first + len(pages))
        contents = chain.page_contents(first, first + len(pages))
        run = []
        for page, digest, content in zip(pages, digests[first:], contents, strict=False):
            node = Node(digest, page, parent, content)
            self.nodes[digest] = node
            self.at_page[page] = node
            parent.add_child(node)
            run.append(node)
            parent = node
        self.leaves[parent.page] = parent
        self.changed_nodes[parent] = None
        if self._history or self._answered:
            for node in run:
                self._history.pop(node.digest, None)
                self._answered.pop(node.digest, None)
        self.outbox.pages_cached(run)
        return run

    def remove(self, run: Sequence[Node]) -> None:
        """Removes a node without children, and nodes above it that lose their last child, the
        deepest first. None may have checkpoints. Remembers their digests."""
        above = run[-1].parent
        assert above is not None, "T4: a root is not evicted"
        del self.leaves[run[0].page]
        for node in run:
            assert not node.children, "T2: only a leaf is evicted"
            assert not node.checkpoints, "T3: a node with checkpoints is not evicted"
            parent = node.parent
            assert parent is not None, "T4: a root is not evicted"
            del self.nodes[node.digest]
            del self.at_page[node.page]
            self._remember(self._history, node.digest)
            parent.remove_child(node)
        self._changed(self.at_tail.get(run[-1].page, ()))
        if not above.children and not above.is_root:
            self.leaves[above.page] = above
            self.changed_nodes[above] = None
        self._prune(above)
        self.outbox.pages_evicted(run)

    def attach(self, checkpoint: Checkpoint) -> None:
        """Attaches a checkpoint to its node and links it with those above and below."""
        node = checkpoint.node
        if node.checkpoints is NO_CHECKPOINTS:
            node.checkpoints = {}
        node.checkpoints[checkpoint.tail] = checkpoint
        self.at_slot[checkpoint.slot] = checkpoint
        self.changed_nodes[node] = None
        if checkpoint.tail_page is not None:
            self.at_tail.setdefault(checkpoint.tail_page, []).append(checkpoint)
        num_reached = _count_reaching(node, 1)
        self._changed((checkpoint, *link(checkpoint)))
        self.outbox.state_cached(checkpoint, num_reached)

    def use(self, checkpoint: Checkpoint, end: End) -> None:
        """Records that a request resumed from a checkpoint. The path above it now belongs to that
        request."""
        checkpoint.num_uses += 1
        checkpoint.used_at = end.time
        for here in follow(checkpoint):
            here.end = end
            self.changed_checkpoints[here] = None

    def detach(self, checkpoint: Checkpoint, score: float) -> None:
        """Removes a checkpoint. `score` is the number of tokens that it was expected to save."""
        node = checkpoint.node
        del node.checkpoints[checkpoint.tail]
        del self.at_slot[checkpoint.slot]
        self.changed_nodes[node] = None
        if checkpoint.tail_page is not None:
            self._let_go_of_tail(checkpoint, checkpoint.tail_page)
        num_lost = _count_reaching(node, -1)
        self._prune(node)
        self._changed((checkpoint, *unlink(checkpoint)))
        self.outbox.state_evicted(checkpoint, score, num_lost)

    def move(self, page: int, target: int) -> None:
        """Records that the content of a page has moved to another."""
        self.outbox.moves.append(PageMove(source=page, target=target))
        node = self.at_page.pop(page, None)
        if node is not None:
            node.page = target
            self.at_page[target] = node
            if self.leaves.pop(page, None) is not None:
                self.leaves[target] = node
        tails = self.at_tail.pop(page, None)
        if tails is not None:
            self.at_tail[target] = tails
            for checkpoint in tails:
                checkpoint.tail_page = target

    def num_seen(self, chain: Chain, depth: int) -> int:
        """Returns how many leading pages are known, including evicted ones; at least the first
        `depth` are. Costs the logarithm of the number of pages."""
        # A page is evicted after all deeper ones, so it is also remembered for longer.
        nodes, history = self.nodes, self._history

        def is_new(digest: bytes) -> bool:
            return digest not in nodes and digest not in history

        num_full = len(chain) // chain.page_size
        if depth == num_full or is_new(chain.digests(depth + 1)[depth]):
            return depth  # the usual case, which needs no digests of deeper pages
        return bisect_left(chain.digests(num_full), True, lo=depth, key=is_new)

    def note_answer(self, chain: Chain, end: End) -> None:
        """Remembers the pages of a finished request that it did not share."""
        num_full = len(chain) // chain.page_size
        for digest in chain.digests(num_full)[chain.num_pages : num_full]:
            if digest not in self.nodes:
                self._remember(self._answered, digest)
        self.answers.append((chain, end))

    def num_answered(self, chain: Chain, depth: int) -> int:
        """Returns how many leading pages were computed before, if only for an answer; at least the
        first `depth` were."""
        num_full = len(chain) // chain.page_size
        if self._answered:
            while depth < num_full and chain.digests(depth + 1)[depth] in self._answered:
                depth += 1
        return depth

    def forget_history(self) -> None:
        self._history.clear()
        self._answered.clear()
        self.answers.clear()

    def _changed(self, checkpoints: Iterable[Checkpoint]) -> None:
        self.changed_checkpoints.update(dict.fromkeys(checkpoints))

    def _let_go_of_tail(self, checkpoint: Checkpoint, page: int) -> None:
        sharing = self.at_tail[page]
        sharing.remove(checkpoint)
        if not sharing:
            del self.at_tail[page]

    def _remember(self, history: OrderedDict[bytes, None], digest: bytes) -> None:
        history[digest] = None
        history.move_to_end(digest)
        if len(history) > self._max_history:
            history.popitem(last=False)

    def _prune(self, node: Node) -> None:
        if node.is_root and not node.children and not node.checkpoints:
            self.roots.pop(node.digest, None)


def _count_reaching(node: Node, change: int) -> int:
    """Counts a checkpoint that was added to a node (1) or removed (-1). Returns how many nodes,
    from this one upwards, became reachable or unreachable by that."""
    num = 0
    for here in node.ancestors():
        before = here.num_reaching
        here.num_reaching = after = before + change
        if before and after:
            break
        num += 1
    return num
