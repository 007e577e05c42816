"""Made-up traffic for those without a trace: coding agents, chats, or both.

An *agent* reads a long context after one of a few system prompts, and then calls tools: many turns
a few seconds apart, sometimes one for which a person thinks. A *chat* has a short system prompt,
which all chats share, and a few questions with a person's pauses. Lengths and pauses are drawn from
distributions; the same seed makes the same traffic.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from milepost.simulator.trace import Trace, TraceRequest

PAGE_SIZE = 64
START_S = 600.0
"""Time within which sessions start, evenly at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """One kind of session. Lengths are medians in tokens, of log-normal distributions."""

    name: str
    num_systems: int
    """Number of system prompts in use."""
    system_length: int
    first_length: int
    answer_length: int
    added_length: int
    """Tokens that a turn adds to the previous answer: a tool's result, or a question."""
    num_turns: float
    """Mean number of turns."""
    tool_s: float
    """Mean pause while a tool runs."""
    person_s: float
    """Mean pause while a person thinks."""
    tool_share: float
    """Share of the pauses that are a tool's."""


AGENT = Habit(
    name="agent",
    num_systems=3,
    system_length=8192,
    first_length=20_000,
    answer_length=200,
    added_length=800,
    num_turns=15,
    tool_s=8.0,
    person_s=90.0,
    tool_share=0.8,
)
CHAT = Habit(
    name="chat",
    num_systems=1,
    system_length=1024,
    first_length=300,
    answer_length=300,
    added_length=100,
    num_turns=5,
    tool_s=0.0,
    person_s=40.0,
    tool_share=0.0,
)
MADE = {"agents": (AGENT,), "chats": (CHAT,), "agents+chats": (AGENT, CHAT, CHAT)}
"""Traffic by name: sessions have these habits in turn."""


class _Maker:
    """Draws sessions, and numbers their pages."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.requests: list[TraceRequest] = []
        self.num_ids = 0
        self._systems: dict[Habit, list[list[int]]] = {}

    def add_session(self, habit: Habit, name: str) -> None:
        """Adds the requests of one session."""
        draw = self._random
        prompt = [*draw.choice(self._systems_of(habit)), *self._pages(habit.first_length)]
        now_s, think_s = draw.uniform(0, START_S), 0.0
        for _ in range(1 + int(draw.expovariate(1 / habit.num_turns))):
            answer_length = self._length(habit.answer_length)
            request = TraceRequest(
                arrival_s=now_s,
                input_length=len(prompt) * PAGE_SIZE + 1,
                output_length=answer_length,
                page_ids=array("I", prompt),
                session=name,
                think_s=think_s,
            )
            self.requests.append(request)
            added = self._length(habit.added_length)
            prompt += self._new_pages(ceil((answer_length + added) / PAGE_SIZE))
            is_tool = draw.random() < habit.tool_share
            think_s = draw.expovariate(1 / (habit.tool_s if is_tool else habit.person_s))
            now_s += think_s

    def _systems_of(self, habit: Habit) -> list[list[int]]:
        if habit not in self._systems:
            num_pages = habit.system_length // PAGE_SIZE
            self._systems[habit] = [self._new_pages(num_pages) for _ in range(habit.num_systems)]
        return self._systems[habit]

    def _length(self, median: int) -> int:
        return 1 + int(median * self._random.lognormvariate(0.0, 0.8))

    def _pages(self, median_length: int) -> list[int]:
        return self._new_pages(ceil(self._length(median_length) / PAGE_SIZE))

    def _new_pages(self, num: int) -> list[int]:
        self.num_ids += num
        return list(range(self.num_ids - num, self.num_ids))


def make_trace(name: str, num_sessions: int, *, seed: int = 0) -> Trace:
    """Makes the traffic of that many sessions; `name` is one of `MADE`."""
    return make_sessions(MADE[name], num_sessions, name=name, seed=seed)


def make_sessions(
    habits: Sequence[Habit], num_sessions: int, *, name: str = "sessions", seed: int = 0
) -> Trace:
    """Makes the traffic of that many sessions, which have these habits in turn."""
    maker = _Maker(seed)
    for number in range(num_sessions):
        habit = habits[number % len(habits)]
        maker.add_session(habit, f"{habit.name} {number}")
    requests = sorted(maker.requests, key=lambda request: request.arrival_s)
    num_ids = maker.num_ids
    for request in requests:
        request.own_id = num_ids
        total = request.input_length + request.output_length
        num_ids += total // PAGE_SIZE + 1 - len(request.page_ids)
    name = f"{num_sessions} {name}"
    return Trace(name=name, page_size=PAGE_SIZE, requests=requests, num_page_ids=num_ids)
