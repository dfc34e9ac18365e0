"""How much of a context's benefit comes through: measured on running text, never fitted on.

For each document the context's tokens are read, then ``tail`` tokens are given to every arm, and
the negative log-likelihood of the next ones is compared: the receiver after its own reading, after
the handoff, with no context, with another document's, without anchors, and the source itself.
recovered = (no_context - x) / (no_context - receiver_native), over the documents' sums. Beside it
top-1 agreement, KL and the cosine of attention outputs with the receiver's own reading. This is a
check on the map, not evidence that facts come through.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvferry.errors import BadInput
from kvferry.fitting.corpus import Document, wrong_documents
from kvferry.models.cache import extend
from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    read_object,
    read_records,
    sole_writer,
    start_records,
    write_json,
)
from kvferry.running.handoff import Handoff, Held
from kvferry.terminal import progress

NAMED = ("map", "doc_id")
"""What names a record."""
VARIANTS = (
    "receiver_native",
    "source_native",
    "no_context",
    "transfer",
    "transfer_without_anchors",
    "wrong_document",
    "receiver_native_wrong_document",
)


@dataclass(frozen=True)
class FidelitySettings:
    """What is measured.

    Attributes:
        context_tokens: read and handed over.
        target_tokens: scored after it (one more token is fed to begin with).
        seed: of the wrong documents' order and the bootstrap.
        resamples: bootstrap resamples over documents.
    """

    context_tokens: int = 447
    target_tokens: int = 64
    seed: int = 0
    resamples: int = 10_000


def pick(
    handoff: Handoff, documents: Sequence[Document], count: int, settings: FidelitySettings
) -> list[tuple[Document, Tensor]]:
    """The first ``count`` documents, in order of their ids, that are long enough.

    Raises:
        BadInput: fewer than two.
    """
    need = settings.context_tokens + settings.target_tokens + 1
    chosen = []
    for document in sorted(documents, key=lambda d: d.doc_id):
        ids = handoff.layout.context(document.text[: need * 16])
        if ids.numel() >= need:
            chosen.append((document, ids[:need]))
        if len(chosen) == count:
            break
    if len(chosen) < 2:
        raise BadInput(
            expected=f"at least two documents of {need} tokens or more",
            got=f"{len(chosen)} of {len(documents)}",
            next_step="give longer texts, or a smaller --context-tokens",
        )
    return chosen


def measure(
    handoffs: dict[str, Handoff],
    texts: list[tuple[Document, Tensor]],
    settings: FidelitySettings,
    folder: Path,
    *,
    label: str,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Measure one or more maps over the same texts and write records; resumes where it stopped.

    Args:
        handoffs: name -> handoff; those of opposite directions may share ``Readings``.
        texts: from ``pick``.
        folder: gets ``header.json``, ``records.jsonl`` and ``summary.json``.
        label: what the texts are, for people.
        arguments: what was asked for, kept in the header.

    Returns:
        the summary.
    """
    for handoff in handoffs.values():
        handoff.require_room(settings.context_tokens, settings.target_tokens + 1)
    partners = wrong_documents(len(texts), settings.seed)
    header = _header(handoffs, texts, settings, label, arguments)
    with sole_writer(folder, "measurement"):
        path = start_records(folder, header, same=("settings", "maps", "texts"), once=NAMED)
        _measure_all(handoffs, texts, partners, settings, path)
        summary = summarise(folder)
        write_json(folder / "summary.json", summary)
    return summary


def _measure_all(
    handoffs: dict[str, Handoff],
    texts: list[tuple[Document, Tensor]],
    partners: list[int],
    settings: FidelitySettings,
    records_path: Path,
) -> None:
    done = {(r["map"], r["doc_id"]) for r in read_records(records_path)}
    total = len(texts) * len(handoffs)
    with progress("measure", total=total, unit="texts", done=float(len(done))) as advance:
        for index, (document, ids) in enumerate(texts):
            for name, handoff in handoffs.items():
                if (name, document.doc_id) in done:
                    continue
                other = texts[partners[index]]
                started = time.perf_counter()
                row = _one(handoff, ids, other[1], settings)
                row |= {
                    "map": name,
                    "doc_id": document.doc_id,
                    "wrong_doc_id": other[0].doc_id,
                    "seconds": round(time.perf_counter() - started, 3),
                }
                add_record(records_path, row)
                advance(1)


def summarise(folder: Path) -> dict[str, Any]:
    """Every figure from the records alone.

    Raises:
        BadInput: no records.
        CorruptFile: a header that is none.
    """
    from scipy import stats

    header = read_object(folder / "header.json", "settings", "label")
    records = read_records(folder / "records.jsonl", keys=("nll",), once=NAMED)
    if not records:
        raise BadInput(
            expected=f"records in {folder}", got="none", next_step="run `kvferry measure` first"
        )
    maps: dict[str, Any] = {}
    for name in sorted({r["map"] for r in records}):
        rows = [r for r in records if r["map"] == name]
        nll = {v: np.array([r["nll"][v] for r in rows]) for v in VARIANTS if v in rows[0]["nll"]}
        benefit = nll["no_context"] - nll["receiver_native"]
        entry: dict[str, Any] = {
            "n": len(rows),
            "nll": {v: float(nll[v].mean()) for v in nll},
            "recovered": {},
            "top1_agreement": _means(rows, "top1"),
            "kl_nats": _means(rows, "kl"),
            "attention_cosine": _means(rows, "cosine"),
            "paired": {},
        }
        for variant in nll:
            if variant in ("receiver_native", "no_context"):
                continue
            gain = nll["no_context"] - nll[variant]
            entry["recovered"][variant] = _ratio(gain, benefit, header["settings"])
        for control in ("no_context", "wrong_document"):
            difference = nll[control] - nll["transfer"]
            test = stats.wilcoxon(difference, alternative="greater")
            entry["paired"][f"transfer_better_than_{control}"] = {
                "n": len(rows),
                "better": int((difference > 0).sum()),
                "wilcoxon_one_sided_p": float(test.pvalue),
            }
        maps[name] = entry
    return {"label": header["label"], "settings": header["settings"], "maps": maps}


