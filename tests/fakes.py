"""A runner without a model: it executes plans on dictionaries and refuses any plan that reads wrong
contents.

The "KV" of a token is the digest of all tokens up to it, a "state" is the same for what a slot has
consumed. So any page or state that came back wrong, stale, half-written or under another salt is
seen at the next read. The sampled token is a function of the digest: a request's answer depends on
its tokens alone, and on nothing of how it was batched, cached, preempted or resumed.

In the bitwise mode the digest of a token is another one if it was computed in the last chunk of a
prompt, or as part of an answer: so it would be seen if those were reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from milepost.cache import ZERO_SLOT, Cache
from milepost.cache.placement import floor
from milepost.cache.plans import HOLE
from milepost.cache.tree import HYBRID, LayerKind, window_of
from milepost.pictures import Picture
from milepost.scheduler.plans import SequencePlan, StepPlan, StepResult, Store
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from tests.invariants import check

EMPTY = b""
_DECODER = msgspec.msgpack.Decoder(StepPlan)


DECODED, CUT = b"decoded", b"cut"
"""How a token's digest says that it belongs to an answer, or to a prompt's last chunk."""


def consume(state: bytes, token: int, rounding: bytes = b"") -> bytes:
    """The "state" after one more token; also that token's "KV"."""
    held = state + token.to_bytes(4, "little")
    return blake2b(held, digest_size=8, person=rounding).digest()


def rounding_at(position: int, prompt_length: int, grid: int) -> bytes:
    """How the bitwise mode on this grid rounds a request's token; 0 is the default mode."""
    if not grid or position < floor(prompt_length, grid):
        return b""
    return CUT if position < prompt_length else DECODED


def state_after(tokens: Sequence[int]) -> bytes:
    state = EMPTY
    for token in tokens:
        state = consume(state, token)
    return state


def next_token(state: bytes, vocab_size: int) -> int:
    return int.from_bytes(state, "little") % vocab_size


def cold_answer(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, grid: int = 0
) -> list[int]:
    """What the model answers, token by token, without any engine; in the bitwise mode with the
    mode's grid."""
    state, answer = EMPTY, list[int]()
    for position, token in enumerate(prompt):
        state = consume(state, token, rounding_at(position, len(prompt), grid))
    for _ in range(num_tokens):
        answer.append(next_token(state, vocab_size))
        state = consume(state, answer[-1], DECODED if grid else b"")
    return answer


def outcome(plan: StepPlan) -> StepResult:
    """The report of a step that samples the token 0."""
    tokens = {sequence.number: [0] for sequence in plan.sequences if sequence.samples}
    return StepResult(tokens=tokens, written=plan.written, seconds=1.0)


