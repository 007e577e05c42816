"""Bad input is refused with an error that names the value and says what to do, and the engine goes
on serving the others.
"""

from __future__ import annotations

import json
import math
import shutil
from itertools import islice

import numpy as np
import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.config import EngineConfig
from milepost.engine.assembly import sizing
from milepost.errors import (
    ConfigError,
    InvalidRequestError,
    MilepostError,
    UnsupportedModelError,
    WeightsError,
)
from tests.engines import (
    NUM_TOKENS,
    VOCAB_SIZE,
    answer,
    ask,
    greedy,
    num_held,
    open_llm,
    prompt,
    save_tiny,
    tokens,
)

GIB = r"use more than 0 and less than 2\*\*40"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float32)


@pytest.fixture(scope="module")
def llm(tiny):
    return tiny.open(max_model_len=512, max_cache_marks=2)


@pytest.fixture
def copy(tiny, tmp_path):
    """The checkpoint's folder, to be damaged."""
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BAD_PROMPTS = {
    "empty": (prompt([]), "the prompt is empty: use one token or more"),
    "negative": (prompt([1, -1]), r"prompt_token_ids\[1\]=-1: .* use ids from 0 to 319"),
    "too large": (prompt([VOCAB_SIZE]), r"prompt_token_ids\[0\]=320: .* use ids from 0 to 319"),
    "far too large": (prompt([2**40]), r"prompt_token_ids\[0\]=1099511627776: .* use ids from"),
    "bool": (prompt([5, True]), r"prompt_token_ids\[1\]=True: use integers"),
    "float": (prompt([5.0]), r"prompt_token_ids\[0\]=5\.0: use integers"),
    "string ids": (prompt("12"), r"prompt_token_ids\[0\]='1': use integers"),
    "bytes for ids": ({"prompt_token_ids": b"12"}, "prompt_token_ids=b'12': use a list"),
    "number for ids": ({"prompt_token_ids": 7}, "prompt_token_ids=7: use a list of integers"),
    "nested ids": (prompt([[1, 2]]), r"prompt_token_ids\[0\]=\[1, 2\]: use integers"),
    "numpy's float": (prompt([np.float64(5)]), r"prompt_token_ids\[0\]=.*5\.0.*: use integers"),
    "numpy's bool": (prompt([5, np.True_]), r"prompt_token_ids\[1\]=.*True.*: use integers"),
    "array of floats": (
        {"prompt_token_ids": np.ones(3)},
        r"prompt_token_ids\[0\]=1\.0: use integers",
    ),
    "array too deep": (
        {"prompt_token_ids": np.ones((2, 2), int)},
        r"prompt_token_ids\[0\]=.*: use integers",
    ),
    "single number": (
        {"prompt_token_ids": np.array(5)},
        "prompt_token_ids=array.*: use a list of integers",
    ),
    "too long": (
        prompt(tokens(512)),
        "the prompt has 512 tokens, and max_model_len=512 .* shorten it to 511 or raise",
    ),
    "too many marks": (
        prompt(tokens(9), cache_marks=[1, 2, 3]),
        r"3 cache_marks: use 2 or fewer \(max_cache_marks\)",
    ),
    "mark behind the prompt": (
        prompt(tokens(9), cache_marks=[10]),
        "cache_marks has 10: use token positions from 1 to 9",
    ),
    "mark at 0": (prompt(tokens(9), cache_marks=[0]), "cache_marks has 0: use token positions"),
    "negative mark": (prompt(tokens(9), cache_marks=[-3]), "cache_marks has -3: use token"),
    "mark of true": (prompt(tokens(9), cache_marks=[True]), "cache_marks has True: use token"),
    "number for marks": (prompt(tokens(9), cache_marks=4), "cache_marks=4: use a list of integers"),
    "string for marks": (prompt(tokens(9), cache_marks="4"), "cache_marks='4': use a list"),
    "empty salt": (prompt(tokens(9), cache_salt=""), "cache_salt='': use a string"),
    "number for salt": (prompt(tokens(9), cache_salt=5), "cache_salt=5: use a string"),
    "unknown key": (prompt(tokens(9), cache_mark=[1]), "prompt key 'cache_mark': use prompt, "),
    "image": (
        prompt(tokens(9), multi_modal_data={"image": b"GIF"}),
        "1 image: this model is served for text only",
    ),
    "video": (
        prompt(tokens(9), multi_modal_data={"video": 1}),
        "1 video: this model is served without videos",
    ),
    "both": (prompt(tokens(9), prompt="text"), "either 'prompt' or 'prompt_token_ids', not both"),
    "neither": ({}, "either 'prompt' or 'prompt_token_ids'"),
    "text without tokenizer": ("text", "a text prompt needs a tokenizer, .*: pass"),
    "number": (5, "prompt of type int: use a string, a list of token ids, or a dict"),
    "list of texts": (["a"], r"prompt_token_ids\[0\]='a': use integers"),
    "half a character for salt": (prompt(tokens(9), cache_salt="\ud800"), "cache_salt is not v"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompt(llm, tiny, case):
    """The whole call is refused before anything is queued; then the good prompts alone are served,
    and one that was running all the while.
    """
    bad, message = BAD_PROMPTS[case]
    good = tokens(70, seed=1)
    running = llm.stream(prompt(tokens(100)), greedy())
    next(running)
    with pytest.raises(InvalidRequestError, match=f"^prompt 1: .*{message}") as caught:
        llm.generate([prompt(good), bad], greedy(), use_tqdm=False)
    assert isinstance(caught.value, ValueError)
    if isinstance(bad, dict | str):
        with pytest.raises(InvalidRequestError, match=f"^{message}|^a prompt needs {message}"):
            llm.stream(bad, greedy())
    assert len(llm.llm_engine.scheduler.running) == 1
    assert not llm.llm_engine.scheduler.waiting
    outputs = [*ask(llm, good), list(running)[-1]]
    assert num_held(llm) == (0, 0)
    tiny.check(outputs)


BAD_PARAMS = {
    "temperature=-1": {"temperature": -1},
    "temperature=nan": {"temperature": math.nan},
    "temperature=True": {"temperature": True},
    "temperature='1'": {"temperature": "1"},
    "top_p=0": {"top_p": 0},
    "top_p=1.5": {"top_p": 1.5},
    "top_k=-2": {"top_k": -2},
    "min_p=2": {"min_p": 2},
    "max_tokens=0": {"max_tokens": 0},
    "max_tokens=1.5": {"max_tokens": 1.5},
    "min_tokens=9: use at most max_tokens=8": {"max_tokens": 8, "min_tokens": 9},
    "n=0": {"n": 0},
    "n=2: use n=1 with temperature=0": {"n": 2, "temperature": 0},
    "logprobs=21": {"logprobs": 21},
    "presence_penalty=3": {"presence_penalty": 3},
    "frequency_penalty=-3": {"frequency_penalty": -3},
    "repetition_penalty=0": {"repetition_penalty": 0},
    "seed=9223372036854775808": {"seed": 2**63},
    "stop=''": {"stop": ""},
    "stop=('x',): use detokenize=True": {"stop": "x", "detokenize": False},
    "stop_token_ids=-1": {"stop_token_ids": [-1]},
}


@pytest.mark.parametrize("message", BAD_PARAMS)
def test_contradictory_sampling_params(message):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**BAD_PARAMS[message])
    text = str(caught.value)
    assert text.startswith(message)
    assert ": use " in text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids=320: use token ids below .* of 320"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias=320: use token ids below .* of 320"),
        ({"stop": "end"}, r"stop=\('end',\): stop strings need a tokenizer; use stop_token_ids"),
    ],
)
def test_sampling_params_that_this_model_cannot_take(llm, tiny, params, message):
    with pytest.raises(InvalidRequestError, match=f"^prompt 1: {message}"):
        llm.generate([prompt([1]), prompt([2])], [greedy(), greedy(**params)], use_tqdm=False)
    assert not llm.llm_engine.has_work
    tiny.check(ask(llm, tokens(70)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([greedy()] * 3, "3 sampling_params for 2 prompts: give one, or one for each"),
        ([], "0 sampling_params for 2 prompts"),
        ({"temperature": 0}, r"sampling_params=\{'temperature': 0\}: use SamplingParams"),
        ([{"temperature": 0}] * 2, r"sampling_params=\[\{'temperature': 0\}.*: use Sampling"),
        (16, "sampling_params=16: use SamplingParams"),
    ],
)
def test_sampling_params_that_do_not_go_with_the_prompts(llm, tiny, params, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        llm.generate([prompt([1]), prompt([2])], params, use_tqdm=False)
    assert not llm.llm_engine.has_work
    tiny.check(ask(llm, tokens(70)))


def test_chat_without_tokenizer(llm):
    with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


def test_bad_prompt_leaves_requests_in_flight_alone(llm, tiny):
    """Several streams, refused prompts between their steps."""
    streams = [llm.stream(prompt(tokens(100 + i, seed=i)), greedy()) for i in range(3)]
    for stream in streams:
        list(islice(stream, 3))
    for bad, _ in BAD_PROMPTS.values():
        with pytest.raises(InvalidRequestError):
            llm.generate([prompt([1]), bad], greedy(), use_tqdm=False)
    tiny.check([list(stream)[-1] for stream in streams])


# --- prompts and pools ----------------------------------------------------------------------------


def test_prompt_longer_than_the_pool(tiny):
    """Without max_model_len the pool's size is the limit."""
    llm = tiny.open(num_pages=4)
    assert llm.llm_engine.limits.max_model_len == 256
    with pytest.raises(InvalidRequestError, match=r"prompt has 256 tokens, .*max_model_len=256"):
        ask(llm, tokens(256))
    (output,) = ask(llm, tokens(255))
    assert len(answer(output)) == 1
    assert output.outputs[0].finish_reason == "length"
    tiny.check([output], greedy(1))


def test_max_model_len_beyond_the_pool(tiny):
    with pytest.raises(ConfigError, match=r"max_model_len=300: the cache holds 256"):
        tiny.open(num_pages=4, max_model_len=300)


def test_max_model_len_beyond_the_model(tiny):
    with pytest.raises(ConfigError, match="max_model_len=65537: the model's own limit is 65536"):
        tiny.open(num_pages=4, max_model_len=65537)


def test_cache_too_small_for_anything(tiny):
    with pytest.raises(ConfigError, match=r"0.000 GiB are left for the cache.*cpu_cache_gib"):
        LLM(str(tiny.folder), skip_tokenizer_init=True, cpu_cache_gib=1e-6)


def test_smallest_pools_that_run(tiny):
    llm = tiny.open(num_pages=1, num_slots=1, page_size=64, max_num_seqs=1)
    outputs = ask(llm, tokens(30)) + ask(llm, tokens(30)) + ask(llm, tokens(43, 2), tokens(9, 3))
    tiny.check(outputs)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 48}, "page_size=48: use a power of two from 16 to 1024"),
        ({"page_size": 0}, "page_size=0: use a power of two"),
        ({"page_size": "64"}, "page_size='64': use int"),
        ({"page_size": 64.0}, "page_size=64.0: use int"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens=63: use 64 or more"),
        ({"mamba_block_size": 100}, "mamba_block_size=100: use a positive multiple of 64"),
        ({"mamba_block_size": 0}, "mamba_block_size=0: use a positive multiple"),
        ({"mamba_cache_mode": "most"}, "mamba_cache_mode='most': use one of auto, none, align"),
        ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype='int8': use one of auto"),
        ({"dtype": "int8"}, "dtype='int8': use one of auto, float32"),
        ({"load_format": "gguf"}, "load_format='gguf': use one of auto, safetensors, dummy"),
        ({"enable_prefix_caching": "0"}, "enable_prefix_caching='0': use bool"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1: use bool"),
        ({"num_pages": 0}, "num_pages=0: use 1 or more"),
        ({"num_pages": True}, "num_pages=True: use int or None"),
        ({"num_slots": -1}, "num_slots=-1: use 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: use 1 or more"),
        ({"max_num_seqs": None}, "max_num_seqs=None: use int"),
        ({"max_model_len": 0}, "max_model_len=0: use 1 or more"),
        ({"max_cache_marks": -1}, "max_cache_marks=-1: use 0 or more"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0: use above 0, up to 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: use above 0, up to 1"),
        ({"cpu_cache_gib": 0}, "cpu_cache_gib=0: use more than 0"),
        ({"cpu_cache_gib": math.inf}, rf"cpu_cache_gib=inf: {GIB}"),
        ({"cpu_cache_gib": 10**400}, rf"cpu_cache_gib=10+: {GIB}"),
        ({"cache_host_gib": 2**40}, rf"cache_host_gib=1099511627776: {GIB}"),
        ({"cache_dir": "d", "cache_disk_gib": 1e300}, rf"cache_disk_gib=1e\+300: {GIB}"),
        ({"seed": -1}, "seed=-1: use 0 or more"),
        ({"model": 5}, "model=5: use str or None"),
    ],
)
def test_bad_option(options, message):
    """Refused before any file is read."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM(**({"model": "no-such-folder"} | options))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pagesize", "did you mean page_size"),
        ("max_model_length", "did you mean max_model_len"),
        ("zzz", "use model, tokenizer, "),
    ],
)
def test_unknown_option(name, hint):
    with pytest.raises(ConfigError, match=f"^option '{name}' is unknown: {hint}"):
        LLM("no-such-folder", **{name: 1})


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_bad_device(tiny, device):
    if device == "cuda:99" and torch.cuda.is_available():
        pytest.skip("asks what happens without CUDA")
    with pytest.raises(ConfigError, match=f"^device='{device}': .*use"):
        tiny.open(device=device)


def test_every_default_is_valid():
    EngineConfig()


# --- checkpoints ----------------------------------------------------------------------------------


def test_no_such_model():
    with pytest.raises(ConfigError, match="model='/no/such/folder': there is no such folder"):
        open_llm("/no/such/folder")


def test_unknown_architecture(copy):
    change_config(copy, model_type="llama")
    with pytest.raises(UnsupportedModelError, match=r"'llama' is not supported; .*qwen3_next"):
        open_llm(copy)


def test_quantized_checkpoint(copy):
    change_config(copy, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(
        UnsupportedModelError, match=r"quant_method='bitsandbytes' is not supported"
    ):
        open_llm(copy)


def test_missing_config(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"there is no config\.json: name one"):
        open_llm(copy)


def test_gguf_is_refused_by_name(copy):
    (copy / "config.json").unlink()
    (copy / "tiny-q4_k_m.gguf").write_bytes(b"GGUF")
    for model in (copy, copy / "tiny-q4_k_m.gguf"):
        with pytest.raises(ConfigError, match="GGUF is not read: name the model's safetensors"):
            open_llm(model)


def test_missing_weights(copy):
    (copy / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=r"neither model.safetensors nor .*download"):
        open_llm(copy)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(copy, share):
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightsError, match=f"{WEIGHTS}: .*truncated.*download it again"):
        open_llm(copy)


def test_weights_that_git_left_a_pointer_to(copy):
    (copy / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(WeightsError, match=f"{WEIGHTS}: .*`git lfs pull`"):
        open_llm(copy)


@pytest.mark.parametrize("asked", [{"num_pages": 1000}, {"num_slots": 1000}, {"cpu_cache_gib": 2}])
def test_a_cache_for_which_there_is_no_memory(copy, asked, monkeypatch):
    """Refused before it is promised: the system would promise it, and end the engine later."""
    sizes = {"num_pages": 8, "num_slots": 4} if "cpu_cache_gib" not in asked else {}
    monkeypatch.setattr(sizing, "available_bytes", lambda _device: 2**20)
    with pytest.raises(ConfigError, match=r"the cache takes .* GiB are missing; lower num_pages"):
        open_llm(copy, **(sizes | asked))
    open_llm(copy, num_pages=8, num_slots=4)


def test_weights_of_another_shape(copy):
    change_config(copy, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(WeightsError, match=r"has shape \[320, 48\], the model needs \[321, 48\]"):
        open_llm(copy)


def test_missing_tokenizer(copy):
    with pytest.raises(ConfigError, match=r"no tokenizer in .*tokenizer=.*skip_tokenizer_init"):
        open_llm(copy, skip_tokenizer_init=False)


def test_missing_tokenizer_elsewhere(copy):
    with pytest.raises(ConfigError, match="no tokenizer in '/no/such': there is no such folder"):
        open_llm(copy, skip_tokenizer_init=False, tokenizer="/no/such")


def test_all_are_of_one_tree():
    """So that one `except` catches whatever Milepost refuses."""
    for error in (ConfigError, InvalidRequestError, UnsupportedModelError, WeightsError):
        assert issubclass(error, MilepostError)
        assert issubclass(error, ValueError)


def test_length_of_answers_that_are_compared():
    assert NUM_TOKENS < 43 < 64, "the smallest pool holds prompt and answer"
