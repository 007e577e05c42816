"""`milepost kernels`: which kernels serve a model's weights, attention and recurrences on a chip,
and why not others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table

from milepost.cli.display import Screen


def kernels_command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def kernels(
        model: Annotated[str, Parameter(help="A folder with config.json, or a name on the hub.")],
        *,
        chip: Annotated[str, Parameter(help="Such as sm_89; by default this machine's.")] = "",
        quantization: Literal["fp8"] | None = None,
        hopper_kernels: bool = True,
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
            for cells in list_kernels(model, chip, quantization):
                table.add_row(*cells)
        screen.reports.print(table)

    return kernels
