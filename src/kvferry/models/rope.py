"""Turn and un-turn keys by the model's own rotary module, in float32.

Owns the only place where rotary angles meet keys. Keys are ``[T, H, D]``; only the leading
``rotary_dim`` dims turn. With cos and sin scaled by s (yarn's attention scaling) the inverse is
``(k cos - rotate_half(k) sin) / s^2``, since s^2 = cos^2 + sin^2 at every angle
(RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvferry.errors import UnsupportedGeometry


def rotary_module(model: Any) -> nn.Module:
    """The model's own rotary embedding.

    Raises:
        UnsupportedGeometry: the model has none where its class should keep it.
    """
    module = getattr(model.get_decoder(), "rotary_emb", None)
    if not isinstance(module, nn.Module):
        raise UnsupportedGeometry(
            expected="a rotary embedding named rotary_emb in the decoder",
            got=f"{type(model).__name__} without one",
            next_step="choose a model with rotary positions",
        )
    return module


def angles(rotary: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin at the given positions.

    Args:
        rotary: the model's own rotary module.
        positions: ``[T]`` int64.

    Returns:
        cos and sin, each ``[T, rotary_dim]`` float32, scaled as the model scales them.
    """
    probe = torch.empty(0, dtype=torch.float32, device=positions.device)
    cos, sin = rotary(probe, positions[None])
    return cos[0], sin[0]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Un-rotated keys to keys at their positions.

    Args:
        keys: ``[T, H, D]``.
        cos: ``[T, R]`` with R <= D.
        sin: ``[T, R]``.

    Returns:
        ``[T, H, D]`` in the keys' dtype.
    """
    return _turn(keys, cos, sin)


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of ``rotate``, attention scaling undone as well; same shapes."""
    scale = (cos.square() + sin.square()).mean()
    return _turn(keys, cos / scale, -sin / scale)


def _turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turning = keys[..., :width].float()
    half = width // 2
    swapped = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    turned = torch.addcmul(turning * cos[:, None], swapped, sin[:, None]).to(keys.dtype)
    if width == keys.shape[-1]:
        return turned
    return torch.cat((turned, keys[..., width:]), dim=-1)
