"""Steps that verify drafts on a GPU, beside plain decodes: Gated DeltaNet's token mixer beside the
least time that its work can take, and whole steps of a model with dummy weights.

    PYTHONPATH=src:. python bench/kernels/verify.py [--model bench/models/hybrid-9b] [--out FILE]

Every sequence has `drafts` drafts and folds as many, which is the most that a step does. A whole
step is the replay of its graph, up to its logits.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us
from tests.batches import Part, build_batch
from tests.kernels.mixers import REAL, make_projected, make_weights, space
from triton.testing import do_bench

from milepost.kernels.batch import Capacity
from milepost.kernels.device import probe
from milepost.kernels.gated_delta import GatedDeltaOperation, mix
from milepost.models.loading import load_model
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import largest_step
from milepost.runner.pools import PoolShape, allocate
from milepost.runner.staging import on_device
from milepost.scheduler.plans import SequencePlan, StepPlan

CUDA = torch.device("cuda")
DRAFTS, SEQUENCES = (1, 3), (1, 16, 64, 256)
STATE_BYTES = 4 * REAL.value_heads * REAL.key_dim * REAL.value_dim
CONV_BYTES = 2 * REAL.channels * (REAL.taps - 1)
TOKEN_BYTES = 2 * (sum(REAL.sizes) + REAL.values)
RECORD_BYTES = 2 * (REAL.channels + 2 * REAL.value_heads)
POSITION = 500


def mixer_row(num: int, drafts: int) -> Row:
    """One layer's call, over states that outgrow the L2 cache."""
    turns = max(2, -(-64 // num))
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    conv_shape = (REAL.channels, REAL.taps - 1)
    conv_pool = torch.zeros(1 + turns * num, *conv_shape, dtype=torch.bfloat16, device=CUDA)
    states = torch.randn(1, *REAL.state_shape, device=CUDA) * 0.1
    pool = space(states.expand(1 + turns * num, -1, -1, -1), 0)
    size = REAL.channels + 2 * REAL.value_heads
    records = torch.zeros(num, max(drafts, 1), size, dtype=torch.bfloat16, device=CUDA)
    tokens = make_projected(REAL, num * (1 + drafts), torch.bfloat16, "cuda")
    layouts = [_lay_out(num, drafts, 1 + turn * num) for turn in range(turns)]
    calls = [
        lambda layout=layout, slots=slots: mix(
            tokens, weights, conv_pool, pool, slots, slots, layout, records
        )
        for layout, slots in layouts
    ]
    moved = 2 * STATE_BYTES + 2 * CONV_BYTES + (1 + drafts) * TOKEN_BYTES
    return {
        "op": f"mixer, {num} sequences, {drafts} drafts",
        "median_us": time_us(calls),
        "bytes": num * (moved + 2 * drafts * RECORD_BYTES),
        "flops": 0,
    }


def _lay_out(num: int, drafts: int, first: int) -> tuple[object, torch.Tensor]:
    """And the slots."""
    parts = [
        Part(pages=[1], start=9, length=1 + drafts, slot_in=slot, slot_out=slot, fold=drafts)
        for slot in range(first, first + num)
    ]
    batch = build_batch(parts, 64, 0, num)
    capacity = _capacity(num, drafts)
    object.__setattr__(batch, "chip", probe(CUDA))
    object.__setattr__(batch, "capacity", capacity)
    layout = on_device(GatedDeltaOperation(conv_width=REAL.taps).lay_out(batch), CUDA)
    return layout, torch.from_numpy(batch.slot_out.astype(np.int32)).to(CUDA)


def _capacity(num: int, drafts: int) -> Capacity:
    num_tokens = num * (1 + drafts)
    return Capacity(num_tokens=num_tokens, num_sequences=num, decodes=True, num_drafts=drafts)


class Steps:
    """A model with dummy weights and requests of POSITION tokens."""

    def __init__(self, model: str, most: int, drafts: int) -> None:
        self.model, _ = load_model(
            Path(model), dtype=torch.bfloat16, device=CUDA, load_format="dummy", seed=0
        )
        shape = PoolShape(
            specs=self.model.layer_specs,
            page_size=64,
            dtype=torch.bfloat16,
            state_dtype=torch.float32,
            carried_size=self.model.carried_size,
            num_record_rows=most,
            num_drafts=drafts,
        )
        self.num_pages = -(-(POSITION + 1 + drafts) // 64)
        num_pages = 1 + most * self.num_pages
        pools = allocate(shape, num_pages=num_pages, num_slots=most, device=CUDA)
        limits = {"max_num_seqs": most, "max_num_batched_tokens": 8192, "num_drafts": drafts}
        self.executor = DeviceExecutor(
            self.model,
            pools,
            num_requests=most,
            max_model_len=1024,
            largest=largest_step(**limits),
        )
        self.is_new = dict.fromkeys(range(1, most + 1), True)

    def time_us(self, num: int, drafts: int) -> float:
        """Of a step of `num` requests, each with so many drafts."""
        capacity = _capacity(num, drafts)
        self.executor.capture([capacity])
        if drafts:  # what is folded is recorded first
            self.executor.launch(self._plan(num, drafts, 0), None)
        self.executor.launch(self._plan(num, drafts, drafts), None)
        replay = self.executor._graphs.replay
        return do_bench(lambda: replay(capacity), warmup=100, rep=300, return_mode="median") * 1e3

    def _plan(self, num: int, drafts: int, fold: int) -> StepPlan:
        return StepPlan(sequences=tuple(self._part(n, drafts, fold) for n in range(1, num + 1)))

    def _part(self, number: int, drafts: int, fold: int) -> SequencePlan:
        is_new, self.is_new[number] = self.is_new[number], False
        first = 1 + (number - 1) * self.num_pages
        return SequencePlan(
            number=number,
            start=POSITION,
            num_tokens=1 + drafts,
            tokens=array("I", [17 + number] * (1 + drafts)).tobytes(),
            new_pages=tuple(range(first, first + self.num_pages)) if is_new else (),
            write_from=0,
            slot_in=number,
            slot_out=number,
            samples=True,
            fold=fold,
            num_drafts=drafts,
        )


def step_rows(model: str, sequences: tuple[int, ...]) -> list[Row]:
    steps, rows = Steps(model, max(sequences), max(DRAFTS)), []
    steps.executor.compile([_capacity(num, drafts) for num in sequences for drafts in (0, *DRAFTS)])
    for num in sequences:
        plain = steps.time_us(num, 0)
        for drafts in (0, *DRAFTS):
            taken = steps.time_us(num, drafts) if drafts else plain
            print(
                f"{Path(model).name}: {num} sequences, {drafts} drafts: {taken:.0f} us, "
                f"{taken / plain:.2f} of plain",
                flush=True,
            )
            rows.append({"op": f"step, {num} sequences, {drafts} drafts", "median_us": taken})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--sequences", default="1,16,64,256")
    own, sys.argv[1:] = parser.parse_known_args()
    arguments = parse(__doc__)
    with torch.inference_mode():
        if own.model:
            step_rows(own.model, tuple(map(int, own.sequences.split(","))))
            return
        report((mixer_row(n, d) for n in SEQUENCES for d in (0, *DRAFTS)), arguments)


if __name__ == "__main__":
    main()
