"""Arguments that people have for vLLM's `LLM`."""

import pytest
import torch

from milepost import LLM
from milepost.config import EngineConfig
from milepost.engine.vllm_names import own_options
from milepost.errors import ConfigError


def test_what_cards_and_scripts_pass_is_taken_as_it_is():
    asked = own_options(
        {
            "trust_remote_code": True,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "dtype": torch.bfloat16,
            "max_model_len": "32k",
            "block_size": 32,
            "swap_space": 4,
            "cpu_offload_gb": 0.0,
            "enable_chunked_prefill": True,
            "limit_mm_per_prompt": {"image": 0},
            "compilation_config": {"level": 3},
            "distributed_executor_backend": "mp",
            "enable_lora": False,
            "rope_scaling": None,
            "task": "generate",
            "enforce_eager": True,
        }
    )
    config = EngineConfig(**asked)
    assert asked.keys() == {
        "tensor_parallel_size",
        "dtype",
        "max_model_len",
        "page_size",
        "limit_mm_per_prompt",
        "enforce_eager",
    }
    assert (config.dtype, config.max_model_len, config.page_size) == ("bfloat16", 32000, 32)


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({"max_model_len": -1}, None),
        ({"load_format": "fastsafetensors"}, "auto"),
        ({"dtype": "auto"}, "auto"),
        ({"quantization": None}, None),
    ],
)
def test_words_for_our_default(options, default):
    (name,) = options
    assert getattr(EngineConfig(**own_options(options)), name) == default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "enable_lora=True is not supported: merge the adapter"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 .*: use tensor_parallel_size"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling=.*: use hf_overrides, with rope_param"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 .* use quantization fp8, or tensor_parallel_"),
        ({"runner": "pooling"}, "runner='pooling' .*: only text generation is served"),
        ({"dtype": torch.int8}, "dtype='int8': use one of"),
    ],
)
def test_what_would_change_the_answers_is_refused_with_what_to_do(options, message):
    """Before any file is read."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM("no-such-folder", **options)
