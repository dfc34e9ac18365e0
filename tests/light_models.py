"""Folders with a config and a tiny tokenizer, no weights: what ``kvferry check`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = (
    "Read the text and answer the question about it.",
    "The quick brown fox jumps over 13 lazy dogs; naive cafe, 50 % off!",
    "def f(x): return {'a': x ** 2} # done",
    "Question: Text: Answer:",
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SMALL = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


def tiny_tokenizer(*, vocab: int = 300, template: str | None = TEMPLATE, lines: Any = TEXT) -> Any:
    """A byte-level BPE trained on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def save(folder: Path, config: Any, tokenizer: Any | None = None) -> Path:
    """Write both into a folder."""
    config.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def qwen3(**changes: Any) -> Any:
    """A shrunken Qwen3 config."""
    from transformers import Qwen3Config

    return Qwen3Config(**{**SMALL, **changes})


def qwen3_14b() -> Any:
    """Qwen3-14B's sizes."""
    return qwen3(
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )


def qwen3_32b() -> Any:
    """Qwen3-32B's sizes."""
    return qwen3(
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )
