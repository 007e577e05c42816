"""A checkpoint that can hold a conversation, for tests of everything above the engine.

Random weights, a byte-level tokenizer, and a chat template in the manner of the Qwen family:
ChatML, tools as JSON in the system prompt, calls in <tool_call> and reasoning in <think>.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers  # its models are loaded when they are named, which takes seconds
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "you are a helpful assistant. what is the weather like in Zürich today?",
    "日本語の文章と 한국어 문장 — naïve café 🙂🙃 🇨🇭 end of story END STOP stop",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}',
    "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
VOCAB_SIZE = 448

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- 'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if message.role in ('user', 'tool', 'assistant') %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""


def make_tokenizer(
    kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
) -> PreTrainedTokenizerFast:
    """Small and byte-level, with the Qwen family's markers as single tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE),
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE])
    tokenizer = kind(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save(folder: Path, *, scale: float = 0.2) -> Path:
    """Write the checkpoint; returns the folder."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        initializer_range=scale,
    )
    tokenizer = make_tokenizer()
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
