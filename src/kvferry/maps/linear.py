"""Features of source layers, and the linear map from them to receiver keys and values.

Owns the order of features (a source layer's keys, all heads, then its values) and the product.
The standardisation of the fit is folded into weight and bias, so that applying the map is one
matrix product per source layer used and nothing else. Differentiable throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.models.cache import CanonicalCache, LayerKV


def layer_features(layer: LayerKV) -> Tensor:
    """Features of one source layer.

    Args:
        layer: keys and values ``[T, H, D]``, keys un-rotated.

    Returns:
        ``[T, 2 H D]``: keys of all heads, then values of all heads.
    """
    return torch.cat((layer.keys.flatten(1), layer.values.flatten(1)), dim=1)


def cache_features(cache: CanonicalCache) -> list[Tensor]:
    """Features of every layer, each ``[T, 2 H D]``."""
    return [layer_features(layer) for layer in cache.layers]


@dataclass(frozen=True)
class LinearTarget:
    """The map of one target (a receiver layer's K or V).

    Attributes:
        layers: source layers whose features it takes, in the weight's order.
        weight: ``[k F, W]``.
        bias: ``[W]``.
    """

    layers: tuple[int, ...]
    weight: Tensor
    bias: Tensor

    def apply(self, features: list[Tensor]) -> Tensor:
        """``[T, W]`` from per-layer features ``[T, F]``."""
        width = features[self.layers[0]].shape[1]
        result = self.bias
        for place, layer in enumerate(self.layers):
            block = self.weight[place * width : (place + 1) * width]
            result = torch.addmm(result, features[layer], block)
        return result

    def to(self, device: torch.device) -> LinearTarget:
        """The same map on another device."""
        return LinearTarget(self.layers, self.weight.to(device), self.bias.to(device))

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token."""
        return self.weight.numel()


def fold(weight: Tensor, x_mean: Tensor, y_mean: Tensor) -> Tensor:
    """The bias of ``y = (x - x_mean) W + y_mean``, ``[W]``."""
    return y_mean - x_mean @ weight
