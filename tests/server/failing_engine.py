"""A program whose engine fails when it is made. Imports little, since its processes start anew."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from milepost import logs
from milepost.config import EngineConfig
from milepost.engine.processes import EngineClient


def broken(config: EngineConfig) -> NoReturn:
    raise RuntimeError("planted\nin two lines")


async def start() -> None:
    await EngineClient(EngineConfig(), make_engine=broken).start()


def main() -> None:
    logs.set_up(logs.LogSetup(format="json"))
    asyncio.run(start())
