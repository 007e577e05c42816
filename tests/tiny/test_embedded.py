"""The embedded model: a Hugging Face folder that transformers loads, small enough to ship, that
really answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM

import milepost
from milepost.server.parsing.answer import AnswerFormat, find_format

FOLDER = Path(milepost.__file__).parent / "tiny"
HIDDEN, INTERMEDIATE, HEAD, HEADS, KV_HEADS = 256, 512, 64, 4, 2
DRAFT_SHAPES = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.norm.weight": (HIDDEN,),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mtp.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mtp.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "mtp.layers.0.self_attn.q_proj.weight": (2 * HEADS * HEAD, HIDDEN),
    "mtp.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "mtp.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "mtp.layers.0.self_attn.q_norm.weight": (HEAD,),
    "mtp.layers.0.self_attn.k_norm.weight": (HEAD,),
}
SYSTEM = {"role": "system", "content": "You answer questions about Python."}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def answer(model, tokenizer, messages: list[dict[str, str]]) -> str:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=100, do_sample=False)
    assert out[0, -1] == tokenizer.eos_token_id, "an answer ends by itself"
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_folder_is_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000


def test_weights_are_bfloat16_and_at_most_8_million():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) <= 8_000_000


def test_draft_layer_is_stored_as_in_qwen_checkpoints():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    assert shapes == DRAFT_SHAPES


def test_transformers_loads_the_architecture(model):
    config = model.config
    assert isinstance(model, Qwen3_5ForCausalLM)
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config.max_position_embeddings >= 8192
    assert config.tie_word_embeddings
    assert config.mtp_num_hidden_layers == 1


def test_transformers_misses_no_weight():
    _, report = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]


def test_tokenizer_gives_any_text_back(tokenizer):
    for text in (
        "def f(x):\n    return x\t# ok\n",
        "naïve 漢字 🙂 \x00",
        "  spaces   and\n\n\nlines ",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens_are_the_turn_end_and_the_text_end(tokenizer):
    ids = GenerationConfig.from_pretrained(FOLDER).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token == "<|im_end|>"


def test_template_renders_roles(tokenizer):
    messages = [SYSTEM, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou answer questions about Python.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="the roles are system, user, assistant and tool"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_template_renders_tools_calls_and_results(tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    user = {"role": "user", "content": "Hi"}
    bare = tokenizer.apply_chat_template([SYSTEM, user], tools=tools, tokenize=False)
    head, _, rest = bare.partition("<|im_end|>\n")
    assert SYSTEM["content"] in head
    assert json.dumps(tools[0]) in head
    assert rest == "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template([user], tools=tools, tokenize=False).endswith(rest)

    functions = [{"name": "f", "arguments": given} for given in ({"a": "ü"}, '{"b": 1}')]
    calls = {"role": "assistant", "tool_calls": [{"function": its} for its in functions]}
    result = {"role": "tool", "content": "sunny"}
    shown = tokenizer.apply_chat_template(
        [SYSTEM, user, calls, result], tools=tools, tokenize=False
    )
    assert shown == (
        f"{bare}<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    )


def test_template_tells_the_server_how_calls_are_written(tokenizer):
    assert find_format(tokenizer.chat_template) == AnswerFormat(reasoning="none", calls="hermes")


def test_earlier_turns_are_a_prefix_of_later_ones(tokenizer):
    turns = [SYSTEM]
    earlier = ""
    for number in range(4):
        turns.append({"role": "user", "content": f"Question {number} "})
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert prompt.startswith(earlier)
        turns.append({"role": "assistant", "content": f"\nAnswer {number}"})
        earlier = f"{prompt}\nAnswer {number}<|im_end|>"
        assert tokenizer.apply_chat_template(turns, tokenize=False).startswith(earlier)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What does `str.partition` do?", ["str.partition(sep)", "first occurrence", "3-tuple"]),
        ("What does os.path.join do?", ["os.path.join(path, *paths)", "path segments"]),
        ("What does `list.append` do?", ["list.append(x)", "end of the list"]),
        ("What is the module `json` for?", ["JSON"]),
    ],
)
def test_answer_is_recognisable(model, tokenizer, question, words):
    said = answer(model, tokenizer, [SYSTEM, {"role": "user", "content": question}])
    assert [word for word in words if word not in said] == []


def test_follow_up_is_about_the_last_answer(model, tokenizer):
    turns = [SYSTEM, {"role": "user", "content": "What does `str.partition` do?"}]
    turns.append({"role": "assistant", "content": answer(model, tokenizer, turns)})
    turns.append({"role": "user", "content": "What arguments does it take?"})
    assert "one argument: `sep`" in answer(model, tokenizer, turns)
