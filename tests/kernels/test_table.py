"""The tables of kernels: each product has one, and pages and the command show what they say."""

from __future__ import annotations

import io
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from milepost.cli.display import Screen
from milepost.cli.kernels import kernels_command
from milepost.errors import ConfigError
from milepost.kernels.attention import table as attention
from milepost.kernels.attention.portable.tiles import AttentionTile
from milepost.kernels.platform import device
from milepost.kernels.platform.device import CHIPS
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import Fp4, Fp8, Int4, Int8
from milepost.kernels.products.table import PRODUCTS, Product
from tests.kernels.choices import TABLES, forget
from tests.quantised import FORMATS

ROOT = Path(__file__).parents[2]
H200, L4 = CHIPS["sm_90"][1], CHIPS["sm_89"][1]
BLOCKS = {"rows": 128, "depth": 128}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As with a Triton whose Gluon is known, whatever is installed here."""
    monkeypatch.setattr(device, "triton_version", lambda: (3, 6))
    forget()


def fp8(num_outputs: int, num_inputs: int) -> Matrix:
    return Matrix(form=Fp8, num_outputs=num_outputs, num_inputs=num_inputs, **BLOCKS)


def int4(num_outputs: int, num_inputs: int, group: int = 128) -> Matrix:
    return Matrix(form=Int4, num_outputs=num_outputs, num_inputs=num_inputs, group=group)


def fp4(num_outputs: int, num_inputs: int) -> Matrix:
    return Matrix(form=Fp4, num_outputs=num_outputs, num_inputs=num_inputs, group=16)


def int8(num_outputs: int, num_inputs: int) -> Matrix:
    return Matrix(form=Int8, num_outputs=num_outputs, num_inputs=num_inputs)


def raw(num_outputs: int, num_inputs: int) -> Matrix:
    return Matrix(form=Raw, num_outputs=num_outputs, num_inputs=num_inputs)


@pytest.mark.parametrize(
    ("weight", "num_rows", "on_hopper", "elsewhere"),
    [
        (raw(4096, 2048), 1, "raw gemv", "raw gemv"),
        (raw(12288, 4096), 16, "raw small_m, Hopper", "raw small_m"),
        (raw(12288, 4096), 64, "raw small_m, Hopper", "torch's GEMM"),
        (raw(12288, 4096), 65, "torch's GEMM", "torch's GEMM"),
        (raw(64, 2048), 100, "raw small_m", "raw small_m"),
        (fp8(12288, 2048), 1, "fp8 gemv over a ring, Hopper", "gemv"),
        (fp8(2048, 4096), 1, "gemv, Hopper", "gemv"),
        (fp8(12288, 2048), 2, "fp8 small_m, Hopper", "gemm"),
        (fp8(1024, 2048), 2, "gemm", "gemm"),
        (fp8(12288, 2048), 65, "torch's scaled GEMM", "gemm"),
        (int8(12288, 2048), 1, "int8 gemv", None),
        (int8(12288, 2048), 16, "int8 gemm", None),
        (int8(12288, 2048), 4096, "int8 gemm", None),
        (int8(12288, 2048)._replace(has_input_scale=True), 1, "int8 gemm", None),
        (int4(12288, 2048), 1, "int4 gemv, Hopper", "gemv"),
        (int4(12288, 2048, 32), 1, "int4 gemv, Hopper", "gemv"),
        (int4(2048, 4096), 1, "gemv", "gemv"),
        (int4(12288, 2048, 32), 2, "int4 small_m, Hopper", "gemm"),
        (int4(12288, 2048), 32, "int4 small_m, Hopper", "gemm"),
        (int4(12288, 2048), 33, "gemm", "gemm"),
        (int4(12288, 2048), 65, "16-bit weights made first, torch's GEMM", None),
        (int4(12288, 2048, 16)._replace(form=Fp4), 1, "gemv", "gemv"),
        (int4(12288, 2048, 16)._replace(form=Fp4), 20, "gemm", "gemm"),
    ],
)
def test_kernels_as_they_were_measured(weight, num_rows, on_hopper, elsewhere):
    product = Product(weight=weight, num_rows=num_rows)
    assert PRODUCTS.choose(product, H200).kernel.name == on_hopper
    assert PRODUCTS.choose(product, L4).kernel.name == (elsewhere or on_hopper)


@pytest.mark.parametrize(
    ("up", "down", "num_tokens", "on_hopper", "elsewhere"),
    [
        (raw(1024, 2048), raw(2048, 512), 4, "raw gemv", None),
        (raw(1024, 2048), raw(2048, 512), 5, "raw grouped, one order", "raw grouped"),
        (raw(1024, 2080), raw(2080, 512), 5, "raw grouped", None),
        (raw(1024, 2048), raw(2048, 512), 2048, "raw grouped, tall", "raw grouped"),
        (fp8(1024, 2048), fp8(2048, 512), 4, "gemv, Hopper", "gemv"),
        (fp8(1024, 2048), fp8(2048, 512), 64, "fp8 in one launch, Hopper", "grouped"),
        (fp8(1024, 2048), fp8(2048, 512), 65, "grouped", "grouped"),
        (fp8(1024, 2048), fp8(2048, 512), 2048, "fp8 grouped, tall, Hopper", "grouped"),
        (int8(1024, 2048), int8(2048, 512), 4, "int8 gemv", None),
        (int8(1024, 2048), int8(2048, 512), 5, "int8 grouped", None),
        (int4(1024, 2048, 32), int4(2048, 512, 32), 4, "int4 gemv, Hopper", "gemv"),
        (int4(1024, 2048), int4(2048, 512), 64, "int4 in one launch, Hopper", "grouped"),
        (int4(1024, 2048, 64), int4(2048, 512, 64), 64, "int4 in one launch, Hopper", "grouped"),
        (int4(1024, 2048, 32), int4(2048, 512, 32), 64, "int4 in one launch, Hopper", "grouped"),
        (int4(1024, 2048), int4(2048, 512), 512, "int4 grouped, tall, Hopper", "grouped"),
        (
            int4(1024, 2048, 32),
            int4(2048, 512, 32),
            8192,
            "int4 grouped, tall, Hopper",
            "16-bit weights made first, raw grouped",
        ),
        (fp4(1024, 2048), fp4(2048, 512), 512, "grouped", None),
        (fp4(1024, 2048), fp4(2048, 512), 2048, "fp4 grouped, wide", "grouped"),
        (fp4(1024, 2048), fp4(2048, 512), 8192, "16-bit weights made first, raw grouped", None),
    ],
)
def test_experts_kernels_as_they_were_measured(up, down, num_tokens, on_hopper, elsewhere):
    mixture = Mixture(up=up, down=down, num_experts=257, num_tokens=num_tokens, num_chosen=9)
    assert EXPERTS.choose(mixture, H200).kernel.name == on_hopper
    assert EXPERTS.choose(mixture, L4).kernel.name == (elsewhere or on_hopper)


def test_tall_blocks_without_hoppers_own_instructions():
    mixture = Mixture(
        up=fp8(1024, 2048), down=fp8(2048, 512), num_experts=8, num_tokens=999, num_chosen=2
    )
    assert EXPERTS.choose(mixture, CHIPS["sm_100"][1]).kernel.name == "fp8 grouped, tall"


MATRICES = st.builds(
    Matrix,
    form=st.sampled_from([Raw, Fp8, Int8, Int4, Fp4]),
    num_outputs=st.integers(1, 200).map(lambda count: 8 * count),
    num_inputs=st.integers(1, 40).map(lambda count: 128 * count),
    rows=st.sampled_from([1, 128]),
    depth=st.sampled_from([128, 5120]),
    group=st.sampled_from([16, 32, 128, 256]),
    has_input_scale=st.booleans(),
)


@given(
    MATRICES,
    st.integers(1, 9000),
    st.sampled_from([Epilogue.NONE, Epilogue.PARTIALS]),
    st.booleans(),
    st.sampled_from([1, 8, 16]),
    st.sampled_from(list(CHIPS)),
)
def test_every_product_has_a_kernel(weight, num_rows, epilogue, has_bias, alignment, arch):
    """One whose row says that it takes such rows, bias and chip; all ahead of it say why not."""
    chip = CHIPS[arch][1]
    product = Product(
        weight=weight,
        num_rows=num_rows,
        epilogue=epilogue,
        has_bias=has_bias,
        alignment=alignment,
    )
    choice = PRODUCTS.choose(product, chip)
    kernel = choice.kernel
    assert weight.form in kernel.forms
    assert kernel.rows.have(num_rows)
    assert kernel.takes_bias or not has_bias
    assert arch == "sm_90" or not kernel.is_hopper
    if epilogue is Epilogue.NONE and weight.form is not Raw:
        assert choice.split_k == 1, "nobody adds partials up"
    assert choice.order
    assert all(reason for _, reason in PRODUCTS.refusals(product, chip))


def test_hopper_kernels_may_be_turned_off():
    """What was chosen before does not stay."""
    product = Product(weight=fp8(12288, 2048), num_rows=2)
    assert PRODUCTS.choose(product, H200).kernel.is_hopper
    with device.hopper_kernels(False):
        assert PRODUCTS.choose(product, H200).kernel.name == "gemm"
    assert PRODUCTS.choose(product, H200).kernel.is_hopper


def test_every_row_names_a_module():
    modules = [each.module for table in TABLES for each in table.kernels if each.module]
    modules += [kernel.module for kernel in attention.ATTENTION.kernels]
    folder = ROOT / "src" / "milepost" / "kernels"
    assert [
        each for each in modules if not (folder / f"{each.replace('.', '/')}.py").exists()
    ] == []
    for table in TABLES:
        assert len({each.name for each in table.kernels}) == len(table.kernels)


TILES = st.builds(
    AttentionTile,
    rows=st.sampled_from([8, 16, 32, 64, 128]),
    is_wide=st.booleans(),
    head_dim=st.sampled_from([24, 64, 128, 256, 576]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    has_fp8_pages=st.booleans(),
    page_size=st.sampled_from([16, 64, 128]),
    fits_tma=st.booleans(),
    num_programs=st.sampled_from([0, 1, 10_000]),
    is_latent=st.booleans(),
)


@given(TILES, st.sampled_from(list(CHIPS)))
def test_every_tile_has_a_kernel(tile, arch):
    """One that takes such pages on the chip; all before it say why not."""
    chip = CHIPS[arch][1]
    choice = attention.choose(tile, chip)
    assert (choice.kernel.name == "latents") == tile.is_latent
    assert arch == "sm_90" or not choice.kernel.is_hopper
    if choice.kernel.is_hopper:
        assert tile.dtype != torch.float32
        assert tile.fits_tma
        assert tile.is_wide != tile.has_fp8_pages
    else:
        assert choice.tiles.block >= 16
    assert re.fullmatch(r"\d+ seq(, wgmma|, lanes)?", choice.order)
    assert all(reason for _, reason in attention.ATTENTION.refusals(tile, chip))


@pytest.mark.parametrize(
    ("tile", "on_hopper"),
    [
        (AttentionTile(rows=128, is_wide=True, head_dim=256), "wide, Hopper"),
        (AttentionTile(rows=128, is_wide=True, head_dim=64), "tiles"),
        (AttentionTile(rows=128, is_wide=True, head_dim=256, page_size=16), "tiles"),
        (AttentionTile(rows=16, is_wide=False, head_dim=256), "tiles"),
        (
            AttentionTile(rows=8, is_wide=False, head_dim=256, has_fp8_pages=True),
            "fp8 narrow, Hopper",
        ),
        (AttentionTile(rows=32, is_wide=False, head_dim=256, has_fp8_pages=True), "tiles"),
    ],
)
def test_attention_kernels_as_they_were_measured(tile, on_hopper):
    assert attention.choose(tile, H200).kernel.name == on_hopper
    assert attention.choose(tile, L4).kernel.name == "tiles"
    with device.hopper_kernels(False):
        assert attention.choose(tile, H200).kernel.name == "tiles"


def test_decodes_over_fp8_have_small_items_where_hoppers_kernel_serves_them():
    shapes = {
        arch: attention.shape_heads(
            8, 256, CHIPS[arch][1], tokens_each=1, has_fp8_kv=True, dequantises=False
        )
        for arch in ("sm_90", "sm_89")
    }
    assert (shapes["sm_90"].narrow_rows, shapes["sm_90"].num_beside) == (8, 2)
    assert (shapes["sm_89"].narrow_rows, shapes["sm_89"].num_beside) == (16, 3)


def test_the_command_lists_attention():
    lines = [line for line in run("hybrid-35b-a3b", chip="sm_90").splitlines() if " KV " in line]
    shown = [re.split(r" {2,}", line.strip())[1:4] for line in lines]
    assert shown == [
        ["16 / 2 heads of 256, 16-bit pages", "1 to 2 a sequence", "tiles"],
        ["16 / 2 heads of 256, 16-bit pages", "from 3 a sequence", "wide, Hopper"],
        ["16 / 2 heads of 256, FP8 pages", "1 a sequence", "fp8 narrow, Hopper"],
        ["16 / 2 heads of 256, FP8 pages", "2 to 512 a sequence", "tiles"],
        [
            "16 / 2 heads of 256, FP8 pages, made 16-bit first",
            "from 513 a sequence",
            "wide, Hopper",
        ],
    ]
    assert "latents of 576" in run("kimi-linear-48b-a3b", chip="sm_89")


def run(model: str, **options: str) -> str:
    written = io.StringIO()
    console = Console(file=written, width=250)
    kernels_command(Screen(answers=io.StringIO(), reports=console, clock=lambda: 0.0))(
        str(ROOT / "bench" / "models" / model), **options
    )
    return written.getvalue()


def test_the_command_lists_a_models_kernels():
    lines = run("hybrid-35b-a3b", chip="sm_90", quantization="fp8").splitlines()
    experts = next(index for index, line in enumerate(lines) if " experts " in line)
    shown = [re.split(r" {2,}", line.strip()) for line in lines[experts : experts + 4]]
    assert shown[0][2:4] == ["1 to 4", "gemv, Hopper"]
    assert [each[:2] for each in shown[1:]] == [
        ["5 to 64", "fp8 in one launch, Hopper"],
        ["65 to 913", "grouped"],
        ["from 914", "fp8 grouped, tall, Hopper"],
    ]
    assert "Hopper" not in run("hybrid-9b", chip="sm_89").replace("Hopper: they need sm_90", "")


def test_the_command_lists_integers(tmp_path):
    """Of a checkpoint in W8A8: the same kernels with Hopper's and without."""
    config = json.loads((ROOT / "bench/models/hybrid-35b-a3b/config.json").read_text())
    config["quantization_config"] = FORMATS["int8-channels"][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for chip in ("sm_86", "sm_90"):
        lines = run(str(tmp_path), chip=chip).splitlines()
        first = next(index for index, line in enumerate(lines) if " experts " in line)
        shown = [re.split(r" {2,}", line.strip()) for line in lines[first : first + 2]]
        assert shown[0][1:5] == ["int8, 1024 x 2048", "1 to 4", "int8 gemv", "int32, exact"]
        assert shown[1][:3] == ["from 5", "int8 grouped", "int32, exact"]
        assert "int8 gemm" in "".join(lines)


def test_a_chip_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="--chip sm_91: this is none of sm_80, sm_86"):
        run("hybrid-9b", chip="sm_91")


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need triton")
def test_every_module_of_the_tables_has_its_door():
    """What the runners call."""
    for each in PRODUCTS.kernels:
        if not each.is_hopper:
            assert callable(each.run)
