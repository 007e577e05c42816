"""`milepost plan`: what a model takes of a GPU's memory, and what then fits; needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from milepost.cli.display import Screen
from milepost.cli.flags import ENGINE, ModelArgument, add_flags, one_model
from milepost.config import EngineConfig
from milepost.errors import ConfigError, missing

if TYPE_CHECKING:
    from milepost.engine.assembly import MemoryPlan

GIB = 2**30
_UNITS = {"gib": GIB, "": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
_LARGE = 79 * GIB
"""GPUs from this size on are taken for Hopper's, smaller ones for Ada's."""
_LEAST_SHOWN = GIB // 100


def plan_command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def plan(
        checkpoint: ModelArgument = None,
        /,
        *,
        gpu_memory: Annotated[str, Parameter(help="A GPU's memory, such as 24GiB.")],
        chip: Annotated[
            str, Parameter(help="Such as sm_86; by default sm_89, or sm_90 from 79 GiB on.")
        ] = "",
        chat_tokens: Annotated[int, Parameter(help="Length of a chat, for counting them.")] = 8192,
        **settings: Any,
    ) -> None:
        """Show what a model's weights, steps and cache take of a GPU's memory, which context and
        how many chats fit, and which settings leave more room.

        Only config.json is read, and no GPU is needed. The figures are those of a start with the
        same flags; what the driver keeps is an assumption.
        """
        settings["model"] = one_model(checkpoint, settings.get("model"))
        config, num_bytes = ENGINE.build(settings), read_size(gpu_memory)
        for table in _tables(config, num_bytes, chip, chat_tokens):
            screen.reports.print(table)

    return add_flags(plan, [ENGINE])


def read_size(text: str) -> int:
    """Reads a size such as 24GiB, 80GB or 24, which is in GiB. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or not 0 < float(match[1]) < 2**40:
        raise ConfigError(f"--gpu-memory {text}: use a size such as 24GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _tables(
    config: EngineConfig, num_bytes: int, chip: str, chat_tokens: int
) -> Iterator[Table | str]:
    # Imported here because torch and the models take seconds to import.
    from milepost.engine.assembly import MemoryPlanner, changes
    from milepost.kernels.platform.device import find_chip, triton_version
    from milepost.kernels.platform.pretending import pretend

    if triton_version() == (0, 0):
        raise missing("milepost plan", "triton", "gpu")
    name = chip or ("sm_90" if num_bytes >= _LARGE else "sm_89")
    with pretend(find_chip(name)) as meter:
        planner = MemoryPlanner(meter)
        plan = planner.plan(config, num_bytes)
        yield _weights(plan)
        yield _memory(plan, name)
        yield _what_fits(plan, chat_tokens)
        if plan.refused or plan.max_model_len < plan.num_positions:
            table = _table("with instead", "cache", "context", f"chats of {chat_tokens:,}")
            for flag, changed in changes(config, plan):
                try:
                    other = planner.plan(changed, num_bytes)
                except ConfigError:
                    continue  # a setting that this model does not allow
                chats = f"{other.num_chats(chat_tokens):,}"
                table.add_row(flag, _size(other.cache_bytes), f"{other.max_model_len:,}", chats)
            yield table


def _weights(plan: MemoryPlan) -> Table:
    table = _table("weights", "form", "size")
    for (part, form), num_bytes in plan.weights.items():
        if num_bytes >= _LEAST_SHOWN:
            table.add_row(part, form, _size(num_bytes))
    return table


def _memory(plan: MemoryPlan, chip: str) -> Table:
    size = plan.config.tensor_parallel_size
    each = f", each of {size} GPUs" if size > 1 else ""
    table = _table(f"{_size(plan.gpu_bytes)} of {chip}{each}", "size")
    for what, num_bytes in plan.items():
        if num_bytes >= _LEAST_SHOWN:
            table.add_row(what, _size(num_bytes))
    return table


def _what_fits(plan: MemoryPlan, chat_tokens: int) -> str:
    shape = plan.shape
    lines = [
        f"KV of 1,000 tokens {1000 * plan.token_bytes / 2**20:.1f} MiB, "
        f"states of a sequence {shape.state_bytes / 2**20:.1f} MiB",
        f"context that fits: {plan.max_model_len:,} of the model's {plan.num_positions:,} tokens",
        f"chats of {chat_tokens:,} tokens at once: {plan.num_chats(chat_tokens):,}",
    ]
    if plan.refused:
        lines.append(f"does not start: {plan.refused}")
    return "\n".join(lines) + "\n"


def _table(*columns: str) -> Table:
    first, *others = columns
    table = Table(box=None, title_justify="left")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
