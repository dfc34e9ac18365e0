"""What each variant's cache is worth to the receiver: the tail's loss on the test texts.

Owns the mapped caches of the test texts and their records, in the form that
``kvferry.fitting.fidelity`` writes and sums up: recovered = (no_context - x) / (no_context -
receiver_native), the wrong document beside it. The source's readings are on disk, so the receiver
alone is loaded; its own reading of each text is done once and kept. Weights aren't rounded. One
call: ``measure_losses(readings, plan, variants, receiver, folder)``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import WrongPair
from kvferry.fitting.corpus import wrong_documents
from kvferry.fitting.fidelity import NAMED, score_tail, tail_loss
from kvferry.models.cache import (
    CanonicalCache,
    LayerKV,
    fork,
    forward,
    require_finite,
    to_transformers,
)
from kvferry.models.load import LoadedModel
from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    read_records,
    sole_writer,
    start_records,
)
from kvferry.running.handoff import Held
from kvferry.running.timing import Spans
from kvferry.terminal import progress

from .fitting import load_layer_map
from .layers import Plan, apply_layer, load_block, load_projection
from .pieces import Readings, read_tensors, write_tensors
from .variants import Variant

SEED = 0
RESAMPLES = 10_000


@dataclass(frozen=True)
class Text:
    """One test text's ids."""

    doc_id: str
    context: Tensor
    tail: Tensor


def measure_losses(
    readings: Readings, plan: Plan, variants: list[Variant], receiver: LoadedModel, folder: Path
) -> None:
    """Score the tail behind every variant's mapped cache, and behind the wrong document's.

    Args:
        receiver: the model that answers in the plan's direction.
        folder: gets ``header.json``, ``records.jsonl`` and ``native/``.

    Raises:
        WrongPair: another model than the one that was read.
    """
    want = readings.header["models"][plan.answers]["revision"]
    if receiver.revision != want:
        raise WrongPair(
            expected=f"the model that was read, revision {want[:16]}",
            got=f"{receiver.spec}, revision {receiver.revision[:16]}",
            next_step="give the same model as for `read`",
        )
    texts = load_texts(readings)
    partners = wrong_documents(len(texts), SEED)
    settings = readings.header["settings"]
    header = {
        "format": "kvferry-fidelity-1",
        "label": ", ".join(
            sorted({p["book"] for p in readings.header["pieces"] if p["split"] == "test"})
        ),
        "settings": {
            "context_tokens": settings["context_tokens"],
            "target_tokens": settings["target_tokens"],
            "seed": SEED,
            "resamples": RESAMPLES,
        },
        "readings": readings.header["identity"],
        "direction": plan.direction,
        "texts": [text.doc_id for text in texts],
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "measurement"):
        path = start_records(
            folder, header, same=("readings", "direction", "texts", "settings"), once=NAMED
        )
        done = {(record["map"], record["doc_id"]) for record in read_records(path)}
        prefix = _prefix(receiver, readings)
        total = len(variants) * len(texts)
        already = sum((v.name, t.doc_id) in done for v in variants for t in texts)
        with progress("losses", total=total, unit="texts", done=float(already)) as advance:
            for variant in variants:
                left = [i for i, t in enumerate(texts) if (variant.name, t.doc_id) not in done]
                caches = map_texts(readings, plan, variant, texts, folder.parent) if left else []
                for i in left:
                    started = time.perf_counter()
                    row = _one(receiver, prefix, texts[i], i, caches, partners[i], folder)
                    row |= {
                        "map": variant.name,
                        "doc_id": texts[i].doc_id,
                        "wrong_doc_id": texts[partners[i]].doc_id,
                        "seconds": round(time.perf_counter() - started, 3),
                    }
                    add_record(path, row)
                    advance(1)


def load_texts(readings: Readings) -> list[Text]:
    """The test texts."""
    texts = []
    for index in readings.indices("test"):
        ids = read_tensors(readings.path(index), ["token_ids", "tail"])
        doc_id = readings.header["pieces"][index]["doc_id"]
        texts.append(Text(doc_id, ids["token_ids"], ids["tail"]))
    return texts


