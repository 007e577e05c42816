"""Defects that were found in other engines, each with a test that would see it here."""

from __future__ import annotations

import ast
import random
import re
import sys
from pathlib import Path

import pytest

import milepost
from milepost.cache import ZERO_SLOT, Cache, Export
from milepost.cache.placement import Kind
from milepost.errors import InvalidRequestError
from milepost.scheduler.budget import max_num_exports
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, cold_answer, make_request, run_all, step
from tests.invariants import check
from tests.scheduler.test_determinism import dump
from tests.scheduler.workload import describe

SOURCE = Path(milepost.__file__).parent
VOCAB_SIZE = 1000


def tokens(num: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=num)


class Bench:
    """A scheduler on a fake runner that refuses wrong contents, with invariants checked."""

    def __init__(
        self,
        *,
        budget: int = 512,
        max_num_seqs: int = 8,
        max_queue_wait_s: float | None = None,
        **cache_options,
    ) -> None:
        options = {"num_pages": 64, "num_slots": 16, "page_size": 16} | cache_options
        self.cache = Cache(**options)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_queue_wait_s=max_queue_wait_s,
        )
        self.runner = FakeRunner(
            self.scheduler, page_size=self.cache.page_size, vocab_size=VOCAB_SIZE
        )
        self._num = 0

    def submit(self, prompt: list[int], **options) -> Request:
        self._num += 1
        request = make_request(self.cache, f"r{self._num}", prompt, **options)
        self.scheduler.add(request)
        return request

    def ask(self, prompt: list[int], **options) -> Request:
        request = self.submit(prompt, **options)
        self.run()
        return request

    def step(self):
        return step(self.scheduler, self.runner)

    def run(self) -> None:
        run_all(self.scheduler, self.runner)

    def is_right(self, request: Request) -> bool:
        prompt = request.chain.tokens[: request.num_prompt_tokens]
        answer = request.output_token_ids
        return answer == cold_answer(prompt, len(answer), VOCAB_SIZE)


@pytest.mark.parametrize("mode", ["auto", "all", "align"])
def test_defect_01_duplicate_pages_of_a_batch_stay_alive(mode):
    """Two requests compute the same prefix in one step; neither's table loses a page to that."""
    bench = Bench(mode=mode, block_size=64)
    shared = tokens(100)
    requests = [bench.submit([*shared, seed], max_tokens=20) for seed in range(3)]
    plan = bench.step()
    assert [(s.start, s.end) for s in plan.sequences] == [(0, 101)] * 3
    tables = [list(request.allocation.page_table) for request in requests]
    assert len({page for table in tables for page in table}) == 3 * 7
    while bench.scheduler.has_work:
        bench.step()
        for request, table in zip(requests, tables, strict=True):
            if request.allocation is not None:
                assert request.allocation.page_table[: len(table)] == table, "append-only"
                assert all(bench.cache.pages.live_refs(page) for page in table)
    assert bench.cache.stats.pages_duplicate == 2 * 6
    assert bench.cache.pages.num_used == 0
    assert all(bench.is_right(request) for request in requests)


def test_defect_02_batches_have_the_same_order_in_every_process():
    """Sequences stand in order of arrival; another hash seed changes nothing."""
    bench = Bench()
    requests = [bench.submit(tokens(30, seed)) for seed in range(6)]
    plan = bench.step()
    assert [sequence.number for sequence in plan.sequences] == [r.number for r in requests]
    assert dump("7") == dump("77")


