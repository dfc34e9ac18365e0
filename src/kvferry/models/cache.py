"""The canonical cache: keys un-rotated, with positions; to and from a transformers cache; on disk.

Owns the shape of what is handed over and the one shim for transformers' cache argument. Stays
differentiable: nothing here writes in place. One call: ``read(model, token_ids, positions)``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from kvferry.errors import BadInput, CorruptFile, NotFinite, WrongPair
from kvferry.models.cache_precision import empty_cache, kind_of, round_entries
from kvferry.models.geometry import Geometry, LayerKind
from kvferry.models.rope import angles, rotary_module, rotate, unrotate
from kvferry.provenance import atomic_path

FORMAT = "kvferry-cache-1"


@dataclass(frozen=True)
class LayerKV:
    """One full-attention layer's keys and values.

    Attributes:
        keys: ``[T, H, D]``, un-rotated, after any key norm.
        values: ``[T, H, D]``.
        kind: the layer's kind; other kinds bring their own entries.
    """

    keys: Tensor
    values: Tensor
    kind: LayerKind = "full"


@dataclass(frozen=True)
class CanonicalCache:
    """What a model holds of a text after reading it, freed from rotary positions.

    Attributes:
        layers: one entry a layer.
        positions: ``[T]`` int64, where each entry stood when it was read.
        token_ids: ``[T]`` int64.
        revision: content hash of the model that read.
        lossy: ``True`` for a mapped cache; such a cache never answers an exact-prefix lookup.
    """

    layers: tuple[LayerKV, ...]
    positions: Tensor
    token_ids: Tensor
    revision: str
    lossy: bool = False

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def select(self, rows: slice) -> CanonicalCache:
        """The same cache at some rows of its sequence."""
        layers = tuple(LayerKV(x.keys[rows], x.values[rows], x.kind) for x in self.layers)
        return CanonicalCache(
            layers, self.positions[rows], self.token_ids[rows], self.revision, self.lossy
        )

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> CanonicalCache:
        """The same cache in another dtype or on another device."""
        layers = tuple(
            LayerKV(
                x.keys.to(dtype=dtype, device=device),
                x.values.to(dtype=dtype, device=device),
                x.kind,
            )
            for x in self.layers
        )
        return CanonicalCache(
            layers,
            self.positions.to(device=device),
            self.token_ids.to(device=device),
            self.revision,
            self.lossy,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.keys.nbytes + x.values.nbytes for x in self.layers)

    def save(self, path: Path) -> None:
        """Write safetensors with a header (positions, token ids, revision, dtype), atomically."""
        tensors = {"positions": self.positions, "token_ids": self.token_ids}
        for index, layer in enumerate(self.layers):
            tensors[f"layers.{index:04d}.keys"] = layer.keys
            tensors[f"layers.{index:04d}.values"] = layer.values
        header = {
            "format": FORMAT,
            "revision": self.revision,
            "lossy": self.lossy,
            "kinds": [layer.kind for layer in self.layers],
            "dtype": str(self.layers[0].keys.dtype).removeprefix("torch."),
        }
        # One entry: safetensors writes several in a random order, and bytes would differ.
        entry = {"header": json.dumps(header, sort_keys=True)}
        with atomic_path(path) as temporary:
            save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary, entry)

    @classmethod
    def load(cls, path: Path, *, revision: str | None = None) -> CanonicalCache:
        """Read a saved cache.

        Args:
            path: the safetensors file.
            revision: refuse a cache read by a model of another revision.

        Raises:
            CorruptFile: truncated, damaged or not a canonical cache.
            WrongPair: another revision than asked for.
        """
        try:
            with safe_open(path, framework="pt") as stream:
                header = json.loads((stream.metadata() or {}).get("header", "{}"))
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            if header.get("format") != FORMAT:
                raise ValueError(f"header says {header.get('format')!r}")
            layers = tuple(
                LayerKV(tensors[f"layers.{i:04d}.keys"], tensors[f"layers.{i:04d}.values"], kind)
                for i, kind in enumerate(header["kinds"])
            )
            cache = cls(
                layers,
                tensors["positions"],
                tensors["token_ids"],
                header["revision"],
                header["lossy"],
            )
        except (OSError, SafetensorError, LookupError, ValueError, AttributeError) as error:
            raise CorruptFile(
                expected=f"a canonical cache ({FORMAT}) in {path}",
                got=f"{type(error).__name__}: {error}",
                next_step="read the text again with the source to make a new cache",
            ) from error
        if revision is not None and cache.revision != revision:
            raise WrongPair(
                expected=f"a cache read by revision {revision[:16]}",
                got=f"revision {cache.revision[:16]}",
                next_step="use the model that made the cache, or read the text again",
            )
        return cache


@lru_cache(maxsize=64)
def _cache_argument(forward: Callable[..., Any]) -> str:
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_argument(model: Any) -> str:
    """transformers renamed ``past_key_values`` to ``cache`` in 5.20; this is the one shim."""
    return _cache_argument(type(model).forward)


def forward(
    model: Any,
    token_ids: Tensor,
    positions: Tensor,
    *,
    cache: DynamicCache | None = None,
    attention_mask: Tensor | None = None,
    logits: int | None = None,
    kind: str | None = None,
) -> tuple[Tensor | None, DynamicCache]:
    """One forward pass with explicit positions.

    Args:
        model: a causal language model.
        token_ids: ``[B, T]`` int64, the new tokens.
        positions: ``[B, T]`` int64, where they stand.
        cache: what stands before them; extended in the returned cache.
        attention_mask: ``[B, past + T]``, only for padded batches.
        logits: how many of the last positions get logits (0 = all), ``None`` for no logits at all.
        kind: how a new cache rounds its entries; a given cache has a kind of its own.

    Returns:
        logits ``[B, n, vocab]`` or ``None``, and the cache after the new tokens.
    """
    body = model if logits is not None else model.get_decoder()
    if cache is None:
        cache = empty_cache(model, kind)
    arguments: dict[str, Any] = {
        "input_ids": token_ids,
        "position_ids": positions,
        "use_cache": True,
        cache_argument(body): cache,
    }
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if logits is not None:
        arguments["logits_to_keep"] = logits
    output = body(**arguments)
    return (output.logits if logits is not None else None), cache


def extend(
    model: Any, cache: DynamicCache, token_ids: Tensor, *, logits: int | None = None
) -> tuple[Tensor | None, DynamicCache]:
    """Read tokens behind a held cache, which stays as it is.

    Args:
        cache: layers of ``[1, H, T, D]``; every row goes on from it.
        token_ids: ``[B, n]`` int64, at the positions after the cache's.
        logits: as in ``forward``.

    Returns:
        logits ``[B, n, vocab]`` or ``None``, and the cache after the new tokens.
    """
    rows, count = token_ids.shape
    held = int(cache.get_seq_length())
    positions = torch.arange(held, held + count, device=model.device).expand(rows, -1)
    return forward(
        model,
        token_ids.to(model.device),
        positions,
        cache=fork(model, cache, batch=rows),
        logits=logits,
    )


def read(
    model: Any, token_ids: Tensor, positions: Tensor, revision: str, *, kind: str | None = None
) -> CanonicalCache:
    """Let a model read a text and keep its canonical cache.

    Args:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64.
        revision: content hash of the model.
        kind: how its cache rounds entries while it reads.

    Raises:
        BadInput: no tokens.
        NotFinite: the model produced NaN or infinity.
    """
    if token_ids.numel() == 0:
        raise BadInput(
            expected="at least one token to read",
            got="an empty text",
            next_step="give a text that is not empty",
        )
    token_ids, positions = token_ids.to(model.device), positions.to(model.device)
    _, cache = forward(model, token_ids[None], positions[None], kind=kind)
    canonical = from_transformers(model, cache, positions, token_ids, revision)
    require_finite(canonical, "the source's cache")
    return canonical


def require_finite(cache: CanonicalCache, what: str) -> None:
    """Stop at NaN or infinity.

    Raises:
        NotFinite: with the first layer concerned.
    """
    for index, layer in enumerate(cache.layers):
        # A sum is finite only if every entry is; in float64 it can't overflow by itself.
        total = layer.keys.sum(dtype=torch.float64) + layer.values.sum(dtype=torch.float64)
        if not torch.isfinite(total):
            raise NotFinite(
                expected=f"finite numbers in {what}",
                got=f"NaN or infinity in layer {index}",
                next_step="load the models in float32, and check the weights with `models show`",
            )


def from_transformers(
    model: Any,
    cache: DynamicCache,
    positions: Tensor,
    token_ids: Tensor,
    revision: str,
    *,
    batch_index: int = 0,
) -> CanonicalCache:
    """A transformers cache, keys un-rotated.

    Args:
        cache: layers of ``[B, H, T, D]``.
        positions: ``[T]`` int64 of the entries.
        batch_index: which row of the batch.
    """
    cos, sin = angles(rotary_module(model), positions)
    layers = []
    for keys, values in entries(cache):
        turned = keys[batch_index].transpose(0, 1)
        kept = values[batch_index].transpose(0, 1).contiguous()
        layers.append(LayerKV(unrotate(turned, cos, sin), kept))
    return CanonicalCache(tuple(layers), positions, token_ids, revision)


def to_transformers(
    model: Any,
    cache: CanonicalCache,
    *,
    before: DynamicCache | None = None,
    kind: str | None = None,
) -> DynamicCache:
    """A canonical cache as a transformers cache, keys turned to their positions.

    Args:
        cache: layers of ``[T, H, D]``.
        before: entries that stand before it (anchors), already in the model's own form.
        kind: how the model's cache rounds entries, after turning the keys.

    Returns:
        a cache of layers ``[1, H, T, D]`` that the model can continue.
    """
    cos, sin = angles(rotary_module(model), cache.positions)
    pairs = []
    anchors = entries(before) if before is not None else None
    for index, layer in enumerate(cache.layers):
        keys = round_entries(rotate(layer.keys, cos, sin), kind).transpose(0, 1)[None]
        values = round_entries(layer.values, kind).transpose(0, 1)[None]
        if anchors is not None:
            keys = torch.cat((anchors[index][0], keys), dim=-2)
            values = torch.cat((anchors[index][1], values), dim=-2)
        pairs.append((keys, values))
    return _filled(model, pairs, kind)


def fork(model: Any, cache: DynamicCache, *, batch: int = 1) -> DynamicCache:
    """A cache that can be extended without touching the one it came from.

    Args:
        cache: layers of ``[1, H, T, D]``.
        batch: how many rows share it; no memory is copied until a row is extended.
    """
    return _filled(
        model,
        [
            (keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1))
            for keys, values in entries(cache)
        ],
        kind_of(cache),
    )


def rows_from(model: Any, cache: DynamicCache, start: int) -> DynamicCache:
    """The cache's entries from a position on; no memory is copied."""
    pairs = [(k[:, :, start:], v[:, :, start:]) for k, v in entries(cache)]
    return _filled(model, pairs, kind_of(cache))


