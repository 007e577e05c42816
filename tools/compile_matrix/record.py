"""What an engine would launch on a chip: its own steps are run with launches noted, not done."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from milepost.config import DType

REPOSITORY = Path(__file__).parents[2]
_NUM_DRAFTS = 3
_EAGER = (600, 2048, 8192)
"""Tokens of prefills that no graph holds; the last is the default max_num_batched_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with everything that it is compiled for."""

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        module = self.kernel.__module__.removeprefix("milepost.kernels.")
        return f"{module}.{self.kernel.__name__}"

    @property
    def constants(self) -> dict[str, Any]:
        """By name; of tuples of arguments none is a constant."""
        names = list(self.signature)
        return {names[path[0]]: value for path, value in self.constexprs.items() if len(path) == 1}

    def describe(self) -> dict[str, Any]:
        """What tells launches apart, for people and for JSON; a structure by its fields."""
        constants: dict[str, Any] = {}
        for name, value in self.constants.items():
            if name.isupper() or hasattr(value, "_asdict"):
                constants |= _fields(name, value)
        options = {
            name: self.options[name]
            for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl")
            if self.options.get(name)
        }
        return {"kernel": self.name, **constants, **options}

    @property
    def code_name(self) -> str:
        """Of a file with the code: does not depend on the source, nor on where it stands."""
        digest = _digest((tuple(self.signature.values()), *self._variant))
        return f"{self.kernel.__name__}-{digest}.txt"

    @property
    def _variant(self) -> tuple[object, ...]:
        constexprs = {path: _by_source(value) for path, value in self.constexprs.items()}
        return (
            sorted(constexprs.items(), key=repr),
            sorted(self.attributes.items(), key=repr),
            sorted((k, str(v)) for k, v in self.options.items() if k != "extern_libs"),
        )

    def key(self, target: object) -> str:
        """Of all that the compiled kernel depends on: its source and that of what it calls
        (wherever in a file it stands), types, constants, options, the chip, Triton."""
        signature = dict(self.signature)
        return _digest(
            (self.kernel.cache_key, signature, *self._variant, str(target), triton.__version__)
        )


def _fields(name: str, constant: Any) -> dict[str, Any]:
    """A constant by its name; a structure by its fields."""
    if not hasattr(constant, "_asdict"):
        return {name.upper(): constant}
    parts = (_fields(field, value) for field, value in constant._asdict().items())
    return {field: value for part in parts for field, value in part.items()}


def _by_source(constant: Any) -> Any:
    """A constant as it tells launches apart: a function of the device by its source."""
    return constant.cache_key if isinstance(constant, JITFunction) else constant


def _digest(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model as an engine would run it."""

    model: str
    """A folder of the repository."""
    page_size: int = 64
    overrides: Mapping[str, Any] | None = None
    """Of its configuration."""
    dtype: DType = "auto"
    only_attention: bool = False
    """Where nothing else differs from another case."""
    is_whole: bool = False
    """Run all layers, not the first few."""
    max_num_seqs: int = 64
    quantization: Mapping[str, Any] | None = None
    """As a checkpoint's configuration says it."""
    fp4_activations: bool = False
    """For chips that multiply them."""
    kv_dtype: torch.dtype | None = None
    num_ranks: int = 1
    """Of which the first one's part is run."""