class FakeRunner:
    """Executes the plans of `scheduler`; AssertionError where one reads what isn't there.

    Plans come as bytes, and page tables are kept by what they say; only what a request's tokens are
    is looked up. `bitwise` is the grid of the bitwise mode, 0 without it: then each part of a step
    has to be run by the kernels that a cold run has. With `pages_each` slot u lies where the pages
    from u x pages_each on do: writing one kind destroys the other. Of `kinds` counts where states
    lie, and how far back KV is read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        page_size: int,
        vocab_size: int = 4,
        pages_each: int = 0,
        kinds: tuple[LayerKind, ...] = HYBRID,
        bitwise: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.bitwise = bitwise
        self.page_size = page_size
        self.pages_each = pages_each
        self.vocab_size = vocab_size
        self.uses_slots = any(kind.where == "slot" for kind in kinds)
        self.uses_pages = any(kind.where == "page" for kind in kinds)
        self.window = window_of(kinds)
        self.windows: dict[int, list[bytes]] = {}
        """Pages of layers with sliding windows."""
        self.window_tables: dict[int, list[int]] = {}
        self.kv: dict[int, list[bytes]] = {}
        self.beside: dict[int, bytes] = {}
        """The state that lies beside a page."""
        self.tables: dict[int, list[int]] = {}
        self.records: dict[int, list[bytes]] = {}
        """What the last step that verified drafts has computed, token by token."""
        self._history: dict[Request, list[bytes]] = {}
        self.slots: dict[int, bytes] = {ZERO_SLOT: EMPTY}
        self.positions: dict[int, int] = {ZERO_SLOT: 0}
        self._written: dict[int, int] = {}
        self.num_tokens = 0
        self.num_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        sent = _DECODER.decode(msgspec.msgpack.encode(plan))
        assert sent == plan
        return self._run(sent)

    def _run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        assert len(plan.sequences) <= self.scheduler.max_num_seqs, "no room is kept for more"
        self._check_outputs(plan)
        self.follow_tables(plan)
        self.copy(plan)
        for sequence in plan.sequences:
            self._copy_page(sequence)
        states = [self._state(sequence) for sequence in plan.sequences]
        self._written = {}
        tokens: dict[int, list[int]] = {}
        for sequence, state in zip(plan.sequences, states, strict=True):
            run = self._compute(sequence, state)
            if sequence.samples:
                tokens[sequence.number] = run
        return StepResult(tokens=tokens, written=self._written, seconds=1.0)

    def copy(self, plan: StepPlan) -> None:
        """What comes before anything is computed."""
        for num_moves in range(len(plan.moves) + 1):
            for store in plan.stores:
                if store.num_moves == num_moves:
                    self.store(store)
            for move in plan.moves[num_moves : num_moves + 1]:
                self.kv[move.target] = list(self.kv[move.source])
                self.beside[move.target] = self.beside.get(move.source, EMPTY)

    def store(self, store: Store) -> None:
        """Whoever keeps what leaves does so here."""
        raise AssertionError(f"nobody keeps {store}")

    def put_page(self, page: int, states: list[bytes]) -> None:
        """Fill a page from outside."""
        self._page(page)[:] = states

    def put_window(self, page: int, states: list[bytes]) -> None:
        """Fill a page of windows from outside."""
        self._window(page)[:] = states + [EMPTY] * (self.page_size - len(states))

    def put_state(self, slot: int, state: bytes, position: int) -> None:
        """Fill a slot from outside."""
        self._write(slot, state, position)

    def _state(self, sequence: SequencePlan) -> bytes | None:
        """What the recurrent layers go on from; None if there are none."""
        start, held = sequence.start, None
        if self.uses_slots:
            assert self.positions[sequence.slot_in] == start - sequence.fold
            held = self.slots[sequence.slot_in]
        if self.uses_pages:
            beside = EMPTY
            if start:
                beside = self.beside[self.tables[sequence.number][(start - 1) // self.page_size]]
            assert held in (None, beside), "the state in the slot is that beside the page"
            held = beside
        return held

    def follow_tables(self, plan: StepPlan) -> None:
        for number in plan.ended:
            self.tables.pop(number, None)
            self.window_tables.pop(number, None)
            self.records.pop(number, None)
        for sequence in plan.sequences:
            table = self.tables.setdefault(sequence.number, [])
            table.extend(sequence.new_pages)
            assert len(table) * self.page_size >= sequence.end, "the table covers the step"
            allocation = self.scheduler.request(sequence.number).allocation
            assert allocation is not None
            own = zip(table, allocation.page_table, strict=False)
            assert all(page == named for page, named in own), "the request's own"
            windows = self.window_tables.setdefault(sequence.number, [])
            windows.extend(sequence.new_windows)
            if self.window:
                assert len(windows) * self.page_size >= sequence.end, "the table covers the step"
                held = zip(windows, allocation.window_table, strict=False)
                assert all(page == named or named == HOLE for page, named in held), "its own"
            else:
                assert not windows

    def _check_outputs(self, plan: StepPlan) -> None:
        outputs = [s.slot_out for s in plan.sequences] if self.uses_slots else []
        outputs += [export.slot for s in plan.sequences for export in s.exports]
        assert ZERO_SLOT not in outputs
        assert len(set(outputs)) == len(outputs)
        for sequence in plan.sequences:
            assert sequence.slot_in == sequence.slot_out or sequence.slot_in not in outputs

    def _copy_page(self, sequence: SequencePlan) -> None:
        copy = sequence.page_copy
        if copy is not None:
            self._page(copy.target)[: copy.num_tokens] = self.kv[copy.source][: copy.num_tokens]
        copy = sequence.window_copy
        if copy is not None:
            page = self.windows[copy.source][: copy.num_tokens]
            self._window(copy.target)[:] = page + [EMPTY] * (self.page_size - copy.num_tokens)

    def _compute(self, sequence: SequencePlan, state: bytes | None) -> list[int]:
        """The run of tokens behind what is computed."""
        request = self.scheduler.request(sequence.number)
        history = self.history(request)
        if self.bitwise:
            self._check_kernels(sequence, request)
        if sequence.is_ahead:
            assert len(history) == sequence.end, (
                "the token ahead is the one behind the chain's last"
            )
            ahead = next_token(history[-1], self.vocab_size)
            history = [*history, consume(history[-1], ahead, self._rounding(request, sequence.end))]
        begin = sequence.start - sequence.fold
        assert state in (None, history[begin]), f"{request.id} resumed from a wrong state"
        if sequence.fold:
            folded = self.records[sequence.number][: sequence.fold]
            assert folded == history[begin + 1 : sequence.start + 1], "folds what was computed"
        if sequence.num_drafts:
            return self._verify(sequence, history)
        for position in range(max(sequence.start, sequence.write_from), sequence.end):
            page = self.tables[sequence.number][position // self.page_size]
            self._page(page)[position % self.page_size] = history[position + 1]
            self.beside[page] = history[position + 1]
        for position in range(sequence.start, sequence.end):
            self._write_window(sequence, position, history[position + 1])
        for export in sequence.exports:
            assert sequence.start < export.position <= sequence.end
            self._write(export.slot, history[export.position], export.position)
        if self.uses_slots:
            self._write(sequence.slot_out, history[sequence.end], sequence.end)
        self._check_kv(sequence, history, sequence.end)
        return [next_token(history[sequence.end], self.vocab_size)]

    def _check_kernels(self, sequence: SequencePlan, request: Request) -> None:
        """Prompts are cut on the grid and run by prefill's kernels, answers by decode's."""
        if not sequence.num_tokens:
            return
        length = request.num_prompt_tokens
        assert sequence.is_decode == (sequence.start >= length), "each by its own kernels"
        if not sequence.is_decode:
            assert sequence.start % self.bitwise == 0, "a chunk begins on the grid"
            assert sequence.end % self.bitwise == 0 or sequence.end == length, "and ends there"
            assert all(export.position % self.bitwise == 0 for export in sequence.exports)

    def _rounding(self, request: Request, position: int) -> bytes:
        return rounding_at(position, request.num_prompt_tokens, self.bitwise)

    def _verify(self, sequence: SequencePlan, history: list[bytes]) -> list[int]:
        """Compute the last token and drafts: their KV is written, the state stays before them."""
        tokens = memoryview(sequence.tokens).cast("I").tolist()
        if sequence.samples:
            assert len(history) == sequence.start + 2, "drafts stand behind the chain's last token"
        if sequence.fold:
            self._write(sequence.slot_out, history[sequence.start], sequence.start)
        state, states, run = history[sequence.start], [], []
        for index, token in enumerate(tokens):
            state = consume(state, token, DECODED if self.bitwise else b"")
            states.append(state)
            position = sequence.start + index
            page = self.tables[sequence.number][position // self.page_size]
            self._page(page)[position % self.page_size] = state
            self._write_window(sequence, position, state)
            if len(run) == index and (not run or run[-1] == token):
                run.append(next_token(state, self.vocab_size))
        if not sequence.samples:
            own = history[sequence.start + 1 : sequence.end + 1]
            assert states == own, "drafts that nothing is sampled behind are the answer's own"
        self.records[sequence.number] = states
        self._check_kv(sequence, history, sequence.start + 1)
        return run

    def _check_kv(self, sequence: SequencePlan, history: list[bytes], length: int) -> None:
        """All that attention reads: the KV of every token so far, and that in the first one's
        window."""
        self._check_pages(self.kv, self.tables[sequence.number], history, 0, length)
        if self.window:
            first = max(sequence.start + 1 - self.window, 0)
            table = self.window_tables[sequence.number]
            self._check_pages(self.windows, table, history, first, length)
            allocation = self.scheduler.request(sequence.number).allocation
            assert allocation is not None
            held = allocation.window_table[first // self.page_size :]
            assert HOLE not in held, "what is read is held"

    def _check_pages(
        self,
        pages: dict[int, list[bytes]],
        table: list[int],
        history: list[bytes],
        first: int,
        length: int,
    ) -> None:
        for start in range(floor(first, self.page_size), length, self.page_size):
            end, skipped = min(start + self.page_size, length), max(first - start, 0)
            found = pages[table[start // self.page_size]][skipped : end - start]
            assert found == history[start + skipped + 1 : end + 1], (
                f"wrong KV is read in [{start}, {end})"
            )

    def history(self, request: Request) -> list[bytes]:
        """The true state after 0, 1, 2 ... tokens of a request."""
        history = self._history.setdefault(request, [EMPTY])
        for token in request.chain.tokens[len(history) - 1 :]:
            rounding = self._rounding(request, len(history) - 1)
            history.append(consume(history[-1], token, rounding))
        return history

    def _page(self, page: int) -> list[bytes]:
        if self.pages_each:
            self.slots.pop(page // self.pages_each, None)
        return self.kv.setdefault(page, [EMPTY] * self.page_size)

    def _window(self, page: int) -> list[bytes]:
        return self.windows.setdefault(page, [EMPTY] * self.page_size)

    def _write_window(self, sequence: SequencePlan, position: int, state: bytes) -> None:
        """Whatever is computed is written, in pages of the request's own."""
        if self.window:
            page = self.window_tables[sequence.number][position // self.page_size]
            self._window(page)[position % self.page_size] = state

    def _write(self, slot: int, state: bytes, position: int) -> None:
        for page in range(slot * self.pages_each, (slot + 1) * self.pages_each):
            self.kv.pop(page, None)
        self.slots[slot] = state
        self.positions[slot] = self._written[slot] = position


def make_request(
    cache: Cache,
    id_: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    salt: str = "",
    marks: tuple[int, ...] = (),
    priority: int = 0,
    pictures: Sequence[Picture] = (),
) -> Request:
    return Request(
        id=id_,
        chain=cache.chain(prompt, salt, pictures),
        max_tokens=max_tokens,
        marks=marks,
        priority=priority,
        is_bitwise=cache.config.bitwise,
    )


class Loop:
    """The engine's loop with steps ahead: at most two are under way."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.under_way: tuple[StepPlan, StepResult] | None = None

    def step(self, *, is_ahead: bool) -> StepPlan:
        """Take the outcome of one step; with `is_ahead`, run the one behind it first if it is
        known."""
        plan, result = self.under_way or self._run(self.scheduler.schedule())
        follow = self.scheduler.follow(plan) if is_ahead else None
        check(self.scheduler.cache)
        self.under_way = self._run(follow) if follow is not None else None
        self.scheduler.update(plan, result)
        check(self.scheduler.cache)
        if not self.scheduler.has_work:
            self.drain()
        return plan

    def drain(self) -> None:
        if self.under_way is not None:
            self.scheduler.update(*self.under_way)
            self.under_way = None

    def _run(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        return plan, self.runner.run(plan)


def step(scheduler: Scheduler, runner: FakeRunner, *, checked: bool = True) -> StepPlan:
    """One step of the loop, with every invariant checked before and after."""
    plan = scheduler.schedule()
    if checked:
        check(scheduler.cache)
    scheduler.update(plan, runner.run(plan))
    if checked:
        check(scheduler.cache)
    return plan


def run_all(scheduler: Scheduler, runner: FakeRunner, *, checked: bool = True) -> None:
    """Run until nothing is left; every step makes progress."""
    while scheduler.has_work:
        plan = step(scheduler, runner, checked=checked)
        assert plan.sequences, "the scheduler has work but plans nothing"
