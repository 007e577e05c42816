"""Shows prefix caching on the embedded model, for someone who has just cloned the project: `make
demo`.

The demo runs one system prompt, three questions, and a follow-up turn of the last one. Each answer
is followed by the number of prompt tokens that came from the cache, and why the others did not.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console

from milepost.cli.display import Screen, Shown
from milepost.engine.llm import LLM
from milepost.sampling_params import SamplingParams

SYSTEM = (
    "You are Milepost-tiny, an assistant for Python's standard library. Answer questions about "
    "modules, classes and functions from the official documentation, in the documentation's own "
    "words where you can. Be brief and exact: say what is returned, which arguments are optional "
    "and which exceptions are raised. Write names as code. If a name exists in several modules, "
    "say which one you mean, and if it was added in a certain version, say so when you are asked. "
    "Show an example only when somebody asks for one, and keep it short enough to type in. If you "
    "do not know a name, say that you do not know it rather than making something up."
)
QUESTIONS = (
    "What does `str.partition` do?",
    "What does `os.path.join` do?",
    "What does `itertools.chain` do?",
)
FOLLOW_UP = "What arguments does it take?"


def main() -> None:
    """Asks the embedded model questions, and shows each answer's cache report."""
    screen = Screen(
        answers=sys.stdout,
        reports=Console(stderr=True, highlight=False),
        clock=time.perf_counter,
    )
    params = SamplingParams(temperature=0, max_tokens=160)
    screen.loading(None)
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
