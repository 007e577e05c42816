"""The number of positions that a model supports. The module imports nothing heavy, since lengths
are also checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stretched(parameters: Mapping[str, Any], unscaled: int) -> int:
    """Returns the number of positions that a model supports: the trained number, or the number to
    which the scaling in its `rope_parameters` stretches it. `unscaled` is its setting
    `max_position_embeddings`. YaRN stretches the original length by its factor (arXiv:2309.00071,
    section 3.1), whatever that setting says; linear and dynamic scaling stretch the setting; for
    llama3 and longrope (arXiv:2402.13753), it is already the stretched length."""
    match parameters.get("rope_type", "default"):
        case "yarn":
            return int(parameters["original_max_position_embeddings"] * parameters["factor"])
        case "linear" | "dynamic":
            return int(unscaled * parameters["factor"])
        case _:
            return unscaled
