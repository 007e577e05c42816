"""`milepost kernels`: which kernels multiply a model's weights on a chip, and why not others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table

from milepost.cli.display import Screen


def kernels_command(screen: Screen) -> Callable[..., None]:
    """The command, bound to a terminal."""

    def kernels(
        model: Annotated[str, Parameter(help="A folder with config.json, or a name on the hub.")],
        *,
        chip: Annotated[str, Parameter(help="Such as sm_89; by default this machine's.")] = "",
        quantization: Literal["fp8"] | None = None,
        hopper_kernels: bool = True,
    ) -> None:
        """Show which kernels multiply the model's weights, by the number of tokens of a step.

        Needs no GPU if a chip is named, and of the model its configuration alone. For each kernel
        it says in which order it adds up, and why the one before it in the table of kernels does
        not serve.
        """
        # Imported where it is used: torch and the models take seconds.
        from milepost.kernels.device import hopper_kernels as allowed
        from milepost.models.kernel_list import COLUMNS, list_kernels

        table = Table(title=f"{model} on {chip or 'this machine'}", box=None)
        for column in COLUMNS:
            table.add_column(column)
        with allowed(hopper_kernels):
            for cells in list_kernels(model, chip, quantization):
                table.add_row(*cells)
        screen.reports.print(table)

    return kernels
