"""Hostile images and URLs, many at a time: what they are answered, and how long /health takes.

    python bench/server_images.py [--count 500] [--beside 16] [--out FILE]

A tiny model on a CPU takes damaged files of every format, decompression bombs, the largest pictures
that are decoded at all, files of other kinds, and URLs that lead to this machine, where a server
listens that counts its visitors and never answers. Meanwhile /health is asked every 20 ms. The
goals: no answer but 200, 400 and 413, no visitor, nothing left, and less than 100 ms of /health.
Beside it stands the same traffic of sound images.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import aiohttp
import rows
from server_bombs import left
from serving import rss_mib, serving

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import pictured_chat
from tests.images.pictures import FORMATS, damaged, encoded, picture
from tests.images.test_hostile_files import BOMBS

FLAGS = (
    *("--cpu-cache-gib", "0.2", "--max-num-seqs", "8", "--served-model-name", "tiny"),
    *("--allowed-media-domains", "localhost", "--max-request-bytes", str(2**25)),
)
EVERY_S = 0.02


def hostile(port: int) -> Iterator[str]:
    """Yields URLs of what is no sound image, without end."""
    files = [encoded(picture(300, 400), kind) for kind in FORMATS]
    large = encoded(picture(64, 64).resize((8192, 8192), 0))
    others = [*BOMBS.values(), large, large[: len(large) // 2], b"", b"<svg>", bytes(2**23)]
    places = [f"localhost:{port}/a", "127.0.0.1/a", "[::1]/a", "169.254.169.254/latest"]
    urls = [f"{kind}://{place}" for kind in ("http", "https", "ftp", "file") for place in places]
    urls += ["data:image/png;base64,!", "data:,", "data:image/png;base64," + "A" * 2**22, "//", ""]
    data, more, seed = cycle(others), cycle(urls), 0
    while True:
        yield from (_url(damaged(file, seed + place)) for place, file in enumerate(files))
        yield _url(next(data))
        yield next(more)
        seed += len(files)


def sound(_: int) -> Iterator[str]:
    """Yields URLs of screenshots, each another, without end."""
    seed = 0
    while True:
        yield _url(encoded(picture(270, 480, seed).resize((1920, 1080)), "JPEG"))
        seed += 1


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def watch(http: aiohttp.ClientSession, url: str, seconds: list[float]) -> None:
    """Notes how long /health takes, until it is cancelled."""
    while True:
        began = time.perf_counter()
        async with http.get(f"{url}/health") as response:
            await response.read()
            assert response.status == 200
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(EVERY_S)


async def send(
    http: aiohttp.ClientSession, url: str, images: Iterator[str], statuses: Counter[int]
) -> None:
    """Sends one image after the other."""
    for image in images:
        part = {"type": "image_url", "image_url": {"url": image, "detail": "low"}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.read()
        statuses[response.status] += 1


async def measure(url: str, make: Any, count: int, beside: int) -> dict[str, Any]:
    visitors: list[int] = []
    seconds: list[float] = []
    statuses = Counter[int]()
    silent = await asyncio.start_server(lambda *_: visitors.append(1), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    # All are made before any is sent, and one iterator serves all senders.
    images = iter(list(islice(make(port), count)))
    async with aiohttp.ClientSession() as http, silent:
        watching = asyncio.create_task(watch(http, url, seconds))
        began = time.perf_counter()
        await asyncio.gather(*(send(http, url, images, statuses) for _ in range(beside)))
        took = time.perf_counter() - began
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        rest = await left(http, url)
    return {
        "images": make.__name__,
        "statuses": dict(statuses),
        "seconds": round(took, 2),
        "health": rows.percentiles(seconds),
        "longest_health_s": round(max(seconds), 4),
        "num_health": len(seconds),
        "visitors": len(visitors),
        "left": rest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--beside", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = pictured_chat.save(Path(folder))
        with serving((str(model), *FLAGS)) as server:
            for make in (sound, hostile):
                before = rss_mib(server.process.pid)
                row = asyncio.run(measure(server.url, make, options.count, options.beside))
                row["grown_mib"] = round(rss_mib(server.process.pid) - before)
                print(row, flush=True)
                found.append(rows.provenance() | row)
    if options.out:
        rows.write(options.out, found)


if __name__ == "__main__":
    main()