def test_defect_03_match_changes_nothing():
    """Neither the tree nor the order in which things are evicted."""
    bench = Bench(num_pages=30, num_slots=4)
    prompts = [tokens(100, seed) for seed in range(3)]
    for prompt in prompts:
        bench.ask(prompt)
    running = bench.submit([*prompts[0], 1], max_tokens=30)
    bench.step()

    def snapshot():
        cache = bench.cache
        orders = cache.reclaimer
        orders.settle()
        strays, carriers, states = orders.strays, orders.carriers, orders.states
        nodes = [*cache.tree.roots.values(), *cache.tree.nodes.values()]
        return (
            [(n.digest, n.page, len(n.children), n.num_reaching) for n in nodes],
            [
                (c.position, c.slot, c.used_at, c.end, c.saved, c.num_uses)
                for n in nodes
                for c in n.checkpoints.values()
            ],
            [n.digest for n in strays],
            [[c.slot for c in order] for order in (carriers, states)],
            [cache.pages.live_refs(page) for page in range(30)],
            [cache.slots.live_refs(slot) for slot in range(5)],
            repr(cache.stats),
            cache.reclaimer.version,
        )

    before = snapshot()
    for seed in range(4):
        for salt in ("", "other"):
            for length in (1, 16, 64, 100):
                bench.cache.match(bench.cache.chain(tokens(length, seed), salt))
                bench.cache.match(bench.cache.chain([*tokens(length, seed), 9, 9]), limit=3)
    assert snapshot() == before
    bench.run()
    assert bench.is_right(running)


@pytest.mark.parametrize("mode", ["auto", "all", "align"])
@pytest.mark.parametrize("length", [16, 64, 128, 192])
def test_defect_04_a_fully_cached_prompt_still_computes_its_last_token(mode, length):
    bench = Bench(mode=mode, block_size=64)
    first = bench.ask(tokens(length), max_tokens=70)
    for prompt in (tokens(length), list(first.chain.tokens[:-1]), list(first.chain.tokens)):
        request = bench.submit(prompt)
        plan = bench.step()
        (sequence,) = plan.sequences
        assert len(sequence.tokens) >= 1
        assert sequence.start == request.report.reused < len(prompt)
        bench.run()
        assert bench.is_right(request)


def test_defect_05_a_preempted_request_counts_anew_on_its_return():
    """It goes on from the state it finds then, with no token computed twice or left out."""
    bench = Bench(num_pages=26, budget=256)
    requests = [bench.submit(tokens(100 + 9 * i, i), max_tokens=60) for i in range(3)]
    returned = 0
    while bench.scheduler.has_work:
        preempted = [r for r in requests if r.num_preemptions and r.allocation is None]
        was_waiting = {request.number: request for request in preempted}
        plan = bench.step()
        for sequence in plan.sequences:
            if sequence.number in was_waiting:
                returned += 1
                assert sequence.start > 0, "its return is a hit"
                assert sequence.end >= was_waiting[sequence.number].num_prompt_tokens
    assert returned > 0
    stats = bench.cache.stats
    assert 0 < stats.resumed_hits < stats.resumed_tokens
    assert stats.queries == sum(request.num_prompt_tokens for request in requests)
    assert all(request.report.reused == 0 for request in requests), "as it was admitted first"
    assert all(bench.is_right(request) and request.num_output_tokens == 60 for request in requests)


def test_defect_06_a_reused_page_leaves_no_digest_behind():
    bench = Bench(num_pages=9, num_slots=4)
    old = tokens(100, 0)
    bench.ask(old)
    (pages,) = [{node.page: node.digest for node in bench.cache.tree.nodes.values()}]
    bench.ask(tokens(120, 1))
    reused = [
        (page, digest)
        for page, digest in pages.items()
        if page in bench.cache.tree.at_page and bench.cache.tree.at_page[page].digest != digest
    ]
    assert reused, "pages have gone from one prompt to the other"
    for _, digest in reused:
        assert digest not in bench.cache.tree.nodes
    match = bench.cache.match(bench.cache.chain([*old, 1]))
    assert match.kv_length <= 16 * (len(pages) - len(reused))
    assert match.report.lost["kv_evicted"] > 0
    assert bench.is_right(bench.ask(old))


