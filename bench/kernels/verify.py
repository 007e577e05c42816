"""Steps that verify drafts on a GPU, beside plain decodes: token mixers beside the least time that
their work can take, and whole steps of a model with dummy weights.

    PYTHONPATH=src:. python bench/kernels/verify.py [--model bench/models/hybrid-9b] [--out FILE]

Every sequence has `drafts` drafts and folds as many, which is the most that a step does. A whole
step is the replay of its graph, up to its logits. Of KDA two copies are timed with it, of what its
layer has in tensors of their own.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from math import prod
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us
from tests.batches import Part, build_batch
from tests.kernels import kimi, ssd
from tests.kernels.mixers import REAL, MixerShapes, Pools, make_projected, space
from tests.kernels.verifying import MIXERS
from triton.testing import do_bench

from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import probe
from milepost.models.loading import LoadOptions, load_model
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import largest_step
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import allocate
from milepost.runner.staging import on_device
from milepost.scheduler.plans import SequencePlan, StepPlan

CUDA = torch.device("cuda")
DRAFTS, SEQUENCES = (1, 3), (1, 16, 64, 256)
SHAPES: dict[str, MixerShapes] = {
    "gated delta": REAL,
    "kda": kimi.REAL,
    "mamba2": ssd.NEMOTRON,
}
POSITION = 500


def mixer_row(name: str, num: int, drafts: int) -> Row:
    """One layer's call, over states that outgrow the L2 cache."""
    turns = max(2, -(-64 // num))
    shapes = SHAPES[name]
    mixer = MIXERS[type(shapes)]
    weights = mixer.make_weights(shapes, torch.bfloat16, "cuda")
    conv_shape = (shapes.channels, shapes.taps - 1)
    conv_pool = torch.zeros(1 + turns * num, *conv_shape, dtype=torch.bfloat16, device=CUDA)
    states = torch.randn(1, *shapes.state_shape, device=CUDA) * 0.1
    pools = Pools(conv=conv_pool, recurrent=space(states.expand(1 + turns * num, -1, -1, -1), 0))
    size = len(shapes.recorded)
    records = torch.zeros(num, max(drafts, 1), size, dtype=torch.bfloat16, device=CUDA)
    tokens = make_projected(shapes, num * (1 + drafts), torch.bfloat16, "cuda")
    layouts = [_lay_out(shapes, num, drafts, 1 + turn * num) for turn in range(turns)]
    calls = [
        lambda layout=layout, slots=slots: mixer.launch(
            shapes, tokens, weights, pools, layout, (slots, slots), records
        )
        for layout, slots in layouts
    ]
    state_bytes, conv_bytes = 4 * prod(shapes.state_shape), 2 * prod(conv_shape)
    token_bytes = 2 * (sum(shapes.sizes) + calls[0]().shape[1])
    moved = 2 * state_bytes + 2 * conv_bytes + (1 + drafts) * token_bytes
    return {
        "op": f"{name}, {num} sequences, {drafts} drafts",
        "median_us": time_us(calls),
        "bytes": num * (moved + 4 * drafts * size),
        "flops": 0,
    }


def _lay_out(shapes: MixerShapes, num: int, drafts: int, first: int) -> tuple[object, torch.Tensor]:
    """And the slots."""
    parts = [
        Part(pages=[1], start=9, length=1 + drafts, slot_in=slot, slot_out=slot, fold=drafts)
        for slot in range(first, first + num)
    ]
    batch = build_batch(parts, 64, 0, num)
    capacity = _capacity(num, drafts)
    object.__setattr__(batch, "chip", probe(CUDA))
    object.__setattr__(batch, "capacity", capacity)
    layout = on_device(shapes.operation.lay_out(batch), CUDA)
    return layout, torch.from_numpy(batch.slot_out.astype(np.int32)).to(CUDA)


def _capacity(num: int, drafts: int) -> Capacity:
    num_tokens = num * (1 + drafts)
    return Capacity(num_tokens=num_tokens, num_sequences=num, decodes=True, num_drafts=drafts)


class Steps:
    """A model with dummy weights and requests of POSITION tokens."""

    def __init__(self, model: str, most: int, drafts: int) -> None:
        self.model, _ = load_model(
            Path(model), LoadOptions(dtype=torch.bfloat16, device=CUDA, load_format="dummy", seed=0)
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
        milliseconds: float = do_bench(
            lambda: replay(capacity), warmup=100, rep=300, return_mode="median"
        )
        return milliseconds * 1e3

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
        report(
            (mixer_row(s, n, d) for s in SHAPES for n in SEQUENCES for d in (0, *DRAFTS)), arguments
        )


if __name__ == "__main__":
    main()
