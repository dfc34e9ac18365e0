"""Both models read the pieces once; what they held is kept raw.

Owns the hooks. Reads prefix and piece in one pass as ``kvferry capture`` does and keeps the body's
rows. Stopped at any moment, the same command goes on with the next piece, and ends with the same
bytes. One call: ``read_pieces(source, receiver, pieces, bound, settings, folder)``.

**Received attention** of token j in a layer: the attention probability that a query after j gives
to j, mean over heads and over all queries after j in the piece. The last token has none and gets 0.

**Query moment** of a layer and key/value head: the mean of ``q q'`` over the queries of its heads,
each turned as a key 1, 4, 16, 64 or 256 positions before it would meet it; an error e in an
un-rotated key changes a logit by ``q'e``, so ``e' M e`` is the mean squared change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvferry.errors import WrongPair
from kvferry.maps.linear import cache_features
from kvferry.models.alignment import require_same_tokens
from kvferry.models.cache import read
from kvferry.models.geometry import Geometry, require_supported
from kvferry.models.load import LoadedModel
from kvferry.models.rope import angles, rotary_module, rotate, unrotate
from kvferry.provenance import (
    code_version,
    machine,
    read_object,
    sha256_text,
    sole_writer,
    sorted_json,
    write_json,
)
from kvferry.running.prompt import BoundLayout
from kvferry.terminal import progress

from .pieces import FORMAT, SIDES, Piece, ReadSettings, half, piece_path, write_tensors
from .projection import Projection

NOTING = "kvferry_noting"
DISTANCES = (1, 4, 16, 64, 256)


@dataclass
class Notes:
    """What one forward pass showed, in order of layers.

    Attributes:
        residual: ``[T, hidden]`` entering each layer.
        received: ``[T]`` in each layer.
        queries: ``[H, D, D]`` in each layer.
    """

    residual: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)


@contextmanager
def noting(model: Any) -> Iterator[Notes]:
    """Note the residual stream and what attention looks at during one forward pass."""
    notes = Notes()

    def entering(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        notes.residual.append(hidden[0].detach())

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
    ) -> Any:
        scale = named.get("scaling") or query.shape[-1] ** -0.5
        notes.received.append(received_attention(query[0], key[0], scale))
        notes.queries.append(query_moment(model, query[0], key.shape[1]))
        return sdpa_attention_forward(module, query, key, value, mask, **named)

    AttentionInterface.register(NOTING, attend)
    AttentionMaskInterface.register(NOTING, sdpa_mask)
    before = model.config._attn_implementation
    hooks = [
        layer.register_forward_pre_hook(entering, with_kwargs=True)
        for layer in model.get_decoder().layers
    ]
    model.set_attn_implementation(NOTING)
    try:
        yield notes
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def received_attention(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """``[T]`` from rotated queries ``[heads, T, D]`` and keys ``[H, T, D]``; see above."""
    heads, length = query.shape[0], query.shape[1]
    group = heads // key.shape[0]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).tril(-1)
    hidden = torch.ones_like(later).triu(1)
    total = torch.zeros(length, device=query.device)
    for head in range(heads):
        scores = (query[head] @ key[head // group].T).float() * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        total = total + (weights * later).sum(0)
    counts = later.sum(0).clamp_min(1)
    return total / heads / counts


def query_moment(model: Any, query: Tensor, kv_heads: int) -> Tensor:
    """``[H, D, D]`` from rotated queries ``[heads, T, D]``; see above."""
    rotary, length = rotary_module(model), query.shape[1]
    cos, sin = angles(rotary, torch.arange(length, device=query.device))
    plain = unrotate(query.transpose(0, 1), cos, sin)
    cos, sin = angles(rotary, torch.tensor(DISTANCES, device=query.device))
    moment = torch.zeros(kv_heads, query.shape[-1], query.shape[-1], device=query.device)
    for place in range(len(DISTANCES)):
        turned = rotate(plain, cos[place].expand(length, -1), sin[place].expand(length, -1))
        grouped = turned.float().reshape(length, kv_heads, -1, query.shape[-1])
        moment = moment + torch.einsum("thgd,thge->hde", grouped, grouped)
    return moment / (length * len(DISTANCES) * (query.shape[0] // kv_heads))


def read_one(loaded: LoadedModel, prefix: Tensor, ids: Tensor, side: str) -> dict[str, Tensor]:
    """A piece's tensors from one model, named for the file."""
    whole = torch.cat((prefix, ids))
    with torch.no_grad(), noting(loaded.model) as notes:
        cache = read(loaded.model, whole, torch.arange(whole.numel()), loaded.revision)
    body = slice(prefix.numel(), None)
    named = {}
    for index, features in enumerate(cache_features(cache.select(body))):
        named[f"{side}.kv.{index}"] = half(features.cpu(), f"{side} layer {index}")
    for index, residual in enumerate(notes.residual):
        named[f"{side}.res.{index}"] = half(residual[body].cpu(), f"{side} residual {index}")
    named[f"{side}.received"] = torch.stack(notes.received)[:, body].cpu()
    named[f"{side}.queries"] = torch.stack(notes.queries).cpu()
    return named


