"""Which texts are read, and the raw paired readings on disk.

Owns the plan (training pieces spread over the books, test texts as ``kvferry measure`` takes
them), the folder's layout and the one place where numbers become float16. One safetensors file a
piece; a file that is there is complete. One call: ``Readings.open(folder).load("fit", names)``.

A piece holds for each side (``source``, ``receiver``) and layer i, body rows only:
``SIDE.kv.i`` [T, 2 H D] (keys un-rotated, all heads, then values), ``SIDE.res.i`` [T, hidden] (the
residual stream entering layer i), and ``SIDE.received`` [layers, T] float32. The normed layer
input isn't kept: it follows from the residual by the norm in ``frozen.safetensors``
(``projection.py``), which halves the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.errors import BadInput, CorruptFile, NotFinite
from kvferry.fitting.capture import MIN_CHUNK_TOKENS
from kvferry.fitting.corpus import Corpus
from kvferry.fitting.fidelity import FidelitySettings, pick
from kvferry.provenance import atomic_path, read_object
from kvferry.running.prompt import BoundLayout

FORMAT = "kvferry-readings-1"
SIDES = ("source", "receiver")
READS = {"forward": ("source", "receiver"), "backward": ("receiver", "source")}
"""Direction -> the side that reads and the side that answers."""


@dataclass(frozen=True)
class ReadSettings:
    """What is read.

    Attributes:
        tokens: rows for the fit; the select split gets an eighth.
        chunk_tokens: context tokens a training piece.
        per_document: pieces taken from one document at most.
        texts: test texts.
        context_tokens: of a test text, read.
        target_tokens: of a test text, scored after it (one more is fed to begin with).
    """

    tokens: int = 20_000
    chunk_tokens: int = 512
    per_document: int = 2
    texts: int = 12
    context_tokens: int = 447
    target_tokens: int = 64


@dataclass(frozen=True)
class Piece:
    """One text to read."""

    book: str
    doc_id: str
    chunk: int
    split: str
    token_ids: Tensor
    tail: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def row(self) -> dict[str, Any]:
        """How the header names it."""
        return {
            "book": self.book,
            "doc_id": self.doc_id,
            "chunk": self.chunk,
            "split": self.split,
            "tokens": int(self.token_ids.numel()),
            "tail_tokens": int(self.tail.numel()),
        }


def plan_pieces(
    books: dict[str, Corpus], test: Corpus, layout: BoundLayout, settings: ReadSettings
) -> list[Piece]:
    """All pieces in order: the fit's, the select's, the test texts.

    The fit's pieces take turns among the books, so that any first part of them is spread evenly.

    Raises:
        BadInput: a split stays empty, or a test document is a training document.
    """
    pieces: list[Piece] = []
    for split, quota in (("fit", settings.tokens), ("select", settings.tokens // 8)):
        found = _take(books, layout, settings, split, quota)
        if not found:
            raise BadInput(
                expected=f"training documents of the {split} split (split by content)",
                got=f"none in {', '.join(books)}",
                next_step="give more documents, or cut long ones with --section-chars 4000",
            )
        pieces += found
    asked = FidelitySettings(settings.context_tokens, settings.target_tokens)
    trained = {p.doc_id for p in pieces}
    for document, ids in pick(
        SimpleNamespace(layout=layout),  # type: ignore[arg-type]
        test.documents,
        settings.texts,
        asked,
    ):
        if document.doc_id in trained:
            raise BadInput(
                expected="test documents that are not fitted on",
                got=f"document {document.doc_id[:16]} in both",
                next_step="take --test from another book",
            )
        context, tail = ids[: settings.context_tokens], ids[settings.context_tokens :]
        pieces.append(Piece(Path(document.source).name, document.doc_id, 0, "test", context, tail))
    return pieces


def _take(
    books: dict[str, Corpus], layout: BoundLayout, settings: ReadSettings, split: str, quota: int
) -> list[Piece]:
    """Pieces of one split, one book after the other, first chunks before second ones."""
    size = settings.chunk_tokens
    tokens: dict[str, Tensor] = {}
    have, pieces = 0, []
    documents = {n: [d for d in c.documents if d.split == split] for n, c in books.items()}
    longest = max(map(len, documents.values()), default=0)
    for chunk in range(settings.per_document):
        for place in range(longest):
            for name, found in documents.items():
                if have >= quota:
                    return pieces
                if place >= len(found):
                    continue
                document = found[place]
                if document.doc_id not in tokens:
                    text = document.text[: 16 * size * settings.per_document]
                    tokens[document.doc_id] = layout.context(text)
                ids = tokens[document.doc_id][chunk * size : (chunk + 1) * size]
                if ids.numel() < MIN_CHUNK_TOKENS:
                    continue
                have += int(ids.numel())
                pieces.append(Piece(name, document.doc_id, chunk, split, ids))
    return pieces


def half(values: Tensor, what: str) -> Tensor:
    """float16; a tensor with numbers beyond its range stays float32 (rare massive activations).

    Raises:
        NotFinite: NaN or infinity.
    """
    values = values.detach()
    if not bool(torch.isfinite(values).all()):
        raise NotFinite(
            expected=f"finite numbers in {what}",
            got="NaN or infinity",
            next_step="load the models in float32",
        )
    small = values.half()
    return small.contiguous() if bool(torch.isfinite(small).all()) else values.float().contiguous()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, whole or not at all; the same tensors give the same bytes."""
    with atomic_path(path) as temporary:
        save_file({n: tensors[n].contiguous() for n in sorted(tensors)}, temporary)