def test_defect_07_eviction_gives_back_page_ids():
    """Token ids are far from page ids here; what becomes free is what was held."""
    bench = Bench(num_pages=12, num_slots=5)
    for seed in range(6):
        prompt = [100_000 + token for token in tokens(100, seed)]
        bench.ask(prompt, max_tokens=2)
    assert bench.cache.stats.pages_evicted > 0
    assert bench.cache.reset()
    pages = bench.cache.pages
    assert sorted(pages.allocate(12)) == list(range(12))


def test_defect_08_the_pin_holds_the_node_itself():
    """The page under the very state that is resumed, not its ancestors alone."""
    cache = Cache(num_pages=6, num_slots=4, page_size=64)
    bench = Bench()
    bench.cache = cache
    bench.scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=512)
    bench.runner = FakeRunner(bench.scheduler, page_size=64, vocab_size=VOCAB_SIZE)
    bench.ask(tokens(129), max_tokens=1)
    chain = cache.chain([*tokens(128), 7])
    match = cache.match(chain)
    assert match.state_length == 128
    allocation = cache.admit(chain, match)
    deepest = match.path.nodes[-1]
    assert deepest.page == allocation.page_table[1]
    assert cache.pages.live_refs(deepest.page) == 1
    assert cache.slots.live_refs(match.checkpoint.slot) == 1
    greedy = cache.chain(tokens(64 * 4, 9))
    assert cache.admit(greedy, cache.match(greedy)) is None, "there are 3 pages left"
    check(cache)
    filling = cache.chain(tokens(64 * 3, 9))
    assert cache.admit(filling, cache.match(filling)) is not None
    check(cache)
    assert cache.tree.nodes[deepest.digest] is deepest


def test_defect_09_an_idle_step_costs_the_same_however_much_is_cached():
    """And no part of the engine walks over everything to check it."""

    def num_calls(num_prompts: int) -> int:
        bench = Bench(num_pages=4096, num_slots=512, page_size=16)
        for seed in range(num_prompts):
            bench.submit(tokens(64, seed), max_tokens=1)
        run_all(bench.scheduler, bench.runner, checked=False)
        assert len(bench.cache.tree.nodes) == 4 * num_prompts
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        bench.scheduler.schedule()
        sys.setprofile(None)
        return calls

    assert num_calls(2) == num_calls(300) < 20
    users = [
        path.name
        for path in SOURCE.rglob("*.py")
        if "tests.invariants" in path.read_text(encoding="utf-8")
    ]
    assert users == []


def test_defect_10_shared_pages_count_once_in_what_can_be_evicted():
    bench = Bench(num_pages=20, num_slots=8, page_size=16)
    shared = tokens(160)
    for seed in range(3):
        bench.ask([*shared, *tokens(16, 1 + seed)], max_tokens=1)
    pages = bench.cache.pages
    assert pages.num_cached == len(bench.cache.tree.nodes) + _num_tails(bench.cache)
    assert pages.room == 20
    whole = bench.cache.chain(tokens(20 * 16, 77))
    more = bench.cache.chain(tokens(20 * 16 + 1, 77))
    assert bench.cache.admit(more, bench.cache.match(more)) is None
    assert bench.cache.admit(whole, bench.cache.match(whole)) is not None
    assert pages.num_used == 20


def _num_tails(cache: Cache) -> int:
    nodes = [*cache.tree.roots.values(), *cache.tree.nodes.values()]
    tails = {c.tail_page for n in nodes for c in n.checkpoints.values() if c.tail_page is not None}
    return len(tails - {node.page for node in nodes})


# Defect 11, a recursion over a long path: tests/cache/test_long_path.py.


def test_defect_12_a_request_too_long_for_the_pool_is_refused_at_once():
    bench = Bench(num_pages=8, page_size=16)
    with pytest.raises(InvalidRequestError, match="prompt of 120 tokens plus max_tokens=9 needs"):
        bench.submit(tokens(120), max_tokens=9)
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("mode", ["auto", "all", "align", "none"])
def test_defect_12_a_request_as_long_as_the_pool_ends(mode):
    """With others around it, in a bounded number of steps: nobody is requeued for ever."""
    bench = Bench(num_pages=8, num_slots=2, budget=64, mode=mode, block_size=64)
    requests = [bench.submit(tokens(60, 1), max_tokens=40), bench.submit(tokens(120), max_tokens=8)]
    requests += [bench.submit(tokens(90, seed), max_tokens=20) for seed in (2, 3)]
    for _ in range(600):
        if not bench.scheduler.has_work:
            break
        bench.step()
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 4
    assert all(bench.is_right(request) for request in requests)


