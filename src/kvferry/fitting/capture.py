"""Documents through both models, moments out: resumable, mergeable, bounded in memory.

Owns the long run. It keeps second moments, never tokens or caches, and names what it read by
content hash. Killed at any moment it resumes from its last checkpoint and ends with the same
bytes, since rows are added one text after another in a fixed order. One call:
``capture(source, receiver, corpus, settings, folder)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import BadInput, ContextTooLong
from kvferry.fitting.capture_store import CaptureStore, MomentsTable
from kvferry.fitting.corpus import SPLITS, Corpus
from kvferry.fitting.moments import Candidates, Moments, moments_bytes, target_key
from kvferry.fitting.selection import choose_layers
from kvferry.maps.linear import cache_features
from kvferry.models.alignment import require_same_tokens
from kvferry.models.cache import CanonicalCache, read
from kvferry.models.geometry import Geometry, require_supported
from kvferry.models.load import LoadedModel
from kvferry.models.locate import packed_as
from kvferry.provenance import (
    code_version,
    machine,
    sha256_text,
    sole_writer,
    sorted_json,
    write_json,
)
from kvferry.running.prompt import BoundLayout, PromptLayout
from kvferry.terminal import progress, say

MIN_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class CaptureSettings:
    """What a capture reads and keeps.

    Attributes:
        tokens: rows for the fit; select and test get an eighth each.
        chunk_tokens: context tokens a text.
        per_document: texts taken from one document at most.
        k_max: source layers kept for each target.
        probe_texts: fit texts on which layers are chosen (select gets half as many).
        memory_bytes: bound on the moments; models and the probe's rows come on top.
        shard: (index, count): take every count-th text, for runs that are merged later.
        both_directions: keep moments of receiver -> source as well, from the same reading.
    """

    tokens: int = 60_000
    chunk_tokens: int = 512
    per_document: int = 2
    k_max: int = 6
    probe_texts: int = 12
    memory_bytes: int = 8_000_000_000
    shard: tuple[int, int] = (0, 1)
    both_directions: bool = False


@dataclass(frozen=True)
class Item:
    """One text to read: a chunk of a document."""

    doc_id: str
    chunk: int
    split: str
    token_ids: Tensor

    def row(self) -> dict[str, Any]:
        """How the capture's header names it."""
        return {
            "doc_id": self.doc_id,
            "chunk": self.chunk,
            "split": self.split,
            "tokens": int(self.token_ids.numel()),
        }


