"""Random runs of scheduler and cache against an oracle that knows what every page and slot holds.

    python -m tests.scheduler.fuzz [--runs 2000] [--operations 400] [--seed S] [--jobs 0]

A run is a seed: pools of a few pages and slots (one memory or two), kinds of layers (grids,
windows, states beside pages), prompts that part and meet at many places, salts, marks, priorities,
stop tokens, drafts and pages ahead of them, steps ahead, steps that are cut short, aborts, others
that read what is cached. In a quarter of the runs the pool holds a request or two.
After every operation each invariant is checked, and each cached page and state compared with the
tokens that it is filed under. Every accepted request ends once, and with the answer of a model
without any engine. A failure prints its seed and operation; `--seed S --runs 1` repeats it. Runs in
a process for each core, unless `--jobs` names another number. Needs no torch: Python and msgspec.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from math import lcm

from milepost.cache import Cache, Chain
from milepost.cache.memory import Split, UnifiedPool
from milepost.cache.tree import (
    Checkpoint,
    FullAttention,
    LayerKind,
    Node,
    Recurrent,
    ShortConvolution,
    SlidingWindow,
    grid_of,
    num_window_pages,
    window_of,
)
from milepost.errors import InvalidRequestError
from milepost.scheduler.canonical import Canonical
from milepost.scheduler.plans import SequencePlan, StepPlan, StepResult
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import EMPTY, FakeRunner, cold_answer, consume, make_request, state_after
from tests.follower import Follower
from tests.invariants import check
from tests.scheduler.lending import Readers
from tests.scheduler.oracle import OracleSource

NUM_RUNS, NUM_OPERATIONS = 2000, 400
PROGRESS_EACH = 20
SALTS = ("", "", "", "", "tenant")
VOCAB_SIZE = 4
SPOILT = b"half written"
BITWISE = 0.3
"""Share of the runs in the bitwise mode."""


class RunError(AssertionError):
    """A run failed; says how to repeat it."""


class WatchfulRunner(FakeRunner):
    """Refuses to write what others may read too."""

    def __init__(self, scheduler: Scheduler, cache: Cache, pages_each: int) -> None:
        super().__init__(
            scheduler,
            page_size=cache.page_size,
            vocab_size=VOCAB_SIZE,
            pages_each=pages_each,
            kinds=cache.config.kinds,
            bitwise=grid_in(cache),
        )
        self.cache = cache

    def follow_tables(self, plan: StepPlan) -> None:
        super().follow_tables(plan)
        for sequence in plan.sequences:
            self._check_writes(sequence)

    def _check_writes(self, sequence: SequencePlan) -> None:
        """KV that is written is behind all that is cached of its page, and nobody else's."""
        tree, size = self.cache.tree, self.page_size
        first = max(sequence.start, sequence.write_from)
        if not sequence.num_tokens:
            return
        for index in range(first // size, -(-sequence.end // size)):
            page = self.tables[sequence.number][index]
            start = max(first - index * size, 0)
            assert page not in tree.at_page, f"page {page} is cached and written again"
            tables = [
                allocation for allocation in self.cache.allocations if page in allocation.page_table
            ]
            assert len(tables) == 1, f"page {page} is shared and written"
            tails = [len(c.tail) // 4 for c in tree.at_tail.get(page, ())]
            assert start >= max(tails, default=0), f"page {page}: a cached tail is written again"

    def spoil(self, plan: StepPlan, rng: random.Random) -> None:
        """What is left of a step that was cut short: whatever it writes may be half written."""
        for move in plan.moves:
            if rng.random() < 0.5:
                self._page(move.target)[:] = [SPOILT] * self.page_size
        for sequence in plan.sequences:
            if self.uses_slots:
                for slot in (sequence.slot_out, *(export.slot for export in sequence.exports)):
                    self._write(slot, SPOILT, -1)
            table = self.tables[sequence.number]
            for position in range(max(sequence.start, sequence.write_from), sequence.end):
                page = table[position // self.page_size]
                self._page(page)[position % self.page_size] = SPOILT
                self.beside[page] = SPOILT
            for position in range(sequence.start, sequence.end):
                self._write_window(sequence, position, SPOILT)


def grid_in(cache: Cache) -> int:
    """The grid of the bitwise mode; 0 in the default mode."""
    return cache.grid if cache.config.bitwise else 0


def draw_kinds(rng: random.Random, page_size: int) -> tuple[LayerKind, ...]:
    """Most often full attention and states in slots; a grid, a window or a place of their own."""
    beside = ShortConvolution(grid=page_size)
    recurrent = Recurrent(grid=rng.choice([64, 64, page_size]))
    if rng.random() < 0.5:
        return FullAttention(), recurrent
    window = SlidingWindow(window=rng.choice([16, 20, 64, 100]))
    drawn: list[tuple[LayerKind, ...]] = [
        (FullAttention(), Recurrent(grid=rng.choice([1, 24, 33, 48, 256]))),
        (FullAttention(), Recurrent(grid=64), Recurrent(grid=96)),
        (FullAttention(), window, recurrent),
        (window, recurrent),
        (window, recurrent),
        (window, Recurrent(grid=48)),
        (FullAttention(), beside),
        (FullAttention(), beside, recurrent),
        (FullAttention(), window),
        (FullAttention(),),
    ]
    return rng.choice(drawn)


class Fuzz:
    """One run. `operate` does one operation, `finish` runs what is left to its end."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.choice([16, 16, 16, 32, 64])
        num_pages, num_slots = rng.choice([4, 6, 8, 12, 20, 40]), rng.choice([2, 2, 3, 4, 6, 9])
        tight = random.Random(f"tight {seed}")
        if is_tight := seed % 4 == 1:
            num_pages = tight.choice([2, 3, 4, 5])
        pages_each = rng.choice([0, 0, 0, 1, 2, 3, 5, 8])
        mode = rng.choice([*["auto"] * 9, "align", "all", "none"])
        kinds = draw_kinds(rng, page_size)
        places = [kind.where for kind in kinds]
        storage: UnifiedPool | Split = Split(num_pages, num_slots if "slot" in places else 0)
        if pages_each and "slot" in places:
            storage = UnifiedPool(-(-num_pages // pages_each) + num_slots, pages_each)
        grid = grid_of(kinds)
        max_num_seqs = rng.choice([1, 2, 3, 5, 8])
        budget = max(rng.choice([64, 70, 130, 512]), grid)
        self.cache = Cache(
            storage=storage,
            page_size=page_size,
            mode=mode,
            block_size=lcm(64, grid),
            kinds=kinds,
            num_windows=num_window_pages(
                window_of(kinds),
                page_size,
                num_states=storage.slots.capacity,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
            ),
            bitwise=random.Random(f"bitwise {seed}").random() < BITWISE,
        )
        num_ahead = tight.choice([1, 4, 20, 60]) if is_tight or tight.random() < 0.2 else 0
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            num_lookahead_tokens=num_ahead,
        )
        self.canonical = Canonical(self.scheduler)
        self.runner = WatchfulRunner(self.scheduler, self.cache, pages_each)
        apart = random.Random(-1 - seed)
        self.source: OracleSource | None = None
        if apart.random() < 0.3:
            self.source = OracleSource(self.runner, apart)
            self.scheduler.outside.add_source(self.source)
        self.readers: Readers | None = None
        if seed % 4 == 2:
            self.readers = Readers(self.cache, self.runner, random.Random(f"readers {seed}"))
        self.num_operations = 0
        self.requests: list[Request] = []
        self.answers: dict[Request, list[int]] = {}
        self.known: list[list[int]] = [[]]
        self.cut = 0
        self.under_way: tuple[StepPlan, StepResult] | None = None
        self.truth: dict[bytes, list[bytes]] = {}
        self.follower: Follower | None = None
        self.num_drafts = rng.choice([0, 1, 3, 6]) if "page" not in places else 0
        if is_tight and "page" not in places:
            self.num_drafts = tight.choice([1, 3, 6])
        self.shape = (
            f"{num_pages} pages of {page_size}, {num_slots} slots, {pages_each} a slot, {mode}, "
            f"{'bitwise, ' * self.cache.config.bitwise}"
            f"{max_num_seqs} sequences, {budget} tokens, {self.num_drafts} drafts, "
            f"{num_ahead} ahead, "
            f"{', '.join(map(str, kinds))}"
        )
        self._operations: list[tuple[Callable[[], None], int]] = [
            (self.submit, 12),
            (self.submit_siblings, 2),
            (self.step, 36),
            (self.many_steps, 3),
            (self.cut_short, 3),
            (self.abort, 3),
            (self.look, 4),
            (self.reset, 1),
            (self.listen, 1),
        ]

    def operate(self) -> None:
        self.num_operations += 1
        verbs, weights = zip(*self._operations, strict=True)
        self.rng.choices(verbs, weights)[0]()
        self.check()

    # --- operations -------------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """Something known, most often something new, or a cut of it, then tokens of its own; as
        long as the pool at most, most often.
        """
        rng = self.rng
        base = rng.choice(self.known if rng.random() < 0.4 else self.known[-4:])
        longest = self.cache.capacity - 4
        cut = rng.choice([len(base), max(len(base) - 1, 0), rng.randint(0, len(base))])
        self.cut = cut = min(cut, longest)
        own = rng.randint(1, rng.choice([2, 10, 40, 200]))
        if rng.random() < 0.98:
            own = max(min(own, longest - cut), 1)
        return [*base[:cut], *rng.choices(range(VOCAB_SIZE), k=own)]

    def submit(self) -> None:
        self.add(self.prompt())

    def submit_siblings(self) -> None:
        """Several prompts at once that part late."""
        base = self.prompt()
        for _ in range(self.rng.randint(2, 4)):
            self.add([*base, *self.rng.choices(range(VOCAB_SIZE), k=self.rng.randint(1, 5))])

    def add(self, prompt: list[int]) -> None:
        rng = self.rng
        room = max(self.cache.capacity - len(prompt), 1)
        places = [min(max(self.cut, 1), len(prompt)), rng.randint(1, len(prompt))]
        marks = tuple(sorted({rng.choice(places) for _ in range(rng.randint(0, 2))}))
        request = make_request(
            self.cache,
            f"r{len(self.requests)}",
            prompt,
            max_tokens=min(rng.choice([1, 2, 5, 17, 40, 90]), rng.choice([room, 90])),
            salt=rng.choice(SALTS),
            marks=marks,
            priority=rng.choice([0, 0, 0, 1, -1]),
        )
        request.most_replayed = self.num_drafts
        if rng.random() < 0.2:
            request.stop_token_ids = frozenset({rng.randrange(VOCAB_SIZE)})
            request.min_tokens = rng.choice([0, 3])
        self.canonical.give_way()
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert len(prompt) + request.max_tokens > self.cache.capacity
            return
        self.requests.append(request)
        self.answers[request] = _answer(request, prompt, grid_in(self.cache))
        self.known.append(prompt)
        if len(self.known) > 24:
            del self.known[rng.randrange(1, len(self.known))]

    def step(self) -> None:
        """One step; most often with the one behind it, if it is known."""
        if not self.scheduler.has_work and not self.canonical.begin():
            return
        if self.under_way is None:
            self.propose()
        plan, result = self.under_way or self._run(self.scheduler.schedule())
        if not plan.sequences:
            self._await_others()
            return
        self.propose()
        follow = self.scheduler.follow(plan) if self.rng.random() < 0.7 else None
        if follow is not None:
            check(self.cache)
        ahead = self._run(follow) if follow is not None else None
        self.under_way = ahead if follow is not None and follow.sequences else None
        self.arrive()
        self._update(plan, result)
        self.arrive()
        self._drain_if_idle()
        if self.readers is not None and self.requests:
            self.readers.come_and_go([request.chain for request in self.requests[-12:]])

    def _await_others(self) -> None:
        """Nothing is planned before a load arrives, or what is lent comes back."""
        is_done = self.readers is not None and self.readers.end()
        assert is_done or self.scheduler.num_loading, "work, but no plan"
        self.arrive(at_least=1)

    def arrive(self, at_least: int = 0) -> None:
        """Loads are over: what they bring is there, or it does not come."""
        source = self.source
        if source is None:
            return
        under_way = list(source.under_way)
        source.rng.shuffle(under_way)
        for number in under_way[: max(source.rng.randint(0, 2), at_least)]:
            source.bring(number) if source.rng.random() < 0.8 else source.lose(number)

    def end_loads(self) -> None:
        """Nobody writes any more, whatever was to be loaded, or reads."""
        if self.readers is not None:
            self.readers.end()
        if self.source is not None:
            for number in [*self.source.begun, *self.source.under_way]:
                self.source.lose(number)

    def propose(self) -> None:
        """Drafts for some of those that run, right for a while; more than there is room for."""
        rng = self.rng
        if not self.num_drafts:
            return
        for request in self.scheduler.running:
            if rng.random() < 0.3 or request not in self.answers:
                continue
            first = request.num_output_tokens
            drafts = [*self.answers[request][first:], *rng.choices(range(VOCAB_SIZE), k=3)]
            drafts = drafts[: rng.randint(1, self.num_drafts)]
            if rng.random() < 0.6:
                drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB_SIZE)
            self.scheduler.propose(request, drafts)

    def many_steps(self) -> None:
        for _ in range(self.rng.randint(2, 20)):
            self.step()
            self.check()

    def cut_short(self) -> None:
        """A step, with the one behind it perhaps, whose outcome never comes in."""
        if not self.scheduler.has_work:
            return
        self.end_loads()
        plan = self.under_way[0] if self.under_way else self.scheduler.schedule()
        if not plan.sequences:
            self.end_loads()
            self.scheduler.roll_back(plan)
            return
        has_run = self.under_way is not None or self.rng.random() < 0.5
        if has_run and self.under_way is None:
            self.runner.run(plan)
        tables = {number: list(table) for number, table in self.runner.tables.items()}
        follow = self.scheduler.follow(plan) if self.rng.random() < 0.7 else None
        steps = [plan] if follow is None else [plan, follow]
        for step in steps[has_run:]:
            self.runner.follow_tables(step)
        self.end_loads()
        self.scheduler.roll_back(plan)
        for step in steps:
            self.runner.spoil(step, self.rng)
        if self.rng.random() < 0.5:  # it did not come so far
            self.runner.tables = tables
        self.under_way = None

    def abort(self) -> None:
        if not self.requests:
            return
        request = self.rng.choice(self.requests[-12:])
        was_over = request.finish_reason is not None
        ended = self.scheduler.finish(request, FinishReason.ABORT)
        assert ended != was_over, "a request ends once"
        self._drain_if_idle()

    def look(self) -> None:
        """A match changes nothing, and finds what trying everything finds."""
        chain = self.cache.chain(self.prompt(), self.rng.choice(SALTS))
        before = self.cache.reclaimer.version
        found = self.cache.match(chain)
        assert self.cache.reclaimer.version == before
        if self.cache.config.enabled:
            assert found.kv_length == self._longest_kv(chain)
            assert found.state_length == self._longest_state(chain)
            if self.follower is not None and self.runner.uses_slots and not self.runner.uses_pages:
                assert found.state_length == self.follower.hit(chain)
        report = found.report
        assert report.reused + sum(report.lost.values()) == len(chain)
        assert all(num > 0 for num in report.lost.values())

    def reset(self) -> None:
        busy = bool(self.scheduler.running or self.cache.loans)
        if self.rng.random() < 0.8 and not busy:
            return
        assert self.cache.reset() is not busy
        if not busy:
            assert self.cache.pages.num_free == self.cache.pages.total

    def listen(self) -> None:
        """From some time on somebody follows what comes and goes."""
        if self.follower is None:
            assert not self.cache.take_events(), "nobody has listened"
            self.follower = Follower(self.cache.page_size)
            self.cache.listen()

    def _run(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        result = self.runner.run(plan)
        if self.source is not None:
            self.source.launch(plan)
        return plan, result

    def _update(self, plan: StepPlan, result: StepResult) -> None:
        requests = [self.scheduler.request(s.number) for s in plan.sequences]
        was_over = [request for request in requests if request.finish_reason is not None]
        for progress in self.scheduler.update(plan, result):
            request, answer = progress.request, self.answers[progress.request]
            assert request not in was_over, f"{request.id} goes on after its end"
            num, tokens = request.num_output_tokens, progress.tokens
            assert tokens == answer[num - len(tokens) : num], f"{request.id}: wrong token {num}"
            assert (progress.finish_reason is not None) == (num == len(answer))
            if progress.finish_reason is not None:
                self.known.append(list(request.chain.tokens))

    def _drain_if_idle(self) -> None:
        if self.under_way is not None and not self.scheduler.has_work:
            plan_and_result, self.under_way = self.under_way, None
            self._update(*plan_and_result)

    # --- the oracle -------------------------------------------------------------------------------

    def check(self) -> None:
        check(self.cache)
        self._check_queues()
        stats = self.cache.stats
        assert stats.hits + sum(stats.lost.values()) == stats.queries
        assert sum(stats.loaded.values()) <= stats.hits
        moved = {move.target: move.source for move in reversed(self.cache.outbox.moves)}
        for node in self.cache.tree.nodes.values():
            assert self._holds(node.page, moved) == self._states(node), f"page {node.page} is wrong"
            if self.runner.uses_pages:
                beside = self.runner.beside[self._where(node.page, moved)]
                assert beside == self._last_state(node), f"the state beside {node.page} is wrong"
        for checkpoint in self.cache.tree.at_slot.values():
            self._check_checkpoint(checkpoint, moved)
        if self.readers is not None:
            self.readers.check()
        if self.follower is not None:
            self.follower.follow(self.cache.take_events())
            self.follower.check(self.cache)

    def _check_queues(self) -> None:
        """What waits or runs has not ended; or somebody still writes what it holds, or its last
        tokens are to be folded in.
        """
        scheduler = self.scheduler
        for request in scheduler.waiting:
            assert request.finish_reason is None, f"{request.id} is over and waits"
            assert request.allocation is None, f"{request.id} runs and waits"
            assert request.reservation is not None, f"{request.id} waits without a reservation"
        for request in scheduler.running:
            assert request.allocation is not None, f"{request.id} runs and holds nothing"
            leaves = request in scheduler._planner.folding
            leaves = leaves or request.is_in_flight or request.is_loading
            assert request.finish_reason is None or leaves, f"{request.id} is over and runs"

    def _check_checkpoint(self, checkpoint: Checkpoint, moved: dict[int, int]) -> None:
        state = self._last_state(checkpoint.node)
        states = list(_states(state, _unpacked(checkpoint.tail)))
        assert self.runner.slots.get(checkpoint.slot) == (states or [state])[-1], (
            f"slot {checkpoint.slot} is wrong"
        )
        if states:
            assert checkpoint.tail_page is not None
            held = self._holds(checkpoint.tail_page, moved)[: len(states)]
            assert held == states, f"tail page {checkpoint.tail_page} is wrong"

    def _holds(self, page: int, moved: dict[int, int]) -> list[bytes]:
        """The contents of a page."""
        return self.runner.kv.get(self._where(page, moved), [])

    def _where(self, page: int, moved: dict[int, int]) -> int:
        """Where a page's contents are: a copy that no plan has made yet is still where it was."""
        while page in moved:
            page = moved[page]
        return page

    def _states(self, node: Node) -> list[bytes]:
        """What a node's page must hold."""
        known = self.truth.get(node.digest)
        if known is None:
            assert node.parent is not None
            states = _states(self._last_state(node.parent), _unpacked(node.content))
            known = self.truth[node.digest] = list(states)
        return known

    def _last_state(self, node: Node) -> bytes:
        return EMPTY if node.is_root else self._states(node)[-1]

    def _longest_state(self, chain: Chain) -> int:
        """By trying every position, and every cached slot."""
        longest = min(self._longest_kv(chain), chain.last_resume)
        if self.runner.uses_pages:
            longest -= longest % self.cache.page_size
        if not self.runner.uses_slots:
            return longest
        best = 0
        for checkpoint in self.cache.tree.at_slot.values():
            position = checkpoint.position
            *_, root = checkpoint.node.ancestors()
            if self.runner.uses_pages and position % self.cache.page_size:
                continue
            if position <= chain.last_resume and root.digest == chain.root and position > best:
                holds = self.runner.slots[checkpoint.slot]
                best = position if holds == state_after(chain.tokens[:position]) else best
        return best

    def _longest_kv(self, chain: Chain) -> int:
        """By trying every page of the tree."""
        size, pages = self.cache.page_size, set()
        for node in self.cache.tree.nodes.values():
            *_, root = node.ancestors()
            if root.digest == chain.root:
                pages.add(tuple(self._states(node)))
        states = list(_states(EMPTY, chain.tokens))
        length = 0
        while (
            length + size <= min(len(states), chain.shared_end)
            and tuple(states[length : length + size]) in pages
        ):
            length += size
        return length

    def finish(self) -> None:
        """All that was accepted ends, and then nothing is held."""
        most = 100 + sum(len(request.chain) + request.max_tokens for request in self.requests)
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
            self.check()
        assert not self.scheduler.has_work, f"still at work after {most} steps"
        for request in self.requests:
            answer, expected = request.output_token_ids, self.answers[request]
            assert answer == expected[: len(answer)]
            assert request.finish_reason is not None
            is_whole = len(answer) == len(expected)
            assert is_whole or request.finish_reason is FinishReason.ABORT
        assert not self.scheduler._admission.pending._owners, "nobody computes what is claimed"
        if self.readers is not None:
            self.readers.end()
        pages, slots = self.cache.pages, self.cache.slots
        assert (pages.num_used, slots.num_used) == (0, 0)
        assert self.cache.reset()
        assert (pages.num_free, slots.num_free) == (pages.total, slots.total)


def _answer(request: Request, prompt: Sequence[int], grid: int) -> list[int]:
    """All tokens of a request's answer."""
    answer = cold_answer(prompt, request.max_tokens, VOCAB_SIZE, grid)
    for num, token in enumerate(answer, start=1):
        if token in request.stop_token_ids and num >= request.min_tokens:
            return answer[:num]
    return answer


def _unpacked(tokens: bytes) -> Sequence[int]:
    return memoryview(tokens).cast("I").tolist()


def _states(state: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    for token in tokens:
        state = consume(state, token)
        yield state


def run(seed: int, num_operations: int = NUM_OPERATIONS) -> Fuzz:
    """Raises RunError at the first thing that is not as it should be."""
    fuzz = Fuzz(seed)
    try:
        while fuzz.num_operations < num_operations:
            fuzz.operate()
        fuzz.finish()
    except Exception as error:
        raise RunError(
            f"seed {seed}, operation {fuzz.num_operations} ({fuzz.shape}): {error!r}"
        ) from error
    return fuzz


def attempt(seed: int, num_operations: int) -> str:
    """What a run complains of; nothing if it is right."""
    try:
        run(seed, num_operations)
    except RunError as error:
        return str(error)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a run failed; the others are made all the same."""
    options = _parse(arguments)
    seeds = range(options.seed, options.seed + options.runs)
    num_jobs = options.jobs or len(os.sched_getaffinity(0))
    try_one = functools.partial(attempt, num_operations=options.operations)
    num_done = num_wrong = 0
    with multiprocessing.Pool(num_jobs) as pool:
        for complaint in pool.imap_unordered(try_one, seeds):
            num_done += 1
            if complaint:
                num_wrong += 1
                print(complaint, flush=True)
            if num_done % PROGRESS_EACH == 0 or num_done == len(seeds):
                print(f"{num_done} of {len(seeds)} runs, {num_wrong} failed", flush=True)
    print(f"seeds {seeds[0]} to {seeds[-1]}, {options.operations} operations each: ", end="")
    print(f"{num_wrong} failed" if num_wrong else "all right")
    return int(num_wrong > 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=_positive, default=NUM_RUNS)
    parser.add_argument("--operations", type=_positive, default=NUM_OPERATIONS)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 is one for each core")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(f"{text}: 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
