"""Small random models of every supported class with one tiny tokenizer, and maps between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from kvferry.maps.cache_map import FORMAT, CacheMap, MapConfig, MapSide
from kvferry.maps.linear import LinearTarget
from kvferry.models.geometry import Geometry
from kvferry.models.load import LoadedModel, ModelFolder
from kvferry.running.prompt import PromptLayout

VOCAB = 260
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CLASSES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-yarn": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN}),
    "qwen3-qk-norm": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "stablelm-partial": (
        StableLmConfig,
        StableLmForCausalLM,
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}


def tokenizer(shift: int = 0) -> PreTrainedTokenizerFast:
    """Bytes as tokens; ``shift`` renumbers them, for pairs that don't agree."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: (i + shift) % 256 for i, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", pad_token="<p>", bos_token="<s>"
    )
    made.chat_template = TEMPLATE
    return made


def config(name: str, *, layers: int = 3, kv_heads: int = 2, **more: Any) -> Any:
    """A shrunken config of a class."""
    kind, _, special = CLASSES[name]
    return kind(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **special,
            **more,
        }
    )


def model(name: str, *, seed: int = 0, **more: Any) -> Any:
    """A random model; weights large enough that attention matters."""
    torch.manual_seed(seed)
    made = CLASSES[name][1](config(name, **more))
    with torch.no_grad():
        for label, weight in made.named_parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)
            elif "norm" in label:
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.add_(0.3 * torch.randn_like(weight))
    return made.eval().requires_grad_(False)


def loaded(name: str, *, seed: int = 0, tokens: Any = None, **more: Any) -> LoadedModel:
    """The same as ``load_model`` would give it, with a revision of its own."""
    revision = f"{abs(hash((name, seed, str(sorted(more.items())))))}".ljust(64, "0")[:64]
    return LoadedModel(
        model(name, seed=seed, **more),
        tokens or tokenizer(),
        ModelFolder(Path(name), name, revision),
        torch.float32,
        torch.device("cpu"),
    )


def map_between(
    source: LoadedModel, receiver: LoadedModel, targets: dict[str, LinearTarget]
) -> CacheMap:
    """An artifact around given weights."""
    layout = PromptLayout()
    sides = [
        MapSide(
            spec=m.spec,
            revision=m.revision,
            dtype="float32",
            geometry=Geometry.from_config(m.model.config).to_dict(),
        )
        for m in (source, receiver)
    ]
    return CacheMap(
        MapConfig(
            format=FORMAT,
            source=sides[0],
            receiver=sides[1],
            k_key=1,
            k_value=1,
            stored="float32",
            layers={name: list(t.layers) for name, t in targets.items()},
            layout=layout.to_dict(),
            layout_identity=layout.bind(receiver.tokenizer).identity,
            fitted={},
            quality={},
            weights_sha256="0" * 64,
        ),
        targets,
    )


def identity_map(one: LoadedModel) -> CacheMap:
    """A model to itself: each layer's own K and V."""
    targets = {}
    for index, layer in enumerate(Geometry.from_config(one.model.config).layers):
        eye, zero = torch.eye(layer.width), torch.zeros(layer.width, layer.width)
        bias = torch.zeros(layer.width)
        targets[f"{index}.K"] = LinearTarget((index,), torch.cat((eye, zero)), bias.clone())
        targets[f"{index}.V"] = LinearTarget((index,), torch.cat((zero, eye)), bias)
    return map_between(one, one, targets)


def random_map(source: LoadedModel, receiver: LoadedModel, *, seed: int = 0) -> CacheMap:
    """Random weights between any two geometries, two source layers a target."""
    generator = torch.Generator().manual_seed(seed)
    here = Geometry.from_config(source.model.config)
    targets = {}
    for index, layer in enumerate(Geometry.from_config(receiver.model.config).layers):
        for kind in ("K", "V"):
            layers = (index % here.depth, (index + 1) % here.depth)
            rows = sum(2 * here.layers[i].width for i in layers)
            weight = 0.05 * torch.randn(rows, layer.width, generator=generator)
            targets[f"{index}.{kind}"] = LinearTarget(layers, weight, torch.zeros(layer.width))
    return map_between(source, receiver, targets)