def plan_items(corpus: Corpus, layout: BoundLayout, settings: CaptureSettings) -> list[Item]:
    """The texts to read, in order: first chunks of all documents, then second chunks, and so on.

    Raises:
        BadInput: a split stays empty.
    """
    index, count = settings.shard
    if not 0 <= index < count:
        raise BadInput(
            expected="a shard I/N with I from 0 to N - 1",
            got=f"{index}/{count}",
            next_step="e.g. --shard 0/2 and --shard 1/2",
        )
    quota = {"fit": settings.tokens, "select": settings.tokens // 8, "test": settings.tokens // 8}
    have = dict.fromkeys(SPLITS, 0)
    items: list[Item] = []
    # A token seldom has more than 16 characters (a run of blanks may), so the start is tried first.
    wanted = settings.chunk_tokens * settings.per_document
    tokens: dict[str, Tensor] = {}
    for chunk in range(settings.per_document):
        for document in corpus.documents:
            if have[document.split] >= quota[document.split]:
                continue
            if document.doc_id not in tokens:
                ids = layout.context(document.text[: 16 * wanted])
                if ids.numel() < wanted and len(document.text) > 16 * wanted:
                    ids = layout.context(document.text)
                tokens[document.doc_id] = ids
            start = chunk * settings.chunk_tokens
            ids = tokens[document.doc_id][start : start + settings.chunk_tokens]
            if ids.numel() < MIN_CHUNK_TOKENS:
                continue
            have[document.split] += int(ids.numel())
            items.append(Item(document.doc_id, chunk, document.split, ids))
    if missing := [split for split in SPLITS if not have[split]]:
        raise BadInput(
            expected="documents for each of fit, select and test (split by content)",
            got=f"none for {', '.join(missing)} among {len(corpus.documents)} documents",
            next_step="give more documents, or cut long ones with --section-chars 4000",
        )
    return items[index::count]


@dataclass(frozen=True)
class Direction:
    """One way of a pair: whose features, whose targets."""

    name: str
    reads: int
    answers: int


DIRECTIONS = (Direction("forward", 0, 1), Direction("backward", 1, 0))


class PairReader:
    """Reads a text with both models after the same constant prefix."""

    def __init__(self, models: tuple[LoadedModel, LoadedModel], layout: BoundLayout) -> None:
        self.models = models
        self.prefix = layout.prefix()
        self.forward_s = 0.0

    def read(self, item: Item) -> tuple[CanonicalCache, CanonicalCache]:
        """Both canonical caches of the text's own positions (prefix rows left out)."""
        ids = torch.cat((self.prefix, item.token_ids))
        positions = torch.arange(ids.numel())
        caches = []
        for loaded in self.models:
            started = time.perf_counter()
            with torch.no_grad():
                cache = read(loaded.model, ids, positions, loaded.revision, kind=loaded.cache)
            self.forward_s += time.perf_counter() - started
            body = cache.select(slice(self.prefix.numel(), None))
            caches.append(body.to(device=torch.device("cpu")))
        return caches[0], caches[1]


def targets_of(cache: CanonicalCache) -> dict[str, Tensor]:
    """Every layer's keys and values as targets, ``[T, H D]``."""
    named = {}
    for index, layer in enumerate(cache.layers):
        named[target_key(index, "K")] = layer.keys.flatten(1)
        named[target_key(index, "V")] = layer.values.flatten(1)
    return named


def capture(
    source: LoadedModel,
    receiver: LoadedModel,
    corpus: Corpus,
    settings: CaptureSettings,
    folder: Path,
    *,
    layout: PromptLayout | None = None,
    plan_from: Path | None = None,
    checkpoint_s: float = 240.0,
    after_item: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Run or resume a capture.

    Args:
        folder: where it lives; an unfinished one there is resumed.
        layout: the prompt's layout, rendered with the receiver's tokenizer.
        plan_from: take the choice of layers from another capture, so that the two can be merged.
        checkpoint_s: seconds between checkpoints.
        after_item: called with the number of texts done (tests interrupt here).

    Returns:
        the header as written to ``capture.json``.

    Raises:
        WrongPair: the folder holds a capture with other settings.
        BadInput: another process is capturing into the folder.
        TokenizerMismatch: the models number text differently.
        ContextTooLong: a chunk beyond a model's limit.
        NotFinite: an activation is NaN or infinite.
    """
    for loaded in (source, receiver):
        require_supported(Geometry.from_config(loaded.model.config), loaded.spec)
    require_same_tokens(source.tokenizer, receiver.tokenizer)
    bound = (layout or PromptLayout()).bind(receiver.tokenizer)
    items = plan_items(corpus, bound, settings)
    longest = len(bound.prefix_ids) + max((int(i.token_ids.numel()) for i in items), default=0)
    for loaded in (source, receiver):
        limit = _geometry(loaded).max_positions
        if limit and longest > limit:
            raise ContextTooLong(
                expected=f"at most {limit} tokens in all, the limit of {loaded.spec}",
                got=f"{longest}, prefix and chunk",
                next_step="choose a smaller --chunk-tokens",
            )
    identity = _identity(source, receiver, corpus, settings, bound, items, plan_from)
    with sole_writer(folder, "capture"):
        store = CaptureStore(folder, identity)
        if store.finished:
            say(f"{folder}: already complete, nothing to do")
            return store.header()
        reader = PairReader((source, receiver), bound)
        started, code = time.perf_counter(), code_version()
        directions = DIRECTIONS if settings.both_directions else DIRECTIONS[:1]
        plan, probed = _plan(reader, items, directions, settings, store, plan_from)
        moments = _read_all(reader, items, plan, probed, store, checkpoint_s, after_item)
        header = {
            "format": "kvferry-capture-1",
            "identity": identity,
            "source": _model_header(source),
            "receiver": _model_header(receiver),
            "layout": bound.layout.to_dict(),
            "layout_identity": bound.identity,
            "prefix_ids": list(bound.prefix_ids),
            "settings": {**asdict(settings), "shard": list(settings.shard)},
            "corpus": {
                "identity": corpus.identity,
                "sources": [Path(s).name for s in corpus.sources],
                "documents": corpus.counts,
                "empty_rows": corpus.empty_rows,
                "duplicates": corpus.duplicates,
            },
            "directions": [d.name for d in directions],
            "plan": plan,
            "rows": {
                s: sum(int(i.token_ids.numel()) for i in items if i.split == s) for s in SPLITS
            },
            "items": [item.row() for item in items],
        }
        store.finish(moments, header)
        tokens = sum(int(item.token_ids.numel()) for item in items[store.items_done :])
        write_json(
            folder / "timing.json",
            {
                "forward_s": round(reader.forward_s, 3),
                "total_s": round(time.perf_counter() - started, 3),
                "tokens_read_this_run": tokens,
                "note": "this run only: a resumed capture counts what it did after resuming",
                "machine": machine(),
                "code": code,
            },
        )
        return store.header()


def _read_all(
    reader: PairReader,
    items: list[Item],
    plan: dict[str, Candidates],
    probed: dict[int, tuple[CanonicalCache, CanonicalCache]],
    store: CaptureStore,
    checkpoint_s: float,
    after_item: Callable[[int], None] | None,
) -> MomentsTable:
    """Sums over all texts, from the last checkpoint on."""
    directions = [d for d in DIRECTIONS if d.name in plan]
    widths = [2 * g.layers[0].width for g in map(_geometry, reader.models)]
    moments = store.load_moments(plan)
    if moments is None:
        moments = {
            (d.name, split): Moments.empty(plan[d.name], widths[d.reads], widths[d.answers] // 2)
            for d in directions
            for split in SPLITS
        }
    done = store.items_done
    tokens = [int(item.token_ids.numel()) for item in items]
    last_saved, complete = time.perf_counter(), True
    with progress(
        "capture", total=sum(tokens), unit="tokens", done=float(sum(tokens[:done]))
    ) as advance:
        try:
            for index in range(done, len(items)):
                item = items[index]
                caches = probed.pop(index, None) or reader.read(item)
                complete = False
                for d in directions:
                    moments[d.name, item.split].add(
                        cache_features(caches[d.reads]), targets_of(caches[d.answers])
                    )
                done = index + 1
                complete = True
                advance(tokens[index])
                if time.perf_counter() - last_saved > checkpoint_s and done < len(items):
                    store.save_moments(moments, done)
                    last_saved = time.perf_counter()
                if after_item is not None:
                    after_item(done)
        except KeyboardInterrupt:
            if complete:  # else half of a text's products are in: the last checkpoint stands
                store.save_moments(moments, done)
            raise
    return moments


def _plan(
    reader: PairReader,
    items: list[Item],
    directions: tuple[Direction, ...],
    settings: CaptureSettings,
    store: CaptureStore,
    plan_from: Path | None,
) -> tuple[dict[str, Candidates], dict[int, tuple[CanonicalCache, CanonicalCache]]]:
    """Choose source layers on the first texts, or take the choice made before."""
    if plan_from is not None:
        plan = CaptureStore.plan_of(plan_from)
        store.save_plan(plan, {"plan_from": plan_from.name})
        return plan, {}
    if (known := store.load_plan()) is not None:
        return known, {}
    wanted = {"fit": settings.probe_texts, "select": max(settings.probe_texts // 2, 1)}
    indices: list[int] = []
    for split, count in wanted.items():
        found = [i for i, item in enumerate(items) if item.split == split][:count]
        if not found:
            raise BadInput(
                expected="fit and select texts in this shard, to choose layers on",
                got=f"no {split} text among {len(items)}",
                next_step="take another shard's choice with --plan-from, or use fewer shards",
            )
        indices += found
    probed = {}
    with progress("choose layers", total=len(indices), unit="texts") as advance:
        for index in indices:
            probed[index] = reader.read(items[index])
            advance(1)
    plan, report = {}, {}
    for d in directions:
        rows = {
            split: _stack([probed[i] for i in indices if items[i].split == split], d)
            for split in wanted
        }
        say(f"{d.name}: choosing up to {settings.k_max} source layers for each receiver layer")
        plan[d.name], report[d.name] = choose_layers(
            rows["fit"], rows["select"], k_max=settings.k_max
        )
    plan = fit_in_memory(plan, [_geometry(m) for m in reader.models], settings.memory_bytes)
    store.save_plan(plan, report)
    return plan, probed


def fit_in_memory(
    plan: dict[str, Candidates], geometries: list[Geometry], memory_bytes: int
) -> dict[str, Candidates]:
    """Shorten every list until the moments of the three splits fit.

    Raises:
        BadInput: even one source layer a target doesn't fit.
    """
    widths = [2 * g.layers[0].width for g in geometries]
    k = max(len(layers) for lists in plan.values() for layers in lists.values())
    while True:
        shortened = {
            name: {t: layers[:k] for t, layers in lists.items()} for name, lists in plan.items()
        }
        need = 0
        for d in DIRECTIONS:
            if d.name in shortened:
                need += len(SPLITS) * moments_bytes(
                    shortened[d.name], widths[d.reads], widths[d.answers] // 2
                )
        if need <= memory_bytes:
            say(f"moments: {need / 1e9:.2f} GB of {memory_bytes / 1e9:.1f} GB, k up to {k}")
            return shortened
        if k == 1:
            raise BadInput(
                expected=f"--memory of at least {need / 1e6:.3g} MB for this pair (k = 1)",
                got=f"{memory_bytes / 1e6:.3g} MB",
                next_step="raise --memory, or capture one direction at a time",
            )
        k -= 1


def _stack(
    caches: list[tuple[CanonicalCache, CanonicalCache]], direction: Direction
) -> tuple[list[Tensor], dict[str, Tensor]]:
    features = [cache_features(pair[direction.reads]) for pair in caches]
    targets = [targets_of(pair[direction.answers]) for pair in caches]
    return (
        [torch.cat(layer) for layer in zip(*features, strict=True)],
        {name: torch.cat([t[name] for t in targets]) for name in targets[0]},
    )


def _identity(
    source: LoadedModel,
    receiver: LoadedModel,
    corpus: Corpus,
    settings: CaptureSettings,
    layout: BoundLayout,
    items: list[Item],
    plan_from: Path | None,
) -> str:
    """Hash of everything that decides the final bytes."""
    return sha256_text(
        sorted_json(
            {
                "source": source.revision + _rounding(source),
                "receiver": receiver.revision + _rounding(receiver),
                "layout": layout.identity,
                "settings": asdict(replace(settings, memory_bytes=0)),
                "items": [item.row() for item in items],
                "plan": CaptureStore.plan_of(plan_from) if plan_from else None,
            }
        )
    )


def _rounding(loaded: LoadedModel) -> str:
    """A model's precision beside its revision; nothing for plain float32."""
    return "" if loaded.precision.plain else f" {loaded.precision}"


def _model_header(loaded: LoadedModel) -> dict[str, Any]:
    more = {"weights": loaded.weights, "cache": loaded.cache, "packed": packed_as(loaded.folder)}
    return {
        # A folder's name without its path, which is this machine's; a hub id whole.
        "spec": Path(loaded.spec).resolve().name if Path(loaded.spec).exists() else loaded.spec,
        "revision": loaded.revision,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "geometry": _geometry(loaded).to_dict(),
        **{name: value for name, value in more.items() if value is not None},
    }


def _geometry(loaded: LoadedModel) -> Geometry:
    return Geometry.from_config(loaded.model.config)