def read_tensors(
    path: Path, names: Sequence[str] | None = None, *, stem: str = ""
) -> dict[str, Tensor]:
    """Some tensors of a file.

    Args:
        names: which; ``None`` for all whose name begins with ``stem``.

    Raises:
        CorruptFile: missing, damaged, or without one of the names.
    """
    try:
        with safe_open(path, framework="pt") as stream:
            everything = [n for n in stream.keys() if n.startswith(stem)]  # noqa: SIM118
            wanted = names if names is not None else everything
            return {name: stream.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise CorruptFile(
            expected=f"a whole file {path}",
            got=f"{type(error).__name__}: {error}",
            next_step="remove it and run the same `read` again",
        ) from error


@dataclass(frozen=True)
class Readings:
    """A folder of finished readings.

    Attributes:
        folder: where they lie.
        header: ``reading.json``.
    """

    folder: Path
    header: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Readings:
        """Open finished readings.

        Raises:
            CorruptFile: no readings there, or pieces missing.
        """
        header = read_object(folder / "reading.json", "format", "pieces", "models", "identity")
        readings = cls(folder, header)
        missing = [i for i in range(len(header["pieces"])) if not readings.path(i).exists()]
        if missing:
            raise CorruptFile(
                expected=f"{len(header['pieces'])} pieces in {folder}",
                got=f"{len(missing)} missing",
                next_step="finish it with the same `read` command",
            )
        return readings

    def path(self, index: int) -> Path:
        """A piece's file."""
        return piece_path(self.folder, index)

    def indices(self, split: str) -> list[int]:
        """The pieces of a split, in order."""
        return [i for i, row in enumerate(self.header["pieces"]) if row["split"] == split]

    def rows(self, split: str) -> int:
        """Tokens of a split."""
        return sum(self.header["pieces"][i]["tokens"] for i in self.indices(split))

    def load(self, split: str, names: Sequence[str], *, limit: int | None = None) -> list[Tensor]:
        """Tensors over all rows of a split, float32, in the order of ``names``.

        Args:
            limit: pieces at most.
        """
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for index in self.indices(split)[:limit]:
            for name, tensor in read_tensors(self.path(index), names).items():
                parts[name].append(tensor)
        joined = []
        for name in names:
            joined.append(torch.cat(parts.pop(name)).float())
        return joined

    def received(self, split: str, side: str, layer: int) -> Tensor:
        """Attention each row gets from later queries in one layer, ``[N]``."""
        name = f"{side}.received"
        return torch.cat(
            [read_tensors(self.path(i), [name])[name][layer] for i in self.indices(split)]
        )

    def queries(self, side: str, layer: int) -> Tensor:
        """Second moment of the layer's queries beside a key, ``[H, D, D]``, over the fit."""
        name = f"{side}.queries"
        found = [read_tensors(self.path(i), [name])[name][layer] for i in self.indices("fit")]
        return torch.stack(found).mean(0)

    def geometry(self, side: str) -> dict[str, Any]:
        """A side's geometry as plain values."""
        found: dict[str, Any] = self.header["models"][side]["geometry"]
        return found


def piece_path(folder: Path, index: int) -> Path:
    """Where a piece lies."""
    return folder / "pieces" / f"{index:04d}.safetensors"
