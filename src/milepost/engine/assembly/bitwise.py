"""The bitwise mode (`batch_invariant`): what it refuses, and what its bits depend on.

Whatever the bits depend on is part of the model's identity, and so of all cache keys: results
computed in one order of summation are never mixed with those of another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.kernels.numerics_identity import numerics_identity
from milepost.kernels.platform.device import hopper_kernels
from milepost.kernels.platform.tensors import accumulation_dtype
from milepost.parallel import Ranks
from milepost.runner.pool_shape import PoolShape


def refuse_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings under which the mode could not keep its promise."""
    if not config.batch_invariant:
        return
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


def _refused(why: str) -> ConfigError:
    return ConfigError(f"batch_invariant: {why}")
