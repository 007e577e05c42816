"""The Triton kernels of the routed experts against the reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels.products import experts_reference as reference
from milepost.kernels.products import routing as triton
from milepost.kernels.products.expert_table import SEARCHED
from milepost.kernels.products.experts_reference import Scores
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.grouping import Groups, group_few, group_many
from milepost.kernels.products.portable import gemv, grouped, grouped_large
from milepost.kernels.products.portable.row_tiles import GemvTiles
from milepost.kernels.products.portable.tiles import Tiles
from milepost.kernels.products.run import run_mixture
from tests.kernels.routed import as_routed, poisoned_outputs
from tests.numbers import relative_error

HIDDEN, SIZE = 40, 24


def make(num_tokens: int, num_experts: int, hidden_size: int = HIDDEN, size: int = SIZE):
    random = torch.Generator().manual_seed(num_tokens)
    shapes = (
        (num_tokens, hidden_size),
        (num_tokens, num_experts),
        (num_experts, 2 * size, hidden_size),
        (num_experts, hidden_size, size),
    )
    return tuple(torch.randn(shape, generator=random) for shape in shapes)


def partials(hidden: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    parts = run_mixture(hidden, weights, experts, Raw(values=up), Raw(values=down))
    assert parts is not None
    return parts


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 5, 1), (6, 17, 4)])
def test_route(
    num_tokens: int, num_experts: int, num_chosen: int, normalise: bool, num_shared: int
) -> None:
    wide = make(num_tokens, num_experts + 3)[1]
    logits = wide[:, : num_experts + num_shared]
    arguments = {"normalise": normalise, "num_shared": num_shared}
    weights, experts = triton.route(logits, num_chosen, **arguments)
    expected_weights, expected_experts = reference.route(logits, num_chosen, **arguments)
    assert experts.tolist() == expected_experts.tolist()
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize(
    ("scores", "has_bias", "num_shared"),
    [
        (Scores(kind="sigmoid", scale=2.5, norm_eps=0.3), True, 0),
        (Scores(kind="sigmoid", gates_shared=False), True, 2),
        (Scores(kind="sigmoid", num_groups=3, num_groups_chosen=2), False, 1),
        (Scores(num_groups=5, num_groups_chosen=3), True, 2),
        (Scores(), True, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.half], ids=str)
def test_route_by_scores(
    scores: Scores, has_bias: bool, num_shared: int, dtype: torch.dtype
) -> None:
    """Of float32 parts, as a router leaves them, and for padding."""
    num_experts = 15
    logits = make(6, num_experts + (num_shared > 0 and scores.gates_shared))[1]
    parts = torch.stack((logits / 2, logits / 4, logits / 4), 1)
    parts[4:] = torch.nan
    bias = torch.linspace(-0.4, 0.4, num_experts) if has_bias else None
    given = {"normalise": True, "num_shared": num_shared, "scores": scores, "bias": bias}
    given |= {"dtype": dtype, "num_real": torch.tensor([4], dtype=torch.int32)}
    weights, experts = triton.route(parts, 4, **given)
    expected_weights, expected_experts = reference.route(parts, 4, **given)
    assert experts.tolist() == expected_experts.tolist()
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, expected_weights)


def test_no_expert_of_no_number_is_chosen() -> None:
    """Where a router's logits are not numbers, experts that there are take the tokens."""
    logits = torch.full((1, 5), torch.nan)
    given = {"normalise": False, "num_shared": 0, "scores": Scores(kind="sigmoid")}
    assert (triton.route(logits, 2, **given)[1] < 5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.half], ids=str)
def test_no_expert_is_chosen_twice(dtype: torch.dtype) -> None:
    logits = torch.full((2, 6), -torch.inf, dtype=dtype)
    logits[0, 5] = logits[1, 3] = 0
    _, experts = triton.route(logits, 4, normalise=False, num_shared=0)
    assert experts.tolist() == [[5, 0, 1, 2], [3, 0, 1, 2]]


def test_route_of_half_precision() -> None:
    """Negative and positive ones, both zeros, equal ones, the lowest."""
    values = [-3.5, -0.0, 0.0, 2e-7, 6e4, 6e4, -6e4, 6.5e4, -torch.inf, -1e-7]
    random = torch.Generator().manual_seed(0)
    logits = torch.stack(
        [torch.tensor(values)[torch.randperm(10, generator=random)] for _ in "abcd"]
    )
    logits = logits.half()
    arguments = {"normalise": False, "num_shared": 0}
    weights, experts = triton.route(logits, 9, **arguments)
    assert (
        experts.tolist()
        == logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :9].tolist()
    )
    weights, experts = triton.route(logits.clamp(-9, 9), 4, **arguments)
    torch.testing.assert_close(weights, reference.route(logits.clamp(-9, 9), 4, **arguments)[0])