def rows_of(model: Any, cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """Copies of a cache's rows, ``[R]`` int64 of them, some perhaps several times."""
    pairs = [(keys[rows], values[rows]) for keys, values in entries(cache)]
    return _filled(model, pairs, kind_of(cache))


def entries(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Every layer's keys and values, ``[B, H, T, D]`` (full-attention layers only)."""
    layers: list[Any] = list(cache.layers)
    return [(layer.keys, layer.values) for layer in layers]


def _filled(
    model: Any, pairs: list[tuple[Tensor, Tensor]], kind: str | None = None
) -> DynamicCache:
    """A full-attention cache holding the given tensors themselves (updates make new ones)."""
    filled = empty_cache(model, kind)
    layers: list[Any] = list(filled.layers)
    for layer, (keys, values) in zip(layers, pairs, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return filled


def check_against(cache: CanonicalCache, geometry: Geometry, name: str) -> None:
    """Refuse a cache whose shape is not that of the model it is meant for.

    Raises:
        WrongPair: with both shapes.
    """
    got = [(x.kind, *x.keys.shape[1:]) for x in cache.layers]
    want = [(x.kind, x.num_kv_heads, x.head_dim) for x in geometry.layers]
    if got != want:
        raise WrongPair(
            expected=f"{name}: {len(want)} layers like {want[0]}",
            got=f"{len(got)} layers like {got[0]}",
            next_step="use the cache with the model that it was made for",
        )
