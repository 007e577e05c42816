"""Programs that end without closing their engine:
`python -m tests.engine.programs KIND MODEL FOLDER WAY...`, where KIND is `LLM` or `AsyncLLM`.

Each way is a process of its own, forked once all is imported. No file is written before the engine
is being closed, so what an engine does not wait for is missing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from milepost import LLM, AsyncLLM
from milepost.engine.loop.core import Engine
from milepost.tiers.disk import Disk
from milepost.tiers.files import Files
from tests.engines import greedy, open_llm, prompt, tokens

NUM_PROMPTS = 8
PROMPT_LEN = 150
WAYS = {"end": 0, "exception": 1, "sigterm": -signal.SIGTERM}
"""How a program ends, and its exit status."""


def options(folder: Path, way: str) -> dict[str, object]:
    return {"num_pages": 256, "num_slots": 32, "cache_dir": str(folder / way)}


def hold_writes_until_close() -> None:
    is_closing = threading.Event()
    write, close = Files.write, Disk.close

    def held(self, *given):
        assert is_closing.wait(60)
        return write(self, *given)

    def closing(self, *given):
        is_closing.set()
        return close(self, *given)

    Files.write, Disk.close = held, closing


def gated_engine(config) -> Engine:
    """In an engine's own process."""
    hold_writes_until_close()
    return Engine(config)


def use_llm(model: Path, folder: Path, way: str) -> LLM:
    """Has answers, and one that is still running."""
    llm = open_llm(model, **options(folder, way))
    asked = [prompt(tokens(PROMPT_LEN, seed)) for seed in range(NUM_PROMPTS)]
    llm.generate(asked, greedy(), use_tqdm=False)
    llm.running = llm.stream(prompt(tokens(40, seed=99)), greedy(2000))
    next(llm.running)
    return llm


def use_async_llm(model: Path, folder: Path, way: str) -> AsyncLLM:
    """Likewise. Its event loop has ended by the time that the program does."""
    from tests.engine import programs  # as `__main__` the engine's process would not find it

    llm = AsyncLLM(model, skip_tokenizer_init=True, **options(folder, way))
    llm._client._process._make_engine = programs.gated_engine

    async def answer(seed: int) -> None:
        async for _ in llm.generate(tokens(PROMPT_LEN, seed), greedy()):
            pass

    async def use() -> None:
        await asyncio.gather(*map(answer, range(NUM_PROMPTS)))
        await anext(llm.generate(tokens(40, seed=99), greedy(2000)))

    asyncio.run(use())
    return llm


def end(way: str) -> None:
    if way == "exception":
        raise RuntimeError("the program has a defect")
    if way == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


def main() -> None:
    """Prints each way's exit status."""
    kind, model, folder, *ways = sys.argv[1:]
    use = use_llm if kind == "LLM" else use_async_llm
    for way in ways:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            hold_writes_until_close()
            globals()["kept"] = use(Path(model), Path(folder), way)
            end(way)
            return
        print(way, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