def _ratio(gain: Any, benefit: Any, settings: dict[str, Any]) -> dict[str, float]:
    """A ratio of sums with a seeded bootstrap interval over documents."""
    generator = np.random.default_rng(settings["seed"])
    picks = generator.integers(0, len(gain), (settings["resamples"], len(gain)))
    draws = gain[picks].sum(1) / benefit[picks].sum(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": float(gain.sum() / benefit.sum()), "low": float(low), "high": float(high)}


def _means(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    return {v: float(np.mean([r[key][v] for r in rows])) for v in rows[0][key]}


def _one(
    handoff: Handoff, ids: Tensor, other: Tensor, settings: FidelitySettings
) -> dict[str, Any]:
    body, tail = ids[: settings.context_tokens], ids[settings.context_tokens :]
    wrong = other[: settings.context_tokens]
    held = {
        "receiver_native": handoff.hand_over_ids(body, arm="receiver_native"),
        "source_native": handoff.hand_over_ids(body, arm="source_native"),
        "no_context": handoff.hand_over_ids(body[:0], arm="no_context"),
        "transfer": handoff.hand_over_ids(body, arm="transfer"),
        "transfer_without_anchors": handoff.without_anchors().hand_over_ids(body, arm="transfer"),
        "wrong_document": handoff.hand_over_ids(wrong, arm="wrong_document"),
        "receiver_native_wrong_document": handoff.hand_over_ids(wrong, arm="receiver_native"),
    }
    row: dict[str, Any] = {"nll": {}, "top1": {}, "kl": {}, "cosine": {}}
    native, native_outputs = score_tail(held["receiver_native"], tail)
    for name in VARIANTS:
        log_probs, outputs = (
            (native, native_outputs) if name == "receiver_native" else score_tail(held[name], tail)
        )
        row["nll"][name] = tail_loss(log_probs, tail)
        if name == "receiver_native":
            continue
        row["top1"][name] = float((log_probs.argmax(-1) == native.argmax(-1)).float().mean())
        if name == "source_native":  # other layers, and a vocabulary padded to another size
            continue
        row["kl"][name] = float((native.exp() * (native - log_probs)).sum(-1).mean())
        row["cosine"][name] = _cosine(native_outputs, outputs)
    return row


def score_tail(held: Held, tail: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities ``[n, vocab]`` of what follows each tail token but the last.

    Context tokens that were left for the answering model (``held.rest``) are read first.
    """
    count = int(tail.numel())
    ids = torch.cat((held.rest.to(tail.device), tail))
    with torch.no_grad(), attention_outputs(held.loaded.model) as outputs:
        logits, _ = extend(held.loaded.model, held.cache, ids[None], logits=count)
    assert logits is not None
    scored = [output[-count:] for output in outputs]
    return logits[0, -count:-1].float().log_softmax(-1), scored


def tail_loss(log_probs: Tensor, tail: Tensor) -> float:
    """Mean negative log-likelihood of a tail's tokens but the first, nats a token."""
    return -float(log_probs.gather(1, tail[1:, None].to(log_probs.device)).mean())


@contextmanager
def attention_outputs(model: Any) -> Iterator[list[Tensor]]:
    """What each layer's attention gives its output projection, in order of layers.

    Yields:
        a list that the next forward pass fills with ``[T, heads * head_dim]``.
    """
    outputs: list[Tensor] = []

    def note(_: Any, arguments: tuple[Tensor, ...]) -> None:
        outputs.append(arguments[0][0].detach())

    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(note)
        for layer in model.get_decoder().layers
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _cosine(native: list[Tensor], other: list[Tensor]) -> float:
    """Mean over layers and positions; earlier layers' errors are included, as they are in use."""
    values = [
        torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean()
        for a, b in zip(native, other, strict=True)
    ]
    return float(torch.stack(values).mean())


def _header(
    handoffs: dict[str, Handoff],
    texts: list[tuple[Document, Tensor]],
    settings: FidelitySettings,
    label: str,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    return {
        "format": "kvferry-fidelity-1",
        "label": label,
        "settings": {
            "context_tokens": settings.context_tokens,
            "target_tokens": settings.target_tokens,
            "seed": settings.seed,
            "resamples": settings.resamples,
        },
        "maps": {
            name: {
                "identity": h.map.identity,
                "source": h.source.revision,
                "receiver": h.receiver.revision,
                "anchors": len(h.layout.prefix_ids),
                "tail_tokens": h.tail_tokens,
                **h.rounding,
            }
            for name, h in handoffs.items()
        },
        "texts": [document.doc_id for document, _ in texts],
        "arguments": arguments,
        "code": code_version(),
        "machine": machine(),
    }
