"""`milepost verify`: whether answers agree bit for bit, however they were computed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.table import Table

import milepost
from milepost.cli.display import Screen
from milepost.cli.flags import ENGINE, ModelArgument, Whole, add_flags, one_model
from milepost.logs import LogSetup, set_up

CHECKS = Group("Checks", sort_key=1)
BITWISE = replace(ENGINE, defaults={"batch_invariant": True}, with_negative=("batch_invariant",))
COLUMNS = ("way", "from the cache", "tokens", "different", "")


def verify_command(screen: Screen) -> Callable[..., int]:
    """Makes the command, for a terminal."""

    def verify(
        checkpoint: ModelArgument = None,
        /,
        *,
        num_prompts: Annotated[Whole, Parameter(group=CHECKS, help="Number of prompts.")] = 8,
        prompt_tokens: Annotated[
            Whole, Parameter(group=CHECKS, help="Length of the longest prompt.")
        ] = 700,
        max_tokens: Annotated[Whole, Parameter(group=CHECKS, help="Length of each answer.")] = 32,
        verbose: Annotated[
            bool, Parameter(group=CHECKS, negative=(), help="Log what the engine does.")
        ] = False,
        **settings: Any,
    ) -> int:
        """Check the bitwise mode: answer drawn prompts alone, after cache hits, in batches and
        chunks, with drafts and after a restart, and compare log-probabilities bit for bit.

        Exit status 1 if any differ. `--no-batch-invariant` shows the default mode's differences.
        """
        settings["model"] = one_model(checkpoint, settings.get("model"))
        config = BITWISE.build(settings)
        set_up(LogSetup(is_detailed=verbose))
        # Imported here because torch and the models take seconds to import.
        from milepost.engine.bit_checks import BitChecks, CheckSize

        size = CheckSize(
            num_prompts=num_prompts, prompt_tokens=prompt_tokens, max_tokens=max_tokens
        )
        table = Table(title=f"{config.model or 'the embedded model'}, bit for bit", box=None)
        for column in COLUMNS:
            table.add_column(column)
        num_different = 0
        screen.loading(config.model)
        with tempfile.TemporaryDirectory() as directory:
            checks = BitChecks(config, size, directory, lambda own: milepost.LLM(**asdict(own)))
            try:
                for result in checks.run():
                    num_different += result.num_different
                    counts = (result.num_cached, result.num_tokens, result.num_different)
                    table.add_row(result.way, *(f"{count:,}" for count in counts), result.note)
            finally:  # what has been compared is shown, even if a later engine does not start
                screen.reports.print(table)
        return int(num_different > 0)

    return add_flags(verify, [BITWISE])