_35B, _9B = "bench/models/hybrid-35b-a3b", "bench/models/hybrid-9b"
_BAMBA = "bench/models/bamba-9b"
_MAMBA2: Mapping[str, Any] = {"num_hidden_layers": 1, "attn_layer_indices": []}
"""Attention without head norms has no fused kernel yet."""
_TINY = "src/milepost/tiny"
_LEFT = ("lm_head", "mlp.gate", "shared_expert_gate", "in_proj_ba")
_FP8: Mapping[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": _LEFT,
}
_INT8: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "int", "num_bits": 8, "strategy": "channel"},
            "input_activations": {
                "type": "int",
                "num_bits": 8,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": [f"re:.*{name}$" for name in _LEFT],
}
_INT4: Mapping[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": _LEFT,
}
_NVFP4: Mapping[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": [f"*{name}" for name in _LEFT],
}
_MX_VALUES = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
_MXFP4: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _MX_VALUES,
            "input_activations": _MX_VALUES | {"dynamic": True},
        }
    },
    "ignore": [f"re:.*{name}$" for name in _LEFT],
}
CASES: Sequence[Case] = (
    Case(model=_35B),
    *(Case(model=_35B, page_size=size, only_attention=True) for size in (16, 128)),
    *(
        Case(model=_35B, page_size=size, overrides={"head_dim": head_dim}, only_attention=True)
        for head_dim in (64, 128)
        for size in (16, 64, 128)
    ),
    Case(model=_9B),
    Case(model=_BAMBA, overrides=_MAMBA2),
    # As Nemotron-3-Nano's mixers are.
    Case(
        model=_BAMBA,
        overrides={**_MAMBA2, "mamba_n_groups": 8, "mamba_n_heads": 64, "mamba_chunk_size": 128},
    ),
    Case(model="bench/models/kimi-linear-48b-a3b"),
    Case(model=_35B, quantization=_FP8),
    Case(model=_35B, quantization=_INT8),
    Case(model=_35B, quantization=_INT4),
    Case(model=_35B, quantization=_NVFP4),
    Case(model=_35B, quantization=_NVFP4, fp4_activations=True),
    Case(model=_35B, quantization=_MXFP4, fp4_activations=True),
    Case(model="bench/models/kimi-linear-48b-a3b", kv_dtype=torch.float8_e4m3fn),
    *(
        Case(model=_35B, overrides=heads, only_attention=True, kv_dtype=torch.float8_e4m3fn)
        for heads in ({}, {"head_dim": 128})
    ),
    Case(model=_35B, num_ranks=2),
    Case(model=_9B, num_ranks=4, only_attention=True),
    Case(model=_TINY),
    Case(model=_TINY, page_size=16),
)
"""All that is claimed to run."""
CI_CASES: Sequence[Case] = (
    Case(model=_35B),
    Case(model=_35B, page_size=16, only_attention=True),
    Case(model=_35B, quantization=_FP8),
    Case(model=_35B, quantization=_INT8),
    Case(model=_35B, quantization=_INT4),
    Case(model=_35B, quantization=_NVFP4),
    Case(model=_35B, quantization=_NVFP4, fp4_activations=True),
    Case(model=_35B, quantization=_MXFP4, fp4_activations=True),
    Case(model=_35B, only_attention=True, kv_dtype=torch.float8_e4m3fn),
    Case(model=_35B, num_ranks=2, only_attention=True),
    Case(model=_TINY),
)
"""The extremes: the widest heads and states, with pages as long as a block and far shorter; and the
narrowest ones. What lies between takes less shared memory of the same kernels."""
_BOUNDS = {
    *("INPUTS", "OUTPUTS", "TILES", "STEPS", "EXPERTS", "SIZE"),
    *("HEADS", "KV_HEADS", "KEY_HEADS", "VALUE_HEADS"),
}
"""Constants that only bound loops and addresses: shared memory does not depend on them."""


def one_of_each_kind(launches: Sequence[Launch]) -> list[Launch]:
    """Of launches that differ in nothing but `_BOUNDS` the first."""
    kinds: dict[str, Launch] = {}
    for launch in launches:
        kind = {name: value for name, value in launch.describe().items() if name not in _BOUNDS}
        kinds.setdefault(repr(kind), launch)
    return list(kinds.values())


def record(cases: Sequence[Case]) -> list[Launch]:
    """Every launch of the cases' steps once. Inside `chips.pretend` only."""
    found: dict[tuple[str, str], Launch] = {}
    with noting(found):
        for case in cases:
            _run_steps(case, _EAGER)
        for head_dim in (64, 72):
            _run_tower(head_dim)
    _forget_lines()
    return sorted(found.values(), key=lambda launch: (launch.name, repr(launch.describe())))


@contextmanager
def noting(found: dict[tuple[str, str], Launch]) -> Iterator[None]:
    """Inside, Triton's launches are added to `found`."""
    do_compile: Callable[..., Any] = JITFunction._do_compile

    def note(
        kernel: Any,
        key: str,
        signature: dict[str, str],
        _device: int,
        constexprs: dict[Any, Any],
        options: Any,
        attributes: dict[Any, Any],
        _warmup: bool,
    ) -> None:
        launch = Launch(
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            attributes=attributes,
            options=dict(options.__dict__),
        )
        found.setdefault((launch.name, key), launch)

    JITFunction._do_compile = note
    try:
        yield
    finally:
        JITFunction._do_compile = do_compile


