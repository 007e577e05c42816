"""Run by test_warm in a process of its own, for kernels to be compiled rather than interpreted:
prints what each of two shares would compile, and what a whole start would, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from milepost.config import EngineConfig
from milepost.engine.assembly.warming import WarmShare, compile_share
from milepost.kernels.platform.device import find_chip

TINY = str(Path(__file__).parents[2] / "src" / "milepost" / "tiny")


def main() -> None:
    asked: set[str] = set()

    def note(kernel: Any, key: str, *_: object) -> None:
        asked.add(f"{kernel.__module__}.{kernel.__name__} {key}")

    found: dict[str, list[str]] = {}
    for index, num_shares in ((0, 1), (0, 2), (1, 2)):
        share = WarmShare(
            config=EngineConfig(model=TINY),
            chip=find_chip("sm_89"),
            gpu_bytes=24 * 2**30,
            index=index,
            num_shares=num_shares,
        )
        asked.clear()
        with mock.patch.object(JITFunction, "_do_compile", note):
            compile_share(share)
        found[f"{index} of {num_shares}"] = sorted(asked)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
