"""Identifies everything that the bits of a result depend on besides the model, its settings and the
tokens. In the bitwise mode all cache keys include it.

No kernel is tuned while an engine runs. The tables choose kernels and tiles by shapes and by the
chip, so their orders of summation and the chip say everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from milepost.kernels import attention, products, recurrent
from milepost.kernels.platform.device import allows_hopper_kernels, probe
from milepost.kernels.platform.tables import KernelTable

ORDERS = 3
"""Version of the orders that the tables do not state: tiles, steps of attention, blocks of rows in
the references. Any change of those gets a new number."""


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
