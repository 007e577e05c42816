"""A state machine of the cache's verbs against what every page and slot really holds, in prompts of
tokens and pictures.

Hypothesis draws the verbs and shrinks what fails. The scheduler's own runs are in
tests/scheduler/fuzz.py.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from milepost.cache import Cache, Kind
from milepost.cache.memory import ZERO_SLOT, Split, UnifiedPool
from milepost.cache.tree import FullAttention, Recurrent
from tests.invariants import check
from tests.pictured_texts import LENGTHS, read, split, text_of, whole, words_of

PAGE_SIZE = 8
GRID = 16
VOCAB = st.integers(0, 2)
INDEX = st.integers(0, 50).map(lambda index: -1 - index)
"""Of something in a list; the last most often."""
CUT = st.one_of(st.none(), st.integers(0, 60))
PIECE = st.one_of(VOCAB.map(lambda token: (token,)), st.sampled_from(sorted(LENGTHS)).map(words_of))
PIECES = st.lists(PIECE, min_size=1, max_size=30).map(lambda all_: tuple(itertools.chain(*all_)))
OWN = PIECES.filter(lambda words: len(words) <= 40)
PROMPT = st.tuples(INDEX, CUT, OWN)
KIND = st.sampled_from([None, Kind.ANSWER_END, Kind.PREEMPTED])
MARKS_OF = ((), (5, 20), (33,))
STORAGES = {
    "one memory": lambda: UnifiedPool(7, 3),
    "one memory of small units": lambda: UnifiedPool(14, 1),
    "two pools": lambda: Split(16, 4),
    "two tight pools": lambda: Split(7, 2),
}


class CacheMachine(RuleBasedStateMachine):
    """What is in a page or slot is the tokens up to there: all that a model could know of them."""

    @initialize(storage=st.sampled_from(sorted(STORAGES)))
    def begin(self, storage):
        kinds = (FullAttention(), Recurrent(grid=GRID))
        self.cache = Cache(storage=STORAGES[storage](), page_size=PAGE_SIZE, kinds=kinds)
        self.pages, self.slots = {}, {ZERO_SLOT: ()}
        self.known, self.waiting, self.running, self.loans = [()], [], [], []

    # --- verbs ------------------------------------------------------------------------------------

    @rule(prompt=PROMPT)
    def arrive(self, prompt):
        chain = self.chain(prompt)
        if len(chain) + PAGE_SIZE <= self.cache.capacity:
            self.waiting.append((chain, self.cache.expect(chain, len(self.waiting))))
            self.known.append(text_of(chain))

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=4), kind=KIND)
    def serve(self, prompts, kind):
        """Whole requests, one after the other: the way to something cached."""
        for prompt in prompts:
            self.arrive(prompt)
            num_running = len(self.running)
            if self.waiting:
                self.admit(-1, MARKS_OF[len(self.known) % 3])
            if len(self.running) > num_running:
                allocation = self.running[-1]
                while allocation.committed < len(allocation.chain):
                    self.step(-1, 20)
                self.release(-1, kind)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX, marks=st.frozensets(st.integers(1, 60), max_size=2))
    def admit(self, index, marks):
        place = index % len(self.waiting)
        chain, reservation = self.waiting[place]
        match = self.cache.match(chain)
        assert match.state_length == self.deepest_state(chain)
        assert 0 <= self.cache.displaced(match) <= self.cache.capacity + GRID * PAGE_SIZE
        room = self.cache.room
        marks = tuple(sorted(mark for mark in marks if mark <= len(chain)))
        allocation = self.cache.admit(chain, match, marks=marks, reservation=reservation)
        if allocation is None:
            assert self.cache.room == room
            assert self.running or self.loans or match.state_length, "alone and cold it fits"
            return
        assert allocation.committed == match.state_length
        self.cache.forget(reservation)
        del self.waiting[place]
        self.running.append(allocation)
        self.move_pages()

    @rule(prompt=PROMPT, num_tokens=st.integers(1, 20), kind=KIND)
    def race(self, prompt, num_tokens, kind):
        """Two requests with one prompt, side by side."""
        before = set(self.running)
        for _ in range(2):
            self.arrive(prompt)
            if self.waiting:
                self.admit(-1, (3, 11))
        rivals = [allocation for allocation in self.running if allocation not in before]
        for _ in range(8):
            for allocation in rivals:
                if allocation.committed < len(allocation.chain):
                    self.step(self.running.index(allocation), num_tokens)
        for allocation in rivals[:1]:
            self.release(self.running.index(allocation), kind)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX)
    def give_up(self, index):
        _, reservation = self.waiting.pop(index % len(self.waiting))
        self.cache.forget(reservation)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, num_tokens=st.integers(1, 40))
    def step(self, index, num_tokens):
        """The next tokens of a prompt, up to the grid unless they are the last; or one more."""
        allocation = self.running[index % len(self.running)]
        chain, start = allocation.chain, allocation.committed
        if start == len(chain):
            if not self.cache.extend(allocation, start + 1):
                return
            self.move_pages()
            chain.extend((start % 3,))
        end = min(start + num_tokens, len(chain))
        if end < len(chain):
            end = max(end - end % GRID, min(start - start % GRID + GRID, len(chain)))
        reads, copy = allocation.slot_in, allocation.page_copy
        exports = self.cache.take_exports(allocation, end)
        self.move_pages()
        assert self.slots[reads] == text_of(chain)[:start], "it goes on from its own tokens"
        if copy is not None:
            self.pages[copy.target] = self.pages[copy.source][: copy.num_tokens]
        text = text_of(chain)
        for position in range(max(start, allocation.write_from), end):
            page = allocation.page_table[position // PAGE_SIZE]
            assert page not in self.cache.tree.at_page, "what is cached is not written again"
            assert sum(page in other.page_table for other in self.running) == 1
            held = self.pages.setdefault(page, [])
            del held[position % PAGE_SIZE :]
            held.append(text[: position + 1])
        written = {export.slot: export.position for export in exports} | {allocation.slot_out: end}
        self.slots |= {slot: text[:length] for slot, length in written.items()}
        self.cache.commit(allocation, end, written)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, kind=KIND)
    def release(self, index, kind):
        allocation = self.running.pop(index % len(self.running))
        self.known.append(text_of(allocation.chain))
        self.cache.release(allocation, kind)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, position=st.integers(1, 8))
    def add_branch_point(self, index, position):
        allocation = self.running[index % len(self.running)]
        if allocation.planned < position * GRID <= len(allocation.chain):
            self.cache.add_branch_point(allocation, position * GRID)

    @rule(base=INDEX, most=st.sampled_from([0.3, 1.0]))
    def lend(self, base, most):
        chain = self.chain((base, None, (0,)))
        loan = self.cache.lend(chain, most=most)
        if loan is not None:
            assert self.slots[loan.slot] == text_of(chain)[: loan.position]
            assert self.cache.loans.share <= most
            self.loans.append(loan)

    @precondition(lambda self: self.loans)
    @rule(index=INDEX)
    def take_back(self, index):
        self.cache.take_back(self.loans.pop(index % len(self.loans)))

    @rule()
    def reset(self):
        assert self.cache.reset() is not (bool(self.running) or bool(self.loans))
        self.cache.take_moves()

    def chain(self, prompt):
        """A known prompt, to its end or up to a cut, and tokens of its own."""
        base, cut, own = prompt
        base = self.known[base % len(self.known)]
        base = base[: len(base) if cut is None else cut]
        tokens, pictures = split((*whole(base), *own))
        return self.cache.chain(tokens, pictures=pictures)

    # --- what holds -------------------------------------------------------------------------------

    def move_pages(self):
        """Make the copies that the next plan would carry first."""
        for move in self.cache.take_moves():
            self.pages[move.target] = list(self.pages[move.source])

    def deepest_state(self, chain):
        """By trying every cached state whose tokens begin the prompt, pages and all."""
        tokens = text_of(chain)
        return max(
            (
                checkpoint.position
                for checkpoint in self.cache.tree.at_slot.values()
                if checkpoint.position < len(tokens)
                and self.slots[checkpoint.slot] == tokens[: checkpoint.position]
            ),
            default=0,
        )

    @invariant()
    def everything_is_consistent(self):
        if hasattr(self, "cache"):
            check(self.cache)

    @invariant()
    def pages_and_slots_hold_what_they_are_filed_under(self):
        if not hasattr(self, "cache"):
            return
        for node in self.cache.tree.nodes.values():
            tokens = self.tokens_of(node)
            held = [tokens[: n + 1] for n in range(len(tokens) - PAGE_SIZE, len(tokens))]
            assert self.pages[node.page] == held
        for checkpoint in self.cache.tree.at_slot.values():
            tail = tuple(read(checkpoint.tail))
            tokens = (*self.tokens_of(checkpoint.node), *tail)
            assert self.slots[checkpoint.slot] == tokens
            if tail:
                held = [tokens[: n + 1] for n in range(len(tokens) - len(tail), len(tokens))]
                assert self.pages[checkpoint.tail_page][: len(tail)] == held

    def tokens_of(self, node):
        pages = [tuple(read(above.content)) for above in node.ancestors()]
        return tuple(token for page in reversed(pages) for token in page)

    def teardown(self):
        """All that runs ends, and then nothing is held."""
        if not hasattr(self, "cache"):
            return
        for allocation in self.running:
            self.cache.release(allocation)
        for _, reservation in self.waiting:
            self.cache.forget(reservation)
        for loan in self.loans:
            self.cache.take_back(loan)
        check(self.cache)
        assert (self.cache.pages.num_used, self.cache.slots.num_used) == (0, 0)
        assert self.cache.reset()
        assert self.cache.pages.num_free == self.cache.pages.total


def test_whatever_the_order_of_verbs_the_cache_holds_what_it_says():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=40, stateful_step_count=40)
    )