def test_padding_chooses_what_the_last_token_does() -> None:
    logits = make(6, 9)[1]
    logits[4:] = torch.nan
    arguments = {"normalise": True, "num_shared": 1}
    expected = triton.route(logits[[0, 1, 2, 3, 3, 3]], 2, **arguments)
    for route in (triton.route, reference.route):
        found = route(logits, 2, **arguments, num_real=torch.tensor([4], dtype=torch.int32))
        torch.testing.assert_close(found[0], expected[0])
        assert found[1].tolist() == expected[1].tolist()
    nothing_real = torch.zeros(1, dtype=torch.int32)
    assert (triton.route(logits, 2, **arguments, num_real=nothing_real)[1][:, 2] == 8).all()


def test_route_of_parts() -> None:
    """They are added up and rounded, so that nobody can tell."""
    logits = make(5, 9)[1]
    parts = torch.stack((logits / 2, logits / 4, logits / 4))[:, :, :7].transpose(0, 1)
    arguments = {"normalise": False, "num_shared": 1}
    for route in (triton.route, reference.route):
        weights, experts = route(logits[:, :7].half(), 2, **arguments)
        routed = route(parts, 2, **arguments, dtype=torch.half)
        assert routed[0].dtype == torch.half
        torch.testing.assert_close(routed[0], weights)
        assert torch.equal(routed[1], experts)


def test_of_equal_scores_the_first_wins_also_below_zero() -> None:
    """Groups of 12 experts, two of which are chosen: all equal, then with the third one ahead."""
    scores = Scores(kind="sigmoid", num_groups=3, num_groups_chosen=2)
    bias = torch.full((36,), -2.0)
    how = {"normalise": True, "scores": scores, "bias": bias}
    logits = torch.zeros(1, 36)
    assert triton.route(logits, 14, **how)[1].tolist() == [list(range(14))]
    bias[[28, 30]] += 0.25
    expected = [28, 30, *range(12)]
    assert triton.route(logits, 14, **how)[1].tolist() == [expected]


@pytest.mark.parametrize("group", [group_few, group_many])
@pytest.mark.parametrize("block_rows", [2, 16])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 3), (9, 7), (700, 7), (5, 300)])
def test_group(group, num_tokens: int, num_experts: int, block_rows: int) -> None:
    """Every choice stands once, among its expert's rows, and blocks cover them without overlap. No
    more of them are launched than there are rows, however many experts."""
    random = torch.Generator().manual_seed(0)
    experts = torch.randint(0, num_experts, (num_tokens, 3), generator=random, dtype=torch.int32)
    experts[experts == 1] = 2
    groups = group(experts, num_experts, block_rows)
    assert torch.equal(groups.order.long(), experts.flatten().sort(stable=True).indices)
    sorted_experts = experts.flatten()[groups.order]
    covered = []
    for expert, first, end in groups.blocks.T.tolist():
        if expert >= 0:
            rows = range(first, min(first + block_rows, end))
            assert len(rows) > 0
            assert sorted_experts[rows.start : end].tolist() == [expert] * (end - first)
            covered.extend(rows)
    assert covered == list(range(experts.numel()))
    if group is group_few:
        assert groups.blocks.shape[1] <= experts.numel()
    if groups.num_blocks is not None:
        num_blocks = groups.num_blocks.item()
        assert (groups.blocks[0, :num_blocks] >= 0).all()
        assert (groups.blocks[0, num_blocks:] < 0).all()


def check(num_tokens: int, num_experts: int, num_chosen: int, **sizes: int) -> None:
    hidden, logits, gate_up, down = make(num_tokens, num_experts, **sizes)
    weights, experts = reference.route(logits, num_chosen, normalise=True)
    expected = reference.apply(hidden, weights, experts, gate_up, down)
    parts = partials(hidden, weights, experts.int(), gate_up, down)
    assert parts.shape == (num_tokens, num_chosen, hidden.shape[1])
    assert relative_error(parts.sum(1), expected) < 1e-5


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(1, 4, 1), (2, 9, 3), (21, 5, 2), (70, 3, 2)]
)
def test_parts(num_tokens: int, num_experts: int, num_chosen: int) -> None:
    check(num_tokens, num_experts, num_chosen)


