"""`milepost kernels` shows which kernels serve a model on a chip, and why not others; `milepost
warm` compiles them ahead of a first start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from milepost.cli.display import Screen
from milepost.cli.flags import ENGINE, ModelArgument, WholeOrNone, add_flags, one_model
from milepost.cli.plan import read_size
from milepost.errors import missing


def kernels_command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def kernels(
        model: Annotated[str, Parameter(help="A folder with config.json, or a name on the hub.")],
        *,
        chip: Annotated[str, Parameter(help="Such as sm_89; by default this machine's.")] = "",
        quantization: Literal["fp8"] | None = None,
        hopper_kernels: bool = True,
        fp4_activations: bool = False,
    ) -> None:
        """Show which kernels multiply the model's weights, by the number of tokens of a step, and
        which kernels attend, by the tokens of a sequence, and which run its recurrences, by the
        number of decoding sequences or of a prefill's tokens.

        A GPU is needed only if no chip is named; of the model, only its configuration is read. Each
        kernel is listed with its order of summation, and with the reason why the kernel before it
        in the table does not serve.
        """
        # Imported here because torch and the models take seconds to import.
        from milepost.kernels.platform.device import hopper_kernels as allowed
        from milepost.models.kernel_list import COLUMNS, list_kernels

        table = Table(title=f"{model} on {chip or 'this machine'}", box=None)
        for column in COLUMNS:
            table.add_column(column)
        with allowed(hopper_kernels):
            asked = {"fp4_activations": fp4_activations}
            for cells in list_kernels(model, chip, quantization, **asked):
                table.add_row(*cells)
        screen.reports.print(table)

    return kernels


def warm_command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def warm(
        checkpoint: ModelArgument = None,
        /,
        *,
        chip: Annotated[str, Parameter(help="Such as sm_89; by default this machine's.")] = "",
        gpu_memory: Annotated[
            str, Parameter(help="The GPU's memory, such as 24GiB; by default this GPU's, or 80GB.")
        ] = "",
        processes: Annotated[
            WholeOrNone, Parameter(help="How many compile; by default one for each core, up to 16.")
        ] = None,
        **settings: Any,
    ) -> None:
        """Compile all kernels that a server with the same flags would compile when it starts.

        Reads config.json, and no weights. No GPU is needed if a chip is named. The kernels go to
        Triton's cache (TRITON_CACHE_DIR, or ~/.triton), for images and clusters.
        """
        settings["model"] = one_model(checkpoint, settings.get("model"))
        config = ENGINE.build(settings)
        # Imported here because torch and the models take seconds to import.
        from milepost.engine.assembly import warm as warm_up
        from milepost.kernels.platform.device import (
            find_chip,
            present_chip,
            present_memory,
            triton_version,
        )

        if triton_version() == (0, 0):
            raise missing("milepost warm", "triton", "gpu")
        found_chip = find_chip(chip) if chip else present_chip()
        num_bytes = read_size(gpu_memory) if gpu_memory else present_memory()
        begin = screen.clock()
        num = warm_up(config, found_chip, num_bytes, processes)
        spent = screen.clock() - begin
        screen.reports.print(f"kernels for {found_chip.arch} are compiled: {spent:.1f} s, by {num}")

    return add_flags(warm, [ENGINE])
