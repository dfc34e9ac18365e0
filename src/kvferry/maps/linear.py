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
        center: the features' mean in the fit, ``[k F]``, or ``None`` for a map that was not fitted.
            Rounded weights need it: some key dims of real models have means of hundreds, and a
            rounding error times such a mean would be an offset in every output.
    """

    layers: tuple[int, ...]
    weight: Tensor
    bias: Tensor
    center: Tensor | None = None

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
        center = None if self.center is None else self.center.to(device)
        return LinearTarget(self.layers, self.weight.to(device), self.bias.to(device), center)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token."""
        return self.weight.numel()


def fold(weight: Tensor, x_mean: Tensor, y_mean: Tensor) -> Tensor:
    """The bias of ``y = (x - x_mean) W + y_mean``, ``[W]``."""
    return y_mean - x_mean @ weight


@dataclass(frozen=True)
class GroupedProducts:
    """All targets' products, one wide matrix product a source layer instead of many narrow ones.

    Attributes:
        blocks: source layer -> ``[F, sum of W]``, the weights of every target that uses it.
        parts: source layer -> the targets and widths of those columns, in order.
        biases: target -> ``[W]``.
    """

    blocks: dict[int, Tensor]
    parts: dict[int, list[tuple[str, int]]]
    biases: dict[str, Tensor]

    @classmethod
    def of(cls, targets: dict[str, LinearTarget]) -> GroupedProducts:
        """Regroup targets' weights by source layer (a copy)."""
        columns: dict[int, list[tuple[str, Tensor]]] = {}
        for name, target in targets.items():
            width = target.weight.shape[0] // len(target.layers)
            for place, layer in enumerate(target.layers):
                block = target.weight[place * width : (place + 1) * width]
                columns.setdefault(layer, []).append((name, block))
        return cls(
            {i: torch.cat([w for _, w in columns[i]], dim=1) for i in sorted(columns)},
            {i: [(name, w.shape[1]) for name, w in columns[i]] for i in sorted(columns)},
            {name: target.bias for name, target in targets.items()},
        )

    def apply(self, features: list[Tensor]) -> dict[str, Tensor]:
        """Every target ``[T, W]`` from per-layer features ``[T, F]``."""
        sums: dict[str, Tensor] = dict(self.biases)
        for layer, block in self.blocks.items():
            product = features[layer] @ block
            start = 0
            for name, width in self.parts[layer]:
                sums[name] = sums[name] + product[:, start : start + width]
                start += width
        return sums
