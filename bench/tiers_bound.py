"""What host memory would be worth to agents with more conversations than the device holds, and what
a tier without any way would be: `bench/tiers.py --only agents` in virtual time.

    python bench/tiers_bound.py [--gib 4 8 16] [--host-gb-s 20 40]

64 conversations of 6,000 tokens; in each turn all ask at once, with 200 tokens more, for 24. One
JSON row for each size of the device's memory and each way: without tiers, by links of so many GB a
second, by one that takes no time, and with memory for all of them on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from array import array

from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.fleet import Fleet, Shape
from milepost.simulator.policies import AUTO
from milepost.simulator.tiers import TierSizes
from milepost.simulator.trace import Trace, TraceRequest

PAGE_SIZE, NUM, LENGTH, NEW = 64, 64, 6000, 200
TURNS, TURN_S, FIRST_OUT, OUT = 5, 100.0, 8, 24
ENOUGH_GIB = 64.0


def conversations() -> Trace:
    ids: dict[tuple[int, int], int] = {}
    requests = []
    for turn in range(TURNS):
        for number in range(NUM):
            length = LENGTH + (FIRST_OUT + NEW + (turn - 1) * (OUT + NEW) if turn else 0)
            pages = [(number, index) for index in range(length // PAGE_SIZE)]
            asked = TraceRequest(
                arrival_s=turn * TURN_S,
                input_length=length,
                output_length=OUT if turn else FIRST_OUT,
                page_ids=array("I", [ids.setdefault(page, len(ids)) for page in pages]),
            )
            requests.append(asked)
    num_ids = len(ids)
    for request in requests:
        request.own_id = num_ids
        num_ids += 2 + request.output_length // PAGE_SIZE
    trace = Trace(name="agents", page_size=PAGE_SIZE, requests=requests, num_page_ids=num_ids)
    trace.link_answers()
    return trace


def turn_seconds(cost: CostModel, gib: float, tiers: TierSizes | None) -> tuple[float, float]:
    """Of a turn but the first, in the median, and the hit rate of all."""
    num_pages, num_slots = cost.split(int(gib * 2**30), PAGE_SIZE, 64)
    cache = AUTO.memory(cost, num_pages=num_pages, num_slots=num_slots, page_size=PAGE_SIZE)
    fleet = Fleet(conversations(), lambda: cache, cost, Shape(), closed=False, tiers=tiers)
    ends: dict[int, float] = {}

    def note(_num_over: int) -> None:
        turn, since_s = divmod(fleet.now_s, TURN_S)
        ends[int(turn)] = since_s

    stats = fleet.run(note).only.cache.stats
    return statistics.median(list(ends.values())[1:]), stats.hits / stats.queries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[4.0, 8.0, 16.0])
    parser.add_argument("--host-gb-s", type=float, nargs="+", default=[20.0, 40.0])
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    arguments = parser.parse_args()
    cost = read_cost(arguments.cost)
    host_bytes = int(ENOUGH_GIB * 2**30)
    whole_s, _ = turn_seconds(cost, ENOUGH_GIB, None)
    for gib in arguments.gib:
        without_s, hit_rate = turn_seconds(cost, gib, None)
        row = {"gib": gib, "without_s": without_s, "hit_rate": hit_rate}
        for rate in (*arguments.host_gb_s, 1e6):
            tiers = TierSizes(host_bytes=host_bytes, host_bytes_per_s=rate * 1e9)
            seconds, _ = turn_seconds(cost, gib, tiers)
            name = "at_once" if rate == 1e6 else f"{rate:g}_gb_s"
            row |= {f"{name}_s": seconds, f"{name}_times": without_s / seconds}
        row |= {"all_on_device_s": whole_s, "all_on_device_times": without_s / whole_s}
        print(json.dumps({name: round(value, 2) for name, value in row.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
