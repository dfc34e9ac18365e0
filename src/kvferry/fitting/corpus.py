"""Documents with content ids and splits.

Owns where fitting text comes from: a .txt or .jsonl file, a folder of them, or a hub data set
(``hf:NAME[:SPLIT[:COLUMN]]``). A document's id is the sha256 of its text, its split follows from
the id alone, so that captures made apart agree. One call: ``read_corpus(["books/"])``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvferry.errors import BadInput, KvferryError
from kvferry.provenance import sha256_text

Split = Literal["fit", "select", "test"]
SPLITS: tuple[Split, ...] = ("fit", "select", "test")
_SUFFIXES = (".txt", ".jsonl", ".md")


def split_of(doc_id: str) -> Split:
    """fit (80 %), select (10 %) or test (10 %), from the id alone."""
    bucket = int(doc_id[:8], 16) % 100
    return "fit" if bucket < 80 else "select" if bucket < 90 else "test"


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        text: its words.
        source: file or data set it came from.
        doc_id: 64 hex digits, sha256 of the text.
    """

    text: str
    source: str
    doc_id: str

    @property
    def split(self) -> Split:
        """fit (80 %), select (10 %) or test (10 %), from the id alone."""
        return split_of(self.doc_id)


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their ids, with what was left out and why.

    Attributes:
        documents: sorted by id, each text once.
        empty_rows: rows without text.
        duplicates: rows whose text had come before.
        sources: the specs read.
    """

    documents: tuple[Document, ...]
    empty_rows: int
    duplicates: int
    sources: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Hash of the documents' ids."""
        return sha256_text("\n".join(document.doc_id for document in self.documents))

    def summary(self) -> str:
        """One line for a terminal."""
        parts = ", ".join(f"{self.counts[s]} {s}" for s in SPLITS)
        line = f"{len(self.documents)} documents ({parts})"
        if self.empty_rows:
            line += f"; {self.empty_rows} empty rows left out"
        if self.duplicates:
            line += f"; {self.duplicates} repeated texts left out"
        return line


def read_corpus(
    specs: Sequence[str], *, section_chars: int | None = None, column: str = "text"
) -> Corpus:
    """Read every source.

    Args:
        specs: files, folders or ``hf:`` names.
        section_chars: cut texts at blank lines into sections of about this many characters, each
            a document of its own; ``None`` keeps a text whole.
        column: the field of a .jsonl row or data set that holds the text.

    Raises:
        BadInput: a missing file, invalid UTF-8, a row without the column, nothing to read.
    """
    if not specs:
        raise BadInput(
            expected="at least one text source",
            got="none",
            next_step="give --corpus FILE.txt, FILE.jsonl, FOLDER or hf:NAME",
        )
    seen: dict[str, Document] = {}
    empty = duplicates = 0
    for spec in specs:
        for text in _texts(spec, column):
            sections = _sections(text, section_chars) if section_chars else [text]
            for section in sections:
                if not section.strip():
                    empty += 1
                    continue
                doc_id = sha256_text(section)
                if doc_id in seen:
                    duplicates += 1
                else:
                    seen[doc_id] = Document(section, spec, doc_id)
    documents = tuple(seen[key] for key in sorted(seen))
    if not documents:
        raise BadInput(
            expected="documents with text",
            got=f"none in {', '.join(specs)} ({empty} empty rows)",
            next_step="check the files and --column",
        )
    counts: dict[str, int] = {s: sum(d.split == s for d in documents) for s in SPLITS}
    return Corpus(documents, empty, duplicates, tuple(specs), counts)


def wrong_documents(count: int, seed: int) -> list[int]:
    """For each of ``count`` documents another one, never itself: a seeded cyclic order.

    Raises:
        BadInput: fewer than two documents.
    """
    if count < 2:
        raise BadInput(
            expected="at least two documents for the wrong-document control",
            got=str(count),
            next_step="give more documents, or cut a long one with --section-chars",
        )
    order = list(range(count))
    random.Random(seed).shuffle(order)
    partner = [0] * count
    for place, index in enumerate(order):
        partner[index] = order[(place + 1) % count]
    return partner


def _texts(spec: str, column: str) -> Iterator[str]:
    if spec.startswith("hf:"):
        yield from _hub_texts(spec, column)
        return
    path = Path(spec)
    if not spec.strip():
        raise BadInput(
            expected="a file, a folder or hf:NAME", got="an empty name", next_step="name one"
        )
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        if not files:
            raise BadInput(
                expected=f"files ending in {', '.join(_SUFFIXES)} in {path}",
                got="none",
                next_step="choose another folder",
            )
        for file in files:
            yield from _texts(str(file), column)
        return
    if not path.is_file():
        raise BadInput(
            expected="a file, a folder or hf:NAME",
            got=spec,
            next_step="check the path",
        )
    text = _decode(path)
    if path.suffix == ".jsonl":
        yield from _rows(path, text, column)
    else:
        yield text


def _decode(path: Path) -> str:
    raw = path.read_bytes()
    try:
        # Not utf-8-sig: its errors count from after the mark.
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadInput(
            expected=f"UTF-8 text in {path}",
            got=f"an invalid byte 0x{raw[error.start]:02x} at offset {error.start}, line {line}",
            next_step="convert the file, e.g. iconv -f latin1 -t utf-8",
        ) from error


def _rows(path: Path, text: str, column: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            value = row[column]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(
                expected=f"a JSON object with a field {column!r} on each line of {path}",
                got=f"line {number}: {type(error).__name__}: {error}",
                next_step="mend the line or name the field with --column",
            ) from error
        yield value if isinstance(value, str) else ""


def _hub_texts(spec: str, column: str) -> Iterator[str]:
    # A colon inside brackets belongs to a slice, as in hf:NAME:train[:1000].
    _, name, *rest = re.split(r":(?![^\[]*\])", spec)
    split = rest[0] if rest and rest[0] else "train"
    field_name = rest[1] if len(rest) > 1 else column
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            expected="the datasets library, to read hub data sets",
            got="it is not installed",
            next_step='pip install "kvferry[datasets]"',
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
        for row in rows:
            value = row[field_name]
            yield value if isinstance(value, str) else ""
    except KvferryError:
        raise
    except Exception as error:  # the library raises many kinds, all with a usable message
        raise BadInput(
            expected=f"hub data set {name!r}, split {split!r}, column {field_name!r}",
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
            next_step="check name and network, or give a local file",
        ) from error


def _sections(text: str, size: int) -> Iterator[str]:
    """Runs of paragraphs of about ``size`` characters; one over-long paragraph stays whole."""
    held: list[str] = []
    length = 0
    gap = next((g for g in ("\n\n", "\r\n\r\n") if g in text), "\n")
    for paragraph in text.split(gap):
        held.append(paragraph)
        length += len(paragraph)
        if length >= size:
            yield gap.join(held).strip()
            held, length = [], 0
    if held:
        yield gap.join(held).strip()
