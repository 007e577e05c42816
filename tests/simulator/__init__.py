"""The simulator, and the policies that only benchmarks compare with."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
