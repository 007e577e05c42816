"""The scheduler and the cache against a brute-force model, with every invariant checked after every
step.

The model knows what each page and slot really holds (the fake runner keeps that) and finds by
trying every one of them what a match must report. Answers must be those of a run without any
engine.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milepost.cache import Cache, Chain
from milepost.cache.check import check
from milepost.cache.storage import Arena, Split
from milepost.errors import InvalidRequestError
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import (
    EMPTY,
    FakeRunner,
    Loop,
    cold_answer,
    consume,
    make_request,
    run_all,
    state_after,
)

SALTS = ("", "", "", "tenant-a", "tenant-b")


class Machine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([16, 64, 128]),
        num_tokens=st.sampled_from([512, 768, 1024, 4096]),
        num_slots=st.integers(1, 8),
        mode=st.sampled_from(["auto", "auto", "all", "align", "none"]),
        budget=st.sampled_from([64, 130, 512]),
        max_num_seqs=st.integers(1, 5),
        pages_each=st.sampled_from([0, 1, 2, 5, 16]),
    )
    def build(self, page_size, num_tokens, num_slots, mode, budget, max_num_seqs, pages_each):
        """With `pages_each` one arena in place of two pools."""
        num_pages = num_tokens // page_size
        storage = Split(num_pages, num_slots)
        if pages_each:
            storage = Arena(-(-num_pages // pages_each) + num_slots, pages_each)
        self.cache = Cache(storage=storage, page_size=page_size, mode=mode, block_size=128)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.runner = FakeRunner(page_size=page_size, pages_each=pages_each)
        self.loop = Loop(self.scheduler, self.runner)
        self.requests: list[Request] = []
        self.known: list[list[int]] = [[]]

    def prompt(self, data) -> list[int]:
        """A new prompt: a cut of something known, then tokens of its own."""
        base = data.draw(st.sampled_from(self.known))
        cut = data.draw(st.integers(0, len(base)))
        own = data.draw(st.integers(1, 200))
        token = st.integers(0, 3)
        return [*base[:cut], *data.draw(st.lists(token, min_size=1, max_size=3)), *([1] * own)]

    @rule(data=st.data())
    def submit(self, data):
        self.add(data, self.prompt(data))

    @rule(data=st.data(), num=st.integers(2, 4), shared=st.integers(100, 500))
    def submit_siblings(self, data, num, shared):
        """Several prompts at once that part late."""
        base = [*self.prompt(data), *([2] * shared)]
        for _ in range(num):
            self.add(data, [*base, *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))])

    def add(self, data, prompt: list[int]) -> None:
        marks = data.draw(st.lists(st.integers(1, len(prompt)), max_size=2))
        request = make_request(
            self.cache,
            f"r{len(self.requests)}",
            prompt,
            max_tokens=data.draw(st.sampled_from([1, 2, 17, 64, 150])),
            salt=data.draw(st.sampled_from(SALTS)),
            marks=tuple(sorted(set(marks))),
            priority=data.draw(st.integers(0, 1)),
        )
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            longest = len(prompt) + request.max_tokens
            assert longest > self.cache.capacity
            return
        self.requests.append(request)
        self.known.append(prompt)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(num_steps=st.integers(1, 40), is_ahead=st.booleans())
    def steps(self, num_steps, is_ahead):
        for _ in range(num_steps):
            if not self.scheduler.has_work:
                return
            plan = self.loop.step(is_ahead=is_ahead)
            assert plan.sequences, "work, but no plan"

    @precondition(lambda self: self.scheduler.has_work)
    @rule(was_run=st.booleans())
    def cut_short(self, was_run):
        """A step whose outcome never comes in, whatever it has written."""
        if self.loop.under_way is not None:
            plan, _ = self.loop.under_way
            self.loop.under_way = None
        else:
            plan = self.scheduler.schedule()
            if was_run:
                self.runner.run(plan)
        self.scheduler.retract(plan)
        check(self.cache)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        was_over = request.finish_reason is not None
        assert (self.scheduler.finish(request.id, FinishReason.ABORT) is None) == was_over
        if not self.scheduler.has_work:
            self.loop.drain()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def follow_up(self, data):
        """Make what a finished request answered a prefix of later prompts."""
        request = data.draw(st.sampled_from(self.requests))
        self.known.append(list(request.chain.tokens))

    @rule()
    def reset(self):
        busy = bool(self.scheduler.running)
        assert self.cache.reset() is not busy
        if not busy:
            assert self.cache.pages.num_free == self.cache.pages.total

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def match(self, data, salt):
        chain = self.cache.chain(self.prompt(data), salt)
        before = self.cache.version
        found = self.cache.match(chain)
        assert self.cache.version == before
        if self.cache.enabled:
            assert found.state_length == self.longest_state(chain)
            assert found.kv_length == self.longest_kv(chain)
        report = found.report
        assert report.reused + sum(report.lost.values()) == len(chain)
        assert all(num > 0 for num in report.lost.values())

    @invariant()
    def invariants(self):
        if not hasattr(self, "cache"):
            return
        check(self.cache)
        stats = self.cache.stats
        assert stats.hits + sum(stats.lost.values()) == stats.queries

    def longest_state(self, chain: Chain) -> int:
        """By trying every cached slot."""
        tree = self.cache.tree
        best = 0
        for node in [*tree.roots.values(), *tree.nodes.values()]:
            *_, root = node.ancestors()
            for checkpoint in node.checkpoints.values():
                position = checkpoint.position
                holds = self.runner.slots[checkpoint.slot]
                fits = position < len(chain) and root.digest == chain.root
                if fits and holds == state_after(chain.tokens[:position]):
                    best = max(best, position)
        return best

    def longest_kv(self, chain: Chain) -> int:
        """By trying every page of the tree."""
        size = self.cache.page_size
        pages = set()
        for node in self.cache.tree.nodes.values():
            *_, root = node.ancestors()
            if root.digest == chain.root:
                pages.add(tuple(self.runner.kv[node.page]))
        state, length, page = EMPTY, 0, []
        for token in chain.tokens:
            state = consume(state, token)
            page.append(state)
            if len(page) == size:
                if tuple(page) not in pages:
                    break
                length, page = length + size, []
        return length

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.loop.drain()
        run_all(self.scheduler, self.runner)
        for request in self.requests:
            assert request.finish_reason is not None
            answer = request.output_token_ids
            prompt = request.chain.tokens[: request.num_prompt_tokens]
            assert answer == cold_answer(prompt, len(answer), self.runner.vocab_size)
            if request.finish_reason is FinishReason.LENGTH:
                assert len(answer) == request.max_tokens
        assert self.cache.pages.num_used == 0
        assert self.cache.slots.pool.num_used == 0
        assert self.cache.reset()
        assert self.cache.pages.num_free == self.cache.pages.total
        assert self.cache.slots.pool.num_free == self.cache.slots.pool.total


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