def test_parts_whole_tiles() -> None:
    check(24, 3, 2, hidden_size=128, size=64)


def test_hidden_rows_may_lie_apart() -> None:
    hidden, logits, gate_up, down = make(21, 4)
    apart = torch.full((21, 3 * HIDDEN), torch.nan)
    apart[:, HIDDEN : 2 * HIDDEN] = hidden
    weights, experts = reference.route(logits, 2, normalise=True)
    for count in (3, 21):  # so few that nothing is grouped, and more
        rows = slice(count)
        arguments = weights[rows], experts[rows].int(), gate_up, down
        parts = partials(apart[rows, HIDDEN : 2 * HIDDEN], *arguments)
        assert torch.equal(parts, partials(hidden[rows], *arguments))


def test_experts_that_no_token_chose_are_not_read() -> None:
    hidden, logits, gate_up, down = make(40, 6)
    logits[:, 2] = -torch.inf
    gate_up[2] = down[2] = torch.nan
    weights, experts = triton.route(logits, 2, normalise=True, num_shared=0)
    assert partials(hidden, weights, experts, gate_up, down).isfinite().all()


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("hidden_size", [40, 128])
def test_every_output_is_written(hidden_size: int, is_swapped: bool) -> None:
    hidden, logits, gate_up, down = make(30, 4, hidden_size)
    weights, experts = reference.route(logits, 2, normalise=False)
    active = torch.full((60, SIZE), torch.nan)
    output = torch.full((30, 2, hidden_size), torch.nan)
    tiles = Tiles(
        block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=2, is_swapped=is_swapped
    )
    groups = group_few(experts.int(), 4, 16)
    given = as_routed(hidden, weights, experts, gate_up, down)
    grouped.project((hidden, None), given, active, groups, tiles, is_up=True)
    grouped.project((active, None), given, output, groups, tiles, is_up=False)
    expected = reference.apply(hidden, weights, experts, gate_up, down)
    assert relative_error(output.sum(1), expected) < 1e-5


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("hidden_size", "size"), [(HIDDEN, SIZE), (128, 192)])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 15, 16])
def test_few_tokens_are_not_grouped(
    monkeypatch, num_tokens: int, hidden_size: int, size: int, is_gated: bool
) -> None:
    """Every token has the shared expert, one expert has a token or two, and one has none and must
    not be read."""
    hidden, logits, gate_up, down = make(num_tokens, 7, hidden_size, size)
    up = (gate_up if is_gated else gate_up[:, :size]).contiguous() / 8
    logits[:, 2] = -torch.inf
    weights, experts = reference.route(logits, 3, normalise=True, num_shared=1)
    expected = reference.apply(hidden, weights, experts, up, down)
    up[2] = down[2] = torch.nan
    monkeypatch.setattr(grouped, "group", None)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.half, 5e-3)):
        cast = (tensor.to(dtype) for tensor in (hidden, weights))
        scaled = (tensor.to(dtype) for tensor in (up, down))
        routed = as_routed(*cast, experts, *scaled)
        with poisoned_outputs():
            parts = grouped.run(routed)
        assert parts.shape == (num_tokens, 4, hidden_size)
        assert relative_error(parts.float().sum(1), expected) < tolerance


