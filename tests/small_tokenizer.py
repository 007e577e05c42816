"""A small byte-level tokenizer of the kind that the Qwen family has, trained on three lines."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "you are a helpful assistant. what is the weather like in Zürich today?",
    "日本語の文章と 한국어 문장 — naïve café 🙂🙃 🇨🇭 end of story END STOP stop",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same each time."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
