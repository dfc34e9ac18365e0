"""Geometry from a config alone: what it says of every class, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import UnsupportedGeometry
from kvferry.models.geometry import Geometry, require_supported, unsupported_reasons
from tests.tiny import CONFIGS, NAMES, YARN_ROPE, build, config


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )


def _deepseek() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300)


def _rope(rope_type: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128,
        }
    return rope


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ("llama", 2, 8, 8, "default", False)),
        ("llama-llama3", ("llama", 2, 8, 8, "llama3", False)),
        ("llama-yarn", ("llama", 2, 8, 8, "yarn", False)),
        ("llama-linear", ("llama", 2, 8, 8, "linear", False)),
        ("qwen2", ("qwen2", 2, 8, 8, "default", False)),
        ("qwen2-yarn", ("qwen2", 2, 8, 8, "yarn", False)),
        ("qwen3", ("qwen3", 2, 12, 12, "default", True)),
        ("mistral", ("mistral", 2, 8, 8, "default", False)),
        ("stablelm-0.25", ("stablelm", 2, 16, 4, "default", False)),
        ("stablelm-0.5", ("stablelm", 2, 16, 8, "default", False)),
        ("stablelm-norm", ("stablelm", 2, 16, 4, "default", True)),
    ],
)
def test_every_class_that_is_run(name: str, expected: tuple[Any, ...]) -> None:
    found = Geometry.from_config(config(name))
    layer = found.layers[0]
    assert (
        found.model_type,
        layer.num_kv_heads,
        layer.head_dim,
        layer.rotary_dim,
        found.rope_type,
        found.qk_norm,
    ) == expected
    assert found.depth == 3
    assert {x.kind for x in found.layers} == {"full"}
    assert found.max_positions == 512
    assert unsupported_reasons(found) == []
    require_supported(found, name)


@pytest.mark.parametrize("name", NAMES)
def test_geometry_is_that_of_the_model_s_own_cache(name: str) -> None:
    import torch

    from kvferry.models.cache import entries, forward

    model = build(name)
    _, cache = forward(model.model, torch.arange(5)[None], torch.arange(5)[None])
    found = Geometry.from_config(model.model.config)
    assert [(k.shape[1], k.shape[3]) for k, _ in entries(cache)] == [
        (layer.num_kv_heads, layer.head_dim) for layer in found.layers
    ]
    held = sum(k.nbytes + v.nbytes for k, v in entries(cache))
    assert found.bytes_per_token(4) * 5 == held


@pytest.mark.parametrize("name", NAMES)
def test_to_dict_and_back_through_json(name: str) -> None:
    found = Geometry.from_config(config(name))
    assert Geometry.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "stablelm-0.25"])
def test_parameter_count_is_close_to_the_real_one(name: str, tied: bool) -> None:
    model = build(name, tie_word_embeddings=tied, hidden_size=64, intermediate_size=160).model
    real = sum(parameter.numel() for parameter in model.parameters())
    assert Geometry.from_config(model.config).parameters == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("make", "kind", "where"),
    [
        (_gemma3, "sliding", "0-4"),
        (lambda: CONFIGS["mistral"](sliding_window=16), "sliding", "0-2"),
        (_qwen3_next, "linear", "0-2"),
        (_deepseek, "mla", "0-1"),
    ],
    ids=["gemma3", "mistral-window", "qwen3-next", "deepseek"],
)
def test_other_layer_kinds_are_named_and_refused(make: Any, kind: str, where: str) -> None:
    found = Geometry.from_config(make())
    assert kind in {layer.kind for layer in found.layers}
    with pytest.raises(UnsupportedGeometry) as caught:
        require_supported(found, "some-model")
    assert f"{kind} layers are not run yet (layers {where})" in str(caught.value)
    assert "some-model" in str(caught.value)
    assert Geometry.from_dict(found.to_dict()) == found


def test_windows_are_kept_where_they_hold() -> None:
    found = Geometry.from_config(_gemma3())
    assert [layer.window_tokens for layer in found.layers] == [16] * 5 + [None]
    assert "window 16" in found.brief()[0]
    assert len(found.brief()) == 2


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_ropes_that_depend_on_the_length_are_refused(rope_type: str) -> None:
    found = Geometry.from_config(CONFIGS["llama"](rope_parameters=_rope(rope_type)))
    with pytest.raises(UnsupportedGeometry, match=f"rope '{rope_type}' is not run yet"):
        require_supported(found, "some-model")


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedGeometry, match="class 'gpt2' is not run yet"):
        require_supported(Geometry.from_config(_gpt2()), "some-model")


def test_a_config_without_attention_is_refused() -> None:
    from transformers import MambaConfig

    with pytest.raises(UnsupportedGeometry, match="mamba"):
        Geometry.from_config(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=300))


def test_every_reason_is_given_at_once() -> None:
    made = CONFIGS["mistral"](sliding_window=16, rope_parameters=_rope("dynamic"))
    assert len(unsupported_reasons(Geometry.from_config(made))) == 2


def test_a_window_that_is_switched_off_is_full_attention() -> None:
    made = CONFIGS["qwen2"](use_sliding_window=False, sliding_window=16, rope_parameters=YARN_ROPE)
    assert {layer.kind for layer in Geometry.from_config(made).layers} == {"full"}
    assert unsupported_reasons(Geometry.from_config(made)) == []
