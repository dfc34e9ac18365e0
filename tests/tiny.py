"""Tiny models of every class that is run, with a tokenizer and maps: seconds of work, offline."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvferry.maps.cache_map import FORMAT, CacheMap, MapConfig, MapSide
from kvferry.maps.linear import LinearTarget
from kvferry.models.geometry import Geometry
from kvferry.models.load import LoadedModel, ModelFolder
from kvferry.provenance import sha256_text
from kvferry.running.prompt import PromptLayout

VOCAB = 300
LAYOUT = PromptLayout(instruction="Read.\nText:\n", before_question="\nQuestion: ")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog.",
    "Read the text and answer the question about it.",
    "The ferry leaves the northern harbour at seven in the morning.",
)
CONTEXT = (
    "The ferry leaves the harbour at seven. The captain is called Ines, and she is never late."
)
OTHER = "A mill stood by the river; its wheel had not turned since the flood of that year."


def tiny_tokenizer(
    *, vocab: int = VOCAB, template: str | None = CHATML, lines: tuple[str, ...] = TEXT
) -> Any:
    """A byte-level BPE with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def _sizes(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # attention must matter, or a wrong cache would go unnoticed
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return {**base, **changes}


def _rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **more}


LLAMA3_ROPE = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
LINEAR_ROPE = _rope("linear", factor=4.0)


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_sizes(**changes))


def _qwen2(**changes: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_sizes(**changes))


def _qwen3(**changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_sizes(head_dim=12, **changes))


def _mistral(**changes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_sizes(**{"sliding_window": None, **changes}))


def _stablelm(**changes: Any) -> Any:
    from transformers import StableLmConfig

    factor = changes.pop("factor", 0.25)
    rope = _rope("default", partial_rotary_factor=factor)
    return StableLmConfig(**_sizes(**{"hidden_size": 64, "rope_parameters": rope, **changes}))


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "llama-llama3": lambda **c: _llama(rope_parameters=LLAMA3_ROPE, **c),
    "llama-yarn": lambda **c: _llama(rope_parameters=YARN_ROPE, **c),
    "llama-linear": lambda **c: _llama(rope_parameters=LINEAR_ROPE, **c),
    "qwen2": _qwen2,
    "qwen2-yarn": lambda **c: _qwen2(rope_parameters=YARN_ROPE, **c),
    "qwen3": _qwen3,
    "mistral": _mistral,
    "stablelm-0.25": _stablelm,
    "stablelm-0.5": lambda **c: _stablelm(factor=0.5, use_qkv_bias=True, **c),
    "stablelm-norm": lambda **c: _stablelm(qk_layernorm=True, **c),
}
"""Every class and rope that is run, shrunken."""
NAMES = sorted(CONFIGS)


def config(name: str, **changes: Any) -> Any:
    """A shrunken config."""
    return CONFIGS[name](**changes)


def build(name: str, *, seed: int = 0, tokenizer: Any = None, **changes: Any) -> LoadedModel:
    """A random model with a made-up revision; biases and norms are random too."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(
            config(name, **changes), attn_implementation="sdpa"
        )
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.eval()
    model.requires_grad_(False)
    key = f"{name} {seed} {sorted(changes.items())}"
    folder = ModelFolder(Path("tiny") / name, f"tiny-{name}-{seed}", sha256_text(key))
    return LoadedModel(
        model, tokenizer or shared_tokenizer(), folder, torch.float32, torch.device("cpu")
    )


@lru_cache(maxsize=1)
def shared_tokenizer() -> Any:
    """One tokenizer for all."""
    return tiny_tokenizer()


@lru_cache(maxsize=64)
def loaded(name: str, seed: int = 0) -> LoadedModel:
    """The same model for every test that only reads it."""
    return build(name, seed=seed)


def geometry(model: LoadedModel) -> Geometry:
    """The model's geometry."""
    return Geometry.from_config(model.model.config)


def make_map(
    source: LoadedModel,
    receiver: LoadedModel,
    targets: dict[str, LinearTarget],
    *,
    layout: PromptLayout = LAYOUT,
    quality: dict[str, Any] | None = None,
) -> CacheMap:
    """A map of given targets."""
    sides = [
        MapSide(spec=m.spec, revision=m.revision, dtype="float32", geometry=geometry(m).to_dict())
        for m in (source, receiver)
    ]
    config = MapConfig(
        format=FORMAT,
        source=sides[0],
        receiver=sides[1],
        k_key=max(len(t.layers) for n, t in targets.items() if n.endswith("K")),
        k_value=max(len(t.layers) for n, t in targets.items() if n.endswith("V")),
        stored="float32",
        layers={name: list(target.layers) for name, target in targets.items()},
        layout=layout.to_dict(),
        layout_identity=layout.bind(receiver.tokenizer).identity,
        fitted={"rows": {"fit": 0}},
        quality=quality or {},
        weights_sha256="0" * 64,
    )
    return CacheMap(config, targets)


def identity_map(model: LoadedModel, *, layout: PromptLayout = LAYOUT) -> CacheMap:
    """A model to itself: each target takes its own layer's K or V."""
    targets = {}
    for index, layer in enumerate(geometry(model).layers):
        whole = torch.eye(2 * layer.width)
        for place, kind in enumerate("KV"):
            weight = whole[:, place * layer.width : (place + 1) * layer.width].clone()
            targets[f"{index}.{kind}"] = LinearTarget((index,), weight, torch.zeros(layer.width))
    return make_map(model, model, targets, layout=layout)


def random_map(
    source: LoadedModel, receiver: LoadedModel, *, k: int = 2, seed: int = 0
) -> CacheMap:
    """A map between any two geometries, of the right shapes and otherwise noise."""
    draw = torch.Generator().manual_seed(seed)
    width = 2 * geometry(source).layers[0].width
    depth = geometry(source).depth
    targets = {}
    for index, layer in enumerate(geometry(receiver).layers):
        for kind in "KV":
            weight = torch.randn(k * width, layer.width, generator=draw) / (k * width) ** 0.5
            bias = 0.1 * torch.randn(layer.width, generator=draw)
            layers = tuple((index + step) % depth for step in range(k))
            targets[f"{index}.{kind}"] = LinearTarget(layers, weight, bias)
    return make_map(source, receiver, targets)
