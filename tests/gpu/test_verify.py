"""Fused steps that verify on a GPU: with heads as real models have them states and outputs are
those of one token at a time, bit for bit, where the kernels that decode are of the same kind; both
are near what the reference makes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from milepost.kernels.platform.device import hopper_kernels, probe
from milepost.models.folder import EMBEDDED_MODEL
from milepost.models.loading import LoadOptions, load_model
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import ladder, largest_step
from milepost.runner.runner import Runner
from tests.kernels import kimi, ssd
from tests.kernels.mixers import REAL, SMALL, MixerShapes, make_projected
from tests.kernels.verifying import Kind, Mixer, Plain, is_equal, play
from tests.numbers import relative_error
from tests.runner.verifying import NUM_SLOTS, assert_drafts_leave_what_tokens_do, open_pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[True, False], ids=["hopper", "any chip"])
def chip(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its kernels run."""
    with hopper_kernels(request.param):
        yield "hopper" if request.param else "any chip"


ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Where the compiler lays out a kernel that verifies in another way than one that decodes."""


SHAPES: dict[str, MixerShapes] = {
    "real": REAL,
    "small": SMALL,
    "kda": kimi.REAL,
    "kda with a bound": replace(kimi.REAL, least_decay=-5.0),
    "mamba2": ssd.NEMOTRON,
    "mamba2 of one group": ssd.BAMBA,
}
KDA = {"kda", "kda with a bound"}
SAME_STATES = {"hopper": {"real", *KDA, "mamba2", "mamba2 of one group"}, "any chip": {"real"}}
"""Where a state is that of decodes bit for bit."""
SAME_OUTPUTS = {"hopper": {"real", *KDA}, "any chip": {"real"}}
"""Where outputs are. Mamba2 decodes by the kernel for any chip, which adds up in another order than
Hopper's that verifies."""


def kind_of(shapes: MixerShapes, dtype: torch.dtype) -> Kind:
    chip = probe(torch.device("cuda"))
    return Kind(shapes=shapes, dtype=dtype, device="cuda", chip=chip, num_tokens=12)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_any_split_leaves_the_states_of_one_token_at_a_time(
    chip: str, name: str, dtype: torch.dtype
) -> None:
    plain = Plain(kind_of(SHAPES[name], dtype))
    max_error = 0 if name in SAME_STATES[chip] else ROUNDING[dtype]
    max_output_error = 0 if name in SAME_OUTPUTS[chip] else ROUNDING[dtype]
    for seed in range(6):
        play(plain, random.Random(seed), max_error, max_output_error)


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("name", SHAPES)
def test_it_matches_the_reference_beside_a_prefill_and_padding(name: str) -> None:
    shapes = SHAPES[name]
    kind = kind_of(shapes, torch.bfloat16)
    ours, theirs = Mixer(kind), Mixer(replace(kind, chip=None))
    tokens = make_projected(shapes, 9, torch.bfloat16, "cuda")
    prompt = make_projected(shapes, 70, torch.bfloat16, "cuda", seed=5)
    steps = [
        {0: (0, tokens[:3]), 1: (0, tokens[3:4])},
        {0: (2, tokens[4:9]), 1: (0, tokens[:2]), 2: (0, tokens[:1])},
        {0: (1, tokens[:0]), 1: (1, tokens[:1])},
    ]
    for padding, parts in enumerate(steps):
        beside = prompt if padding == 1 else None
        expected = theirs.step(parts, beside)
        assert relative_error(ours.step(parts, beside, padding=padding), expected) < 1e-2
    for sequence in range(4):
        for found, wanted in zip(ours.state(sequence), theirs.state(sequence), strict=True):
            assert relative_error(found, wanted) < 1e-2
    assert torch.equal(ours.records.nan_to_num(9), theirs.records.nan_to_num(9))


@pytest.mark.usefixtures("chip")
def test_a_prefill_beside_verifying_sequences_has_the_bits_that_it_has_alone() -> None:
    kind = kind_of(REAL, torch.bfloat16)
    beside, alone = Mixer(kind), Mixer(kind)
    tokens = make_projected(REAL, 4, torch.bfloat16, "cuda")
    prompt = make_projected(REAL, 70, torch.bfloat16, "cuda", seed=5)
    output = beside.step({0: (0, tokens[:3]), 2: (0, tokens[3:])}, prompt, padding=3)
    assert torch.equal(output[4:], alone.step({}, prompt, verifies=False))
    assert is_equal(beside.state(3), alone.state(3))


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_accepted_drafts_leave_what_tokens_do_in_a_model(has_graphs: bool) -> None:
    """Through the executor: decodes, prefills beside them, and a step that only folds."""
    device = torch.device("cuda")
    model, _ = load_model(
        EMBEDDED_MODEL, LoadOptions(dtype=torch.bfloat16, device=device, load_format="auto", seed=0)
    )

    def open_runner(num_drafts: int) -> Runner:
        pools = open_pools(model, num_drafts, device)
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 256, "num_drafts": num_drafts}
        executor = DeviceExecutor(
            model, pools, num_requests=4, max_model_len=256, largest=largest_step(**limits)
        )
        if has_graphs:
            executor.capture(ladder(**limits))
        return Runner(executor, pools, num_slots=NUM_SLOTS)

    assert_drafts_leave_what_tokens_do(open_runner(0), open_runner(3), 3e-2)
