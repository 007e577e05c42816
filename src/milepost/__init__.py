"""Milepost: an engine for hybrid language models whose prefix cache really hits.

from milepost import LLM, SamplingParams

llm = LLM()
output = llm.generate("What does str.partition do?", SamplingParams(max_tokens=64))[0]
print(output.outputs[0].text, output.cache_report)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milepost.sampling_params import SamplingParams
from milepost.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from milepost.engine.async_llm import AsyncLLM
    from milepost.engine.llm import LLM
    from milepost.engine.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports what needs torch only when it is asked for, so `import milepost` stays light."""
    if name == "LLM":
        from milepost.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from milepost.engine.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("CompletionOutput", "RequestOutput"):
        from milepost.engine import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
