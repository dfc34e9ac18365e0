"""Native readings kept for a while, by model, prefix and token ids.

Several arms, or two handoffs of opposite direction, start from the same reading; this holds the
last few so that each text is read once. Only a model's own caches enter: a mapped cache is lossy
and never answers a lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor
from transformers import DynamicCache

from kvferry.models.load import LoadedModel
from kvferry.running.prompt import BoundLayout

_Key = tuple[int, str | None, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """A model's own cache after prefix and text, and how long the text took to read.

    Attributes:
        cache: layers of ``[1, H, T, D]``.
        seconds: of the forward pass over the text (the constant prefix was read before).
    """

    cache: DynamicCache
    seconds: float


class Readings:
    """The last ``capacity`` readings; none with capacity 0."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[_Key, Reading] = OrderedDict()

    def get(self, loaded: LoadedModel, layout: BoundLayout, body: Tensor) -> Reading | None:
        """The reading of prefix + body by this model, if it is still kept."""
        return self._kept.get(_key(loaded, layout, body)) if self.capacity else None

    def put(self, loaded: LoadedModel, layout: BoundLayout, body: Tensor, reading: Reading) -> None:
        """Keep a reading; the oldest goes when there are too many."""
        if not self.capacity:
            return
        self._kept[_key(loaded, layout, body)] = reading
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)


def _key(loaded: LoadedModel, layout: BoundLayout, body: Tensor) -> _Key:
    return id(loaded.model), loaded.cache, layout.prefix_ids, tuple(body.tolist())