def test_defect_13_the_finish_reason_is_what_happened():
    """Parameters that have no effect are looked for in tests/engine/test_llm.py."""
    bench = Bench()
    answer = cold_answer(tokens(50), 8, VOCAB_SIZE)
    by_length = bench.submit(tokens(50), max_tokens=8)
    by_stop = bench.submit(tokens(50), max_tokens=8)
    by_stop.stop_token_ids = frozenset({answer[3]})
    too_early = bench.submit(tokens(50), max_tokens=8)
    too_early.stop_token_ids, too_early.min_tokens = frozenset({answer[3]}), 5
    by_abort = bench.submit(tokens(50), max_tokens=8)
    bench.step()
    assert bench.scheduler.finish(by_abort, FinishReason.ABORT)
    bench.run()
    reasons = [r.finish_reason for r in (by_length, by_stop, too_early, by_abort)]
    assert reasons == ["length", "stop", "length", "abort"]
    assert by_stop.output_token_ids == answer[:4]
    assert not bench.scheduler.finish(by_stop, FinishReason.ABORT), "one end is enough"


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_defect_14_a_full_hit_applies_the_last_token_once(page_size):
    """The state behind all but the last token is read, and that token is added to it, once."""
    bench = Bench(page_size=page_size)
    first = bench.ask(tokens(100), max_tokens=30)
    assert first.num_tokens == 130
    request = bench.submit(list(first.chain.tokens))
    plan = bench.step()
    (sequence,) = plan.sequences
    assert (sequence.start, sequence.tokens) == (129, first.chain.token_bytes(129, 130))
    assert request.allocation.state_length == 130
    again = bench.submit(list(first.chain.tokens))
    bench.run()
    assert bench.is_right(request)
    assert again.output_token_ids == request.output_token_ids


def test_defect_15_a_slot_that_was_not_written_is_not_published():
    cache = Cache(num_pages=8, num_slots=4)
    chain = cache.chain(tokens(200))
    allocation = cache.admit(chain, cache.match(chain))
    exports = list(cache.take_exports(allocation, 200))
    assert [export.position for export in exports] == [192]
    with pytest.raises(KeyError):
        cache.commit(allocation, 200, {allocation.slot_out: 200})
    cache = Cache(num_pages=8, num_slots=4)
    allocation = cache.admit(chain, cache.match(chain))
    cache.take_exports(allocation, 200)
    with pytest.raises(AssertionError, match="S4"):
        cache.commit(allocation, 200, {exports[0].slot: 192})
    cache = Cache(num_pages=8, num_slots=4)
    allocation = cache.admit(chain, cache.match(chain))
    cache.release(allocation, Kind.ANSWER_END)
    assert cache.match(chain).state_length == 0
    assert cache.slots.num_free == 4
    check(cache)


def test_defect_15_a_slot_that_holds_another_position_is_not_published():
    cache = Cache(num_pages=8, num_slots=4)
    chain = cache.chain(tokens(200))
    allocation = cache.admit(chain, cache.match(chain))
    (export,) = cache.take_exports(allocation, 200)
    assert export == Export(position=192, slot=export.slot, kind=Kind.PROMPT_END)
    with pytest.raises(AssertionError, match=r"S4: slot .* holds 128 tokens, its label says 192"):
        cache.commit(allocation, 200, {allocation.slot_out: 200, export.slot: 128})