def test_more_tokens_than_the_smallest_tile_has_rows_are_grouped(monkeypatch) -> None:
    grouped_rows = []

    def note(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
        grouped_rows.append(len(experts))
        return group_few(experts, num_experts, block_rows)

    monkeypatch.setattr(grouped, "group", note)
    for num_tokens in (SEARCHED, SEARCHED + 1):
        hidden, logits, gate_up, down = make(num_tokens, 4)
        weights, experts = reference.route(logits, 3, normalise=True)
        parts = grouped.run(as_routed(hidden, weights, experts, gate_up, down))
        expected = reference.apply(hidden, weights, experts, gate_up, down)
        assert relative_error(parts.sum(1), expected) < 1e-5
    assert grouped_rows == [SEARCHED + 1]


def test_vectors_write_every_output() -> None:
    hidden, logits, gate_up, down = make(3, 4)
    weights, experts = reference.route(logits, 2, normalise=False)
    active = torch.full((6, SIZE), torch.nan)
    output = torch.full((3, 2, HIDDEN), torch.nan)
    given = as_routed(hidden, weights, experts, gate_up, down)
    tiles = (GemvTiles(block_n=16, block_k=depth, num_warps=4) for depth in (32, 16))
    gemv.project(hidden, given, active, next(tiles), is_up=True)
    gemv.project(active, given, output, next(tiles), is_up=False)
    expected = reference.apply(hidden, weights, experts, gate_up, down)
    assert relative_error(output.sum(1), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    hidden, logits, gate_up, down = (tensor.to(dtype) for tensor in make(40, 4))
    weights, experts = triton.route(logits, 2, normalise=True, num_shared=0)
    assert weights.dtype == dtype
    parts: Tensor = partials(hidden, weights, experts, gate_up, down)
    wide = (tensor.float() for tensor in (hidden, weights))
    expected = reference.apply(*wide, experts.long(), gate_up.float(), down.float())
    assert parts.dtype == dtype
    assert relative_error(parts.float().sum(1), expected) < 5e-3


@pytest.mark.parametrize("num_tokens", [90, 200])
def test_tall_blocks(num_tokens: int) -> None:
    """Blocks that are full, less than half full and in between; one expert that nobody chose."""
    hidden, logits, gate_up, down = (tensor.half() for tensor in make(num_tokens, 4, 128, 128))
    logits[:, 0] += 1
    logits[:, 2] = -torch.inf
    weights, experts = triton.route(logits, 2, normalise=True, num_shared=0)
    active = torch.full((2 * num_tokens, 128), torch.nan, dtype=torch.half)
    output = torch.full((num_tokens, 2, 128), torch.nan, dtype=torch.half)
    groups = group_many(experts, 4, grouped_large.BLOCK_M)
    given = as_routed(hidden, weights, experts, gate_up / 16, down / 16)
    grouped_large.project_up((hidden, None), given, (active, None), groups)
    grouped_large.project_down((active, None), given, output, groups)
    expected = reference.apply(
        hidden.float(), weights.float(), experts.long(), gate_up.float() / 16, down.float() / 16
    )
    assert relative_error(output.float().sum(1), expected) < 5e-3


@pytest.mark.parametrize("kernel", ["gemv", "grouped_gemm", "swapped", "tall"])
def test_experts_without_gates(kernel: str) -> None:
    """Of a size that is an odd multiple of 64; every output written."""
    num_tokens = {"tall": 70, "gemv": 3}.get(kernel, 9)
    hidden, logits, gate_up, down = (tensor.half() for tensor in make(num_tokens, 4, 128, 192))
    up, down = gate_up[:, :192].contiguous() / 16, down / 16
    weights, experts = triton.route(logits, 2, normalise=True, num_shared=0)
    active = torch.full((2 * num_tokens, 192), torch.nan, dtype=torch.half)
    output = torch.full((num_tokens, 2, 128), torch.nan, dtype=torch.half)
    given = as_routed(hidden, weights, experts, up, down)
    if kernel == "gemv":
        cut = GemvTiles(block_n=16, block_k=64, num_warps=4)
        gemv.project(hidden, given, active, cut, is_up=True)
        gemv.project(active, given, output, cut, is_up=False)
    elif kernel == "tall":
        groups = group_many(experts, 4, grouped_large.BLOCK_M)
        grouped_large.project_up((hidden, None), given, (active, None), groups)
        grouped_large.project_down((active, None), given, output, groups)
    else:
        is_swapped = kernel == "swapped"
        tiles = Tiles(
            block_m=16, block_n=16, block_k=64, num_warps=4, num_stages=2, is_swapped=is_swapped
        )
        groups = group_few(experts, 4, 16)
        grouped.project((hidden, None), given, active, groups, tiles, is_up=True)
        grouped.project((active, None), given, output, groups, tiles, is_up=False)
    wide = hidden.float(), weights.float(), experts.long(), up.float(), down.float()
    assert relative_error(output.float().sum(1), reference.apply(*wide)) < 5e-3


@pytest.mark.parametrize("num_tokens", [1, 90], ids=["gemv", "grouped"])
def test_what_experts_multiply_stays_within_a_limit(num_tokens: int) -> None:
    hidden, logits, up, down = make(num_tokens, 5)
    weights, experts = reference.route(logits, 2, normalise=True)
    given = hidden, weights, experts
    expected = reference.apply(*given, up, down, limit=0.8)
    parts = run_mixture(*given[:2], experts.int(), Raw(values=up), Raw(values=down), limit=0.8)
    assert relative_error(parts.sum(1), expected) < 1e-5
    assert relative_error(expected, reference.apply(*given, up, down)) > 0.1