def record_late(case: Case, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What steps of one sequence with so many tokens launch that an engine has not compiled before
    its first step. Inside `chips.pretend` only."""
    before: dict[tuple[str, str], Launch] = {}
    behind: dict[tuple[str, str], Launch] = {}
    with noting(before):
        _run_steps(case, ())
    with noting(behind):
        _run_steps(case, sizes)
    return [behind[key].describe() for key in behind.keys() - before.keys()]


def _forget_lines() -> None:
    """Let a kernel's key not depend on the line on which it begins."""
    for name, module in sys.modules.items():
        if name.startswith("milepost.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.starting_line_number, kernel.hash = 0, None


def _run_steps(case: Case, eager: Sequence[int]) -> None:
    """Have an engine compile what it compiles before its first step, and steps of one sequence with
    so many tokens."""
    # Imported here: kernels ask for the chip as they are imported.
    from milepost.kernels.layout.batch import Capacity
    from milepost.kernels.platform.device import probe
    from milepost.layers.parameters import ModuleScope
    from milepost.models.quantization import read_quantization
    from milepost.models.registry import find_architecture, load_config, resolve_dtype
    from milepost.parallel.absent import first_of
    from milepost.runner.graphs import ladder, largest_step
    from milepost.runner.measuring import FirstSteps, compile_steps, measure_steps, rehearsal
    from milepost.runner.pool_shape import PoolShape

    if case.fp4_activations and not probe(torch.device("cuda")).has_fp4:
        return
    config = load_config(REPOSITORY / case.model)
    text = config.get_text_config()
    for name, value in (case.overrides or {}).items():
        setattr(text, name, value)
    if not case.is_whole and "num_hidden_layers" not in (case.overrides or {}):
        text.layer_types = ["full_attention"] if case.only_attention else text.layer_types[:4]
        text.num_hidden_layers = len(text.layer_types)
    kind = ModuleScope(
        dtype=resolve_dtype(case.dtype, config),
        device=torch.device("meta"),
        ranks=first_of(case.num_ranks),
    )
    if case.quantization is not None:
        asks = case.fp4_activations
        forms = read_quantization(case.quantization, (), has_files=False, fp4_activations=asks)
        kind = replace(kind, precision_of=forms.precision_of)
    architecture = find_architecture(config.model_type)
    model = architecture.decoder(text, kind, is_tied=config.tie_word_embeddings)
    shape = PoolShape(
        specs=model.layer_specs,
        page_size=case.page_size,
        dtype=kind.dtype,
        state_dtype=torch.float32,
        kv_dtype=case.kv_dtype,
        num_record_rows=case.max_num_seqs,
        num_drafts=_NUM_DRAFTS if all(spec.takes_drafts for spec in model.layer_specs) else 0,
    )
    limits = {
        "max_num_seqs": case.max_num_seqs,
        "max_num_batched_tokens": _EAGER[-1],
        "num_drafts": shape.num_drafts,
    }
    uncaptured = [
        Capacity(num_tokens=num_tokens, num_sequences=1, num_exports=1, decodes=False)
        for num_tokens in eager
    ]
    steps = FirstSteps(
        largest=largest_step(**limits),
        captured=[*uncaptured, *ladder(**limits)],
        max_model_len=case.page_size,
    )
    with torch.inference_mode():
        executor = rehearsal(model, shape, steps)
        compile_steps(executor, steps)
        measure_steps(executor, steps)


def _run_tower(head_dim: int) -> None:
    """Encode a picture with a tower of one block, with the heads of one that is published."""
    from milepost.layers.parameters import ModuleScope
    from milepost.layers.tower import Tower
    from milepost.layers.tower_parts import TowerShapes

    shapes = TowerShapes(
        depth=1,
        hidden_size=16 * head_dim,
        num_heads=16,
        feed_forward_size=4304,
        output_size=2048,
        patch_size=16,
        merge_size=2,
        num_frames=2,
        num_channels=3,
        num_positions=2304,
        theta=10_000.0,
    )
    device = torch.device("meta")
    tower = Tower(shapes, ModuleScope(dtype=torch.bfloat16, device=device))
    table = torch.empty(3, 256, dtype=torch.bfloat16, device=device)
    for num_frames in (1, 2):  # a still picture, and a pair of a video's frames
        rows = torch.empty(256, 768 * num_frames, dtype=torch.uint8, device=device)
        for is_fixed in (False, True):  # alone, and with others
            tower(rows, table, [(1, 16, 16)], is_fixed=is_fixed)