def test_defect_15_the_zero_slot_is_never_written():
    cache = Cache(num_pages=8, num_slots=4)
    chain = cache.chain(tokens(64))
    allocation = cache.admit(chain, cache.match(chain))
    cache.take_exports(allocation, 64)
    allocation.slot_out = ZERO_SLOT
    with pytest.raises(AssertionError, match="S1"):
        cache.commit(allocation, 64, {ZERO_SLOT: 64})
    bench = Bench()
    for _ in range(3):
        for sequence in _plans_of(bench, tokens(100)):
            assert ZERO_SLOT not in (sequence.slot_out, *(e.slot for e in sequence.exports))


def _plans_of(bench: Bench, prompt: list[int]):
    bench.submit(prompt)
    while bench.scheduler.has_work:
        yield from bench.step().sequences


def test_defect_16_no_environment_variable_switches_anything():
    """None is read but keys, since every user of the machine can read a command line, and vLLM's
    name of the bitwise mode, which stands for the flag. Videos put FFmpeg's options there and take
    them back, since OpenCV has no other way for them."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = getattr(node, "attr", None) or getattr(node, "id", None)
            if named in ("environ", "getenv", "environb"):
                found.append(f"{path.relative_to(SOURCE)}: {named}")
    containers = "images/containers.py: environ"
    assert set(found) == {"cli/main.py: environ", "cli/serve.py: environ", containers}
    command = (SOURCE / "cli/main.py").read_text(encoding="utf-8")
    assert re.findall(r".*environ\b.*", command) == [
        "        words = with_environment(words, os.environ)"
    ]
    flags = (SOURCE / "cli/vllm_flags.py").read_text(encoding="utf-8")
    assert re.findall(r"environment\.get\((\w+)", flags) == ["_INVARIANT"]
    serving = (SOURCE / "cli/serve.py").read_text(encoding="utf-8")
    assert re.findall(r"\S*environ\b\S*", serving) == [
        "_keys_of(os.environ)",
        "_admin_keys_of(os.environ)",
    ]
    assert set(re.findall(r"environment\.get\(\"(\w+)\"\)", serving)) == {
        "MILEPOST_API_KEY",
        "VLLM_API_KEY",
        "MILEPOST_ADMIN_KEY",
    }


# --- a step that is taken back --------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3, 9])
def test_step_rolled_back_leaves_nothing_of_what_it_wrote(num_steps):
    """Its requests are computed again; their slots, which may be half written, become free."""
    bench = Bench(budget=130, page_size=64)
    first = bench.ask(tokens(150), max_tokens=5)
    requests = [bench.submit([*first.chain.tokens, seed], max_tokens=12) for seed in range(2)]
    requests.append(bench.submit(tokens(300, 9), max_tokens=12))
    for _ in range(num_steps):
        bench.step()
    plan = bench.scheduler.schedule()
    outputs = [s.slot_out for s in plan.sequences] + [
        export.slot for s in plan.sequences for export in s.exports
    ]
    for slot in outputs:
        bench.runner.slots[slot] = b"half written"
    bench.scheduler.roll_back(plan)
    check(bench.cache)
    assert not bench.scheduler.running
    assert all(bench.cache.slots.live_refs(slot) == 0 for slot in outputs)
    assert all(bench.cache.slots.cached_refs(slot) == 0 for slot in outputs)
    bench.run()
    assert all(bench.is_right(r) and r.num_output_tokens == 12 for r in requests)
    assert describe(plan)


def test_prompts_with_many_marks_keep_no_more_states_than_a_step_has_memory_for():
    """Each state off the grid costs a chunk: what the memory profile ran is the most there is."""
    bench = Bench(num_pages=400, num_slots=200, budget=512, max_num_seqs=8)
    marks = tuple(range(17, 60))
    requests = [bench.submit(tokens(60, i), marks=marks, max_tokens=2) for i in range(8)]
    counts = []
    while bench.scheduler.has_work:
        counts.append(sum(len(s.exports) for s in bench.step().sequences))
    assert max(counts) == max_num_exports(8, 512, 64) == 16
    assert all(map(bench.is_right, requests))
