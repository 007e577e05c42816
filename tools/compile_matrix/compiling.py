"""Compiles launches for a chip with Triton's own compiler, and says what does not run there."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from chips import Chip
from record import Launch

_RESOURCES = re.compile(r"REG:(\d+).*?STACK:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one launch on one chip."""

    shared_bytes: int = 0
    registers: int = 0
    """Of a thread; 0 where they are not known."""
    spilled_bytes: int = 0
    error: str = ""
    """What the compiler said, its last line."""

    def complaint(self, chip: Chip) -> str:
        """Why this doesn't run on the chip; empty if it does."""
        if self.error:
            return self.error
        if self.shared_bytes > chip.shared_bytes:
            return (
                f"{self.shared_bytes} bytes of shared memory, "
                f"{chip.arch} has {chip.shared_bytes} for a program"
            )
        return ""


class Results:
    """Results by key, from files of JSON lines; new ones are added to `new` as they come."""

    def __init__(self, files: Iterable[Path], *, new: Path) -> None:
        self._new = new
        self._results: dict[str, Result] = {}
        for path in files:
            if path.exists():
                for line in path.read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    key = row.pop("key")
                    self._results[key] = Result(**row)

    def find(self, key: str) -> Result | None:
        return self._results.get(key)

    def add(self, key: str, result: Result) -> None:
        self._results[key] = result
        self._new.parent.mkdir(parents=True, exist_ok=True)
        with self._new.open("a", encoding="utf-8") as file:
            file.write(self._line(key) + "\n")

    def write(self, path: Path, keys: Iterable[str]) -> None:
        """A file of these keys alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = sorted({self._line(key) for key in keys})
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _line(self, key: str) -> str:
        values = {name: value for name, value in asdict(self._results[key]).items() if value}
        return json.dumps({"key": key, **values})


def compile_launch(launch: Launch, chip: Chip, code: Path | None = None) -> Result:
    """Compile it now; nothing is kept but the code, in a file of this name."""
    if launch.options.get("launch_pdl") and chip.capability < (9, 0):
        return Result(error="launched so that it overlaps, which no chip before sm_90 does")
    kernel = launch.kernel
    source = kernel.ASTSource(
        kernel, dict(launch.signature), dict(launch.constexprs), dict(launch.attributes)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.compilation.scope(),
    ):
        triton.knobs.cache.dir = folder
        # Code then changes with what it does, not with where it stands.
        triton.knobs.compilation.disable_line_info = True
        try:
            compiled = triton.compile(source, target=chip.target, options=dict(launch.options))
        except Exception as error:  # noqa: BLE001  whatever a compiler raises is the result
            return Result(error=_last_line(error))
        registers, spilled = _resources(compiled, folder)
        if code is not None:
            code.parent.mkdir(parents=True, exist_ok=True)
            code.write_text(compiled.asm["amdgcn" if chip.is_amd else "ptx"], encoding="utf-8")
    return Result(shared_bytes=compiled.metadata.shared, registers=registers, spilled_bytes=spilled)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()] or lines[-1:]
    return f"{type(error).__name__}: {' '.join(told[:2])}"[:400]


def _resources(compiled: Any, folder: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the cubin says."""
    cubin = compiled.asm.get("cubin")
    if cubin is None:
        text = compiled.asm["amdgcn"]
        return _amd_number("vgpr_count", text), _amd_number("private_segment_fixed_size", text)
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _RESOURCES.search(told)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _amd_number(name: str, text: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(match[1]) if match else 0
