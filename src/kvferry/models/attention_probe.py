"""What a model's attention is given, layer by layer, and what it would give on another cache.

Owns the one hook into transformers' table of attention functions. One call:
``with recorded_attention(model) as calls: model(...)``; then ``calls[3].output_on(keys, values)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "kvferry_recorded"
_calls: ContextVar[list[AttentionCall] | None] = ContextVar("calls", default=None)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention.

    Attributes:
        query: ``[B, heads, n, D]``, rotated.
        keys: ``[B, KV heads, T + n, D]``, rotated, what was held and the new tokens behind it.
        values: likewise.
        mask: ``[B, 1, n, T + n]`` as the model made it, or ``None``: causal.
        scale: of the scores.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scale: float

    def output(self) -> Tensor:
        """What this attention gives, ``[B, n, heads * D]``."""
        return self._attend(self.keys, self.values)

    def output_on(self, keys: Tensor, values: Tensor) -> Tensor:
        """What the same queries get where the first entries are others, ``[B, n, heads * D]``.

        Args:
            keys: ``[1, KV heads, T, D]``, rotated; the new tokens' own follow behind them.
            values: likewise.
        """
        held, rows = keys.shape[2], self.query.shape[0]
        return self._attend(
            torch.cat((keys.expand(rows, -1, -1, -1), self.keys[:, :, held:]), dim=2),
            torch.cat((values.expand(rows, -1, -1, -1), self.values[:, :, held:]), dim=2),
        )

    def _attend(self, keys: Tensor, values: Tensor) -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            self.query,
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None and self.query.shape[2] > 1,
            scale=self.scale,
            enable_gqa=True,
        )
        return found.transpose(1, 2).flatten(2)


def _recorded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    calls = _calls.get()
    if calls is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        calls.append(AttentionCall(query, key, value, attention_mask, scale))
    found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **arguments
    )
    return found


ALL_ATTENTION_FUNCTIONS.register(NAME, _recorded)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


@contextmanager
def recorded_attention(model: Any) -> Iterator[list[AttentionCall]]:
    """Keep what each layer's attention is given, in order of layers.

    Yields:
        a list that forward passes fill.
    """
    before = model.config._attn_implementation
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    model.set_attn_implementation(NAME)
    try:
        yield calls
    finally:
        model.set_attn_implementation(before)
        _calls.reset(token)
