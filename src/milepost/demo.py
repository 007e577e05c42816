"""The main job on the embedded model, for someone who has just cloned the project: `make demo`.

One system prompt, three questions, and a follow-up turn of the last one. After each answer stands
how many prompt tokens came from the cache, and why the others did not.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console

from milepost.cli.display import Screen, Shown
from milepost.engine.llm import LLM
from milepost.sampling_params import SamplingParams

SYSTEM = (
    "You are a helpful assistant who knows the Python standard library. Answer questions about "
    "modules, classes and functions from the official documentation. Be brief and exact, say what "
    "is returned and which exceptions are raised, and show a short example only when you are asked "
    "for one. If a name exists in several modules, say which one you mean. If you do not know a "
    "name, say so."
)
QUESTIONS = (
    "What does `str.partition` do?",
    "What does `os.path.join` do?",
    "What does `itertools.chain` do?",
)
FOLLOW_UP = "What arguments does it take?"


def main() -> None:
    screen = Screen(
        answers=sys.stdout,
        reports=Console(stderr=True, highlight=False),
        clock=time.perf_counter,
    )
    params = SamplingParams(temperature=0, max_tokens=160)
    with screen.waiting("loading the embedded model"):
        llm = LLM(device="cpu")
    history = [{"role": "system", "content": SYSTEM}]
    shown: list[Shown] = []
    for question in (*QUESTIONS, FOLLOW_UP):
        follows_up = question is FOLLOW_UP
        if not follows_up:
            history = history[:1]
        history.append({"role": "user", "content": question})
        label = f"{question} (same conversation)" if follows_up else question
        screen.heading(len(shown) + 1, len(QUESTIONS) + 1, label)
        shown.append(screen.show(label, llm.stream_chat(history, params), params))
        answer = shown[-1].output.outputs[0].text
        history.append({"role": "assistant", "content": answer})
    screen.summary(shown)


if __name__ == "__main__":
    main()
