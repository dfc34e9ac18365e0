"""A layer's own way from the residual stream to its keys and values, as plain tensors.

Owns what the normed-input target needs of a frozen model: the input norm, W_k and W_v with their
biases, and the key norm where there is one; kept in ``frozen.safetensors`` so that a fit needs no
model. One call: ``Projection.of(layer.input_layernorm, layer.self_attn).keys(normed)``.

With the same features and the same lambda a ridge is linear in its target. So where there is no
key norm, fitting the normed input and passing it through W_k and W_v gives the same keys and
values as fitting them directly; it can only differ where lambda is chosen apart, where a rank is
shared, or where a key norm stands behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import UnsupportedGeometry


@dataclass(frozen=True)
class Projection:
    """One layer's frozen parts.

    Attributes:
        tensors: ``norm.weight``, ``norm.bias``?, ``k.weight`` [W, hidden], ``k.bias``?,
            ``v.weight``, ``v.bias``?, ``k_norm.weight``? [D], ``eps`` [2] (input norm, key norm),
            ``centred`` [1] (1 for a LayerNorm, 0 for an RMSNorm), and ``out`` [H, D, D]: per
            key/value head the sum over its query heads of W_o' W_o.
    """

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, norm: Any, attention: Any, kv_heads: int) -> Projection:
        """Copy a layer's parts.

        Raises:
            UnsupportedGeometry: a key norm that is not one RMSNorm for all heads.
        """
        if getattr(attention, "k_layernorm", None) is not None:
            raise UnsupportedGeometry(
                expected="no key norm, or an RMSNorm over a head's dims",
                got=type(attention.k_layernorm).__name__,
                next_step="leave this class out of the ablation",
            )
        named = {"norm.weight": norm.weight, "norm.bias": getattr(norm, "bias", None)}
        for key in ("k", "v"):
            part = getattr(attention, f"{key}_proj")
            named |= {f"{key}.weight": part.weight, f"{key}.bias": part.bias}
        eps = [_eps(norm), 0.0]
        if (key_norm := getattr(attention, "k_norm", None)) is not None:
            named["k_norm.weight"] = key_norm.weight
            eps[1] = _eps(key_norm)
        width = attention.k_proj.weight.shape[0] // kv_heads
        by_head = (
            attention.o_proj.weight.detach()
            .float()
            .T.reshape(kv_heads, -1, width, len(attention.o_proj.weight))
        )
        tensors = {n: t.detach().float().cpu() for n, t in named.items() if t is not None}
        tensors["out"] = torch.einsum("hgdo,hgeo->hde", by_head, by_head).cpu()
        tensors["eps"] = torch.tensor(eps, dtype=torch.float64)
        tensors["centred"] = torch.tensor([int(isinstance(norm, torch.nn.LayerNorm))])
        return cls(tensors)

    @property
    def key_norm(self) -> bool:
        """Whether keys are normed."""
        return "k_norm.weight" in self.tensors

    def normed(self, residual: Tensor) -> Tensor:
        """The layer's normed input ``[T, hidden]`` from the residual stream entering it."""
        x = residual.float()
        if bool(self.tensors["centred"]):
            x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + float(self.tensors["eps"][0])).rsqrt()
        x = x * self.tensors["norm.weight"]
        return x + self.tensors["norm.bias"] if "norm.bias" in self.tensors else x

    def keys(self, normed: Tensor) -> Tensor:
        """Un-rotated keys ``[T, W]`` from the normed input."""
        keys = self._linear("k", normed)
        if not self.key_norm:
            return keys
        weight = self.tensors["k_norm.weight"].to(keys)
        heads = keys.reshape(len(keys), -1, len(weight))
        scale = (heads.square().mean(-1, keepdim=True) + float(self.tensors["eps"][1])).rsqrt()
        return (heads * scale * weight).flatten(1)

    def values(self, normed: Tensor) -> Tensor:
        """Values ``[T, W]`` from the normed input."""
        return self._linear("v", normed)

    def _linear(self, part: str, normed: Tensor) -> Tensor:
        product = normed @ self.tensors[f"{part}.weight"].T.to(normed)
        bias = self.tensors.get(f"{part}.bias")
        return product if bias is None else product + bias.to(product)


def _eps(norm: Any) -> float:
    """An RMSNorm's or a LayerNorm's epsilon."""
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
