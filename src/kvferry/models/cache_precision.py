"""A key/value cache rounded as an engine holds it; one table of kinds, one cache layer.

Every kind rounds entries as they enter the cache, keys after rope, and attention reads the rounded
ones, in prefill and decode alike, as engines with a quantised cache do. Each entry is rounded by
itself, so a text read in pieces gives the same cache as one read at once. Rounded numbers are held
in the model's dtype: this shows what a precision costs in quality and saves no memory here.
Gradients pass straight through the rounding.

``int8`` and ``fp8_per_token_head`` have a float32 scale for each token and head (greatest
magnitude over 127 or 448), as vLLM's cache dtypes ``int8_per_token_head`` and
``fp8_per_token_head``. ``fp8`` is e4m3 with one scale a tensor and layer, which is 1.0, as vLLM
has it where a checkpoint brings no scales of its own; larger magnitudes than 448 saturate
(https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/).
One call: ``round_entries(keys, "int8")``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
_TINY = 1e-12


@dataclass(frozen=True)
class CacheKind:
    """How entries are rounded, and what they would take.

    Attributes:
        round: entries ``[..., D]`` to their rounded values, same dtype.
        bits: of a number.
        scale_bits: of the scales of one token and head, keys or values.
    """

    round: Callable[[Tensor], Tensor]
    bits: int
    scale_bits: int = 0


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _scales(x: Tensor, greatest: float) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp_min(_TINY) / greatest


def _int8(x: Tensor) -> Tensor:
    """Kept in floating point throughout, so that NaN stays NaN and is noticed."""
    wide = x.float()
    scales = _scales(wide, INT8_MAX)
    return ((wide / scales).round() * scales).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    wide = x.float()
    held = wide.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
    return torch.where(wide.isinf(), wide, held).to(x.dtype)  # infinity is an error, not 448


def _fp8_per_token_head(x: Tensor) -> Tensor:
    wide = x.float()
    scales = _scales(wide, FP8_MAX)
    return (_fp8(wide / scales) * scales).to(x.dtype)


KINDS: dict[str, CacheKind] = {
    "float32": CacheKind(_cast(torch.float32), 32),
    "bfloat16": CacheKind(_cast(torch.bfloat16), 16),
    "float16": CacheKind(_cast(torch.float16), 16),
    "int8": CacheKind(_int8, 8, 32),
    "fp8": CacheKind(_fp8, 8),
    "fp8_per_token_head": CacheKind(_fp8_per_token_head, 8, 32),
}


class _StraightThrough(torch.autograd.Function):
    """Rounds forward; backward the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        return KINDS[kind].round(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def round_entries(x: Tensor, kind: str | None) -> Tensor:
    """Keys (rotated) or values as a cache of a kind holds them.

    Args:
        x: ``[..., D]``, a token's and head's numbers last.
        kind: of ``KINDS``; ``None`` leaves them as they are.
    """
    if kind is None:
        return x
    rounded: Tensor = _StraightThrough.apply(x, kind)  # type: ignore[no-untyped-call]
    return rounded


class RoundedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention cache layer that rounds what enters it."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round new keys and values ``[B, H, T, D]``, add them, and return all."""
        keys, values = (round_entries(x, self.kind) for x in (key_states, value_states))
        return super().update(keys, values, *args, **kwargs)


def empty_cache(model: Any, kind: str | None) -> DynamicCache:
    """A cache for a model that rounds as ``kind`` says; ``None`` keeps what the model computes."""
    cache = DynamicCache(config=model.config)
    if kind is not None:
        cache.layers = [RoundedLayer(kind) for _ in cache.layers]
    return cache


def kind_of(cache: DynamicCache) -> str | None:
    """How a cache rounds what enters it."""
    layer: Any = cache.layers[0]
    return layer.kind if isinstance(layer, RoundedLayer) else None


def round_cache(model: Any, cache: DynamicCache, kind: str | None) -> DynamicCache:
    """A cache's entries rounded after the fact, in a cache that goes on rounding.

    Args:
        cache: layers of ``[B, H, T, D]``, keys rotated; left as it is.
    """
    rounded = empty_cache(model, kind)
    old: list[Any] = list(cache.layers)
    for index, layer in enumerate(old):
        rounded.update(layer.keys, layer.values, index)
    return rounded


def bytes_per_token(heads: int, head_dim: int, layers: int, kind: str) -> float:
    """Bytes an engine keeps a token, keys and values of all layers, scales included."""
    held = KINDS[kind]
    return 2 * layers * heads * (head_dim * held.bits + held.scale_bits) / 8
