"""The bitwise mode (`batch_invariant`): what it refuses, and what its bits depend on.

Whatever the bits depend on is part of the model's identity, and so of all cache keys: results
computed in one order of summation are never mixed with those of another. No kernel is tuned while
an engine runs: the tables choose kernels and tiles by shapes and by the chip, so their orders of
summation and the chip say everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.kernels import attention, products, recurrent
from milepost.kernels.platform.device import allows_hopper_kernels, hopper_kernels, probe
from milepost.kernels.platform.tables import KernelTable
from milepost.kernels.platform.tensors import accumulation_dtype
from milepost.parallel import Ranks
from milepost.runner.pool_shape import PoolShape

ORDERS = 4
"""Version of the orders that the tables do not state: tiles, steps of attention, blocks of rows in
the references. Any change of those gets a new number."""


def refuse_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings under which the mode could not keep its promise."""
    if not config.batch_invariant:
        return
    if config.fp4_activations:
        raise _refused("fp4_activations has no kernel with one order of sums; leave it out")
    wanted = config.speculative_config
    if wanted is not None and wanted.rejection_sample_method == "synthetic":
        raise _refused("rejection_sample_method='synthetic' accepts drafts at random; leave it out")


def refuse_states(config: EngineConfig, shape: PoolShape, *, is_fused: bool) -> None:
    """Raises ConfigError if states would be rounded wherever a prompt happens to be cut, or if no
    kernel decodes beside a prefill with the same bits as alone."""
    if not config.batch_invariant:
        return
    odd = {spec.recurrent_shape[1:] for spec in shape.recurrent if not spec.takes_drafts_fused}
    if odd and is_fused:
        raise _refused(
            f"heads of {' by '.join(map(str, min(odd)))} are not supported on a GPU; powers of two "
            "are"
        )
    exact = accumulation_dtype(shape.dtype)
    if shape.recurrent and shape.state_dtype.itemsize < exact.itemsize:
        name = str(shape.state_dtype).removeprefix("torch.")
        raise _refused(
            f"mamba_ssm_cache_dtype={name!r} rounds states wherever a prompt is cut; use 'auto'"
        )


def facts_of(
    config: EngineConfig, device: torch.device, ranks: Ranks, *, is_fused: bool
) -> Mapping[str, str | int]:
    """Returns what the bits depend on besides the model; empty in the default mode."""
    if not config.batch_invariant:
        return {}
    with hopper_kernels(config.hopper_kernels):
        facts = {**numerics_identity(device), "fused": is_fused}
    if not ranks.is_alone:
        facts |= {"sums": ranks.order, "whole_experts": ranks.splits_experts}
    return facts


def numerics_identity(device: torch.device) -> Mapping[str, str | int]:
    """Returns the facts about device and kernels that bits depend on; the same in every process."""
    facts: dict[str, str | int] = {"orders": f"{ORDERS} {_digest()}", "torch": torch.__version__}
    if device.type != "cuda":
        facts["chip"] = torch.backends.cpu.get_cpu_capability()
        facts["threads"] = torch.get_num_threads()
        return facts
    chip = probe(device)
    facts["chip"] = f"{chip.arch} {torch.cuda.get_device_name(device)}"
    facts["sms"], facts["shared_bytes"] = chip.num_sms, chip.shared_bytes
    facts["triton"] = _version_of("triton")
    facts["hopper_kernels"] = allows_hopper_kernels()
    return facts


def _digest() -> str:
    """Returns a digest of the orders that the tables state."""
    tables: list[KernelTable[Any]] = [
        *products.TABLES,
        attention.ATTENTION,
        *recurrent.TABLES.values(),
    ]
    orders = [
        f"{kernel.name}: {kernel.order}, {kernel.serves.is_fixed}"
        for table in tables
        for kernel in table.kernels
    ]
    return blake2b("\n".join(orders).encode(), digest_size=8).hexdigest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _refused(why: str) -> ConfigError:
    return ConfigError(f"batch_invariant: {why}")