def map_texts(
    readings: Readings, plan: Plan, variant: Variant, texts: list[Text], fits: Path
) -> list[CanonicalCache]:
    """Every test text's mapped cache, from the source's readings on disk.

    Args:
        fits: the folder that ``fit_variants`` wrote.
    """
    shapes = readings.geometry(plan.answers)["layers"]
    lengths = [len(text.context) for text in texts]
    layers: list[list[LayerKV]] = [[] for _ in texts]
    pc = {"pc": load_block(readings, plan, "test", "pc")} if variant.all_layers else {}
    for index, shape in enumerate(shapes):
        maps = load_layer_map(fits, variant, index)
        names = sorted({name for target in maps.values() for name in target.blocks} - {"pc"})
        features = {name: load_block(readings, plan, "test", name) for name in names} | pc
        made = apply_layer(maps, features, load_projection(readings, plan.answers, index))
        size = (-1, shape["num_kv_heads"], shape["head_dim"])
        for place, (keys, values) in enumerate(
            zip(made["K"].split(lengths), made["V"].split(lengths), strict=True)
        ):
            layers[place].append(LayerKV(keys.reshape(size), values.reshape(size)))
    start = len(readings.header["prefix_ids"])
    found = []
    for text, own in zip(texts, layers, strict=True):
        positions = torch.arange(start, start + len(text.context))
        cache = CanonicalCache(tuple(own), positions, text.context, variant.name, lossy=True)
        require_finite(cache, f"the cache mapped by {variant.name}")
        found.append(cache)
    return found


def _prefix(receiver: LoadedModel, readings: Readings) -> Any:
    """The receiver's own cache of the constant prefix: the anchors."""
    ids = torch.tensor(readings.header["prefix_ids"], device=receiver.device)
    with torch.no_grad():
        _, cache = forward(
            receiver.model, ids[None], torch.arange(len(ids), device=receiver.device)[None]
        )
    return cache


def _one(
    receiver: LoadedModel,
    prefix: Any,
    text: Text,
    place: int,
    caches: list[CanonicalCache],
    partner: int,
    folder: Path,
) -> dict[str, Any]:
    row: dict[str, Any] = {"nll": {}, "top1": {}, "kl": {}, "cosine": {}}
    native = _native(receiver, prefix, text, folder / "native" / f"{place:04d}.safetensors")
    own, outputs = native["native.log_probs"], native["native.outputs"]
    arms = {"no_context": (native["empty.log_probs"], native["empty.outputs"])}
    for name, which in (("transfer", place), ("wrong_document", partner)):
        moved = caches[which].to(dtype=receiver.dtype, device=receiver.device)
        arms[name] = _score(receiver, to_transformers(receiver.model, moved, before=prefix), text)
    row["nll"]["receiver_native"] = tail_loss(own, text.tail)
    for name, (log_probs, made) in arms.items():
        row["nll"][name] = tail_loss(log_probs, text.tail)
        row["top1"][name] = float((log_probs.argmax(-1) == own.argmax(-1)).float().mean())
        row["kl"][name] = float((own.exp() * (own - log_probs)).sum(-1).mean())
        cosine = torch.nn.functional.cosine_similarity(outputs, made, dim=-1)
        row["cosine"][name] = float(cosine.mean())
    return row


def _native(receiver: LoadedModel, prefix: Any, text: Text, path: Path) -> dict[str, Tensor]:
    """The receiver's own reading of a text, and of nothing, scored once and kept."""
    if not path.exists():
        start = int(prefix.get_seq_length())
        ids = text.context.to(receiver.device)
        positions = torch.arange(start, start + len(ids), device=receiver.device)
        with torch.no_grad():
            _, cache = forward(
                receiver.model, ids[None], positions[None], cache=fork(receiver.model, prefix)
            )
        named = {}
        for name, held in (("native", cache), ("empty", prefix)):
            named[f"{name}.log_probs"], named[f"{name}.outputs"] = _score(receiver, held, text)
        write_tensors(path, named)
    return read_tensors(path)


def _score(receiver: LoadedModel, cache: Any, text: Text) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[n, vocab]`` and attention outputs ``[layers, n + 1, width]``."""
    empty = torch.empty(0, dtype=torch.int64)
    held = Held("transfer", receiver, cache, empty, Spans(receiver.device), "", True)
    log_probs, outputs = score_tail(held, text.tail)
    return log_probs.cpu(), torch.stack(outputs).float().cpu()
