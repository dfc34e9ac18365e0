"""Rotation by the model's own angles: undone exactly, and equal to the keys before rope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.errors import UnsupportedGeometry
from kvferry.models.cache import read
from kvferry.models.rope import angles, rotary_module, rotate, unrotate
from tests.tiny import NAMES, geometry, loaded


@pytest.mark.parametrize("start", [0, 37, 400])
@pytest.mark.parametrize("name", NAMES)
def test_unrotate_undoes_rotate(name: str, start: int) -> None:
    model = loaded(name)
    layer = geometry(model).layers[0]
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(50, layer.num_kv_heads, layer.head_dim, generator=draw)
    cos, sin = angles(rotary_module(model.model), torch.arange(start, start + 50))
    assert cos.shape == (50, layer.rotary_dim)
    assert cos.dtype == torch.float32
    turned = rotate(keys, cos, sin)
    assert (unrotate(turned, cos, sin) - keys).abs().max() < 1e-5
    assert (rotate(unrotate(keys, cos, sin), cos, sin) - keys).abs().max() < 1e-5
    torch.testing.assert_close(turned[..., layer.rotary_dim :], keys[..., layer.rotary_dim :])
    assert not torch.allclose(turned[1:], keys[1:], atol=1e-3)


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-yarn"])
def test_yarn_scales_attention(name: str) -> None:
    cos, sin = angles(rotary_module(loaded(name).model), torch.arange(9))
    scale = (cos.square() + sin.square()).sqrt()
    assert scale.min() > 1.05
    torch.testing.assert_close(scale, torch.full_like(scale, float(scale[0, 0])))


@pytest.mark.parametrize("name", NAMES)
def test_canonical_keys_are_the_keys_before_rope(name: str) -> None:
    model = loaded(name)
    before: list[Tensor] = []
    hooks = []
    layer = geometry(model).layers[0]

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        before.append(output.detach())

    for block in model.model.get_decoder().layers:
        attention = block.self_attn
        norm = getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)
        hooks.append((norm if norm is not None else attention.k_proj).register_forward_hook(keep))
    try:
        # Positions that don't start at 0 and leave gaps: nothing may rely on 0, 1, 2, …
        positions = torch.cat((torch.arange(11, 31), torch.arange(60, 70)))
        ids = torch.arange(40, 70)
        with torch.no_grad():
            cache = read(model.model, ids, positions, model.revision)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(before) == len(cache.layers)
    for raw, canonical in zip(before, cache.layers, strict=True):
        if raw.ndim == 4 and raw.shape[1] == layer.num_kv_heads:  # normed after the transpose
            raw = raw.transpose(1, 2)
        expected = raw.reshape(30, layer.num_kv_heads, layer.head_dim)
        assert (canonical.keys - expected).abs().max() < 1e-5


def test_a_model_without_rotary_positions_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(UnsupportedGeometry, match="rotary_emb"):
        rotary_module(model)


def test_half_precision_keys_keep_their_dtype_and_turn_in_float32() -> None:
    model = loaded("llama-yarn")
    keys = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    cos, sin = angles(rotary_module(model.model), torch.arange(20))
    turned = rotate(keys, cos, sin)
    assert turned.dtype == torch.bfloat16
    exact = rotate(keys.float(), cos, sin)
    assert (turned.float() - exact).abs().max() <= exact.abs().max() * 2**-8