def read_pieces(
    source: LoadedModel,
    receiver: LoadedModel,
    pieces: list[Piece],
    bound: BoundLayout,
    settings: ReadSettings,
    folder: Path,
    *,
    after_piece: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Read or go on reading.

    Args:
        after_piece: called with the number of pieces done (tests stop here).

    Returns:
        the header.

    Raises:
        WrongPair: the folder holds other readings.
        BadInput: another process is reading into the folder.
        NotFinite: a model gave NaN or infinity.
    """
    sides = dict(zip(SIDES, (source, receiver), strict=True))
    require_same_tokens(source.tokenizer, receiver.tokenizer)
    models = {side: _model(loaded) for side, loaded in sides.items()}
    same = {
        "models": models,
        "layout_identity": bound.identity,
        "settings": asdict(settings),
        "pieces": [piece.row() for piece in pieces],
    }
    header = {
        "format": FORMAT,
        **same,
        "identity": sha256_text(sorted_json(same)),
        "layout": bound.layout.to_dict(),
        "prefix_ids": list(bound.prefix_ids),
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "reading"):
        if (folder / "reading.json").exists():
            known = read_object(folder / "reading.json", "identity")
            if known["identity"] != header["identity"]:
                raise WrongPair(
                    expected=f"an empty folder, or these readings in {folder}",
                    got="readings of other models, texts or settings",
                    next_step="choose another --out, or remove that folder",
                )
            header = known
        else:
            frozen = {
                f"{side}.{index}.{name}": tensor
                for side, loaded in sides.items()
                for index, projection in enumerate(_projections(loaded))
                for name, tensor in projection.tensors.items()
            }
            write_tensors(folder / "frozen.safetensors", frozen)
            write_json(folder / "reading.json", header)
        _read_all(sides, pieces, bound, folder, after_piece)
    return header


def _read_all(
    sides: dict[str, LoadedModel],
    pieces: list[Piece],
    bound: BoundLayout,
    folder: Path,
    after_piece: Callable[[int], None] | None,
) -> None:
    for left in (folder / "pieces").glob(".*.part"):
        left.unlink(missing_ok=True)
    waiting = [i for i in range(len(pieces)) if not piece_path(folder, i).exists()]
    tokens = [int(piece.token_ids.numel()) for piece in pieces]
    done = float(sum(tokens) - sum(tokens[i] for i in waiting))
    with progress("read", total=sum(tokens), unit="tokens", done=done) as advance:
        for index in waiting:
            piece = pieces[index]
            named = {"token_ids": piece.token_ids, "tail": piece.tail}
            for side, loaded in sides.items():
                named |= read_one(loaded, bound.prefix(), piece.token_ids, side)
            write_tensors(piece_path(folder, index), named)
            advance(tokens[index])
            if after_piece is not None:
                after_piece(index + 1)


def _projections(loaded: LoadedModel) -> list[Projection]:
    geometry = Geometry.from_config(loaded.model.config)
    model: Any = loaded.model
    return [
        Projection.of(layer.input_layernorm, layer.self_attn, shape.num_kv_heads)
        for layer, shape in zip(model.get_decoder().layers, geometry.layers, strict=True)
    ]


def _model(loaded: LoadedModel) -> dict[str, Any]:
    geometry = Geometry.from_config(loaded.model.config)
    require_supported(geometry, loaded.spec)
    return {
        # A folder's name without its path, which is this machine's; a hub id whole.
        "spec": Path(loaded.spec).resolve().name if Path(loaded.spec).exists() else loaded.spec,
        "revision": loaded.revision,
        "geometry": geometry.to_dict(),
    }
