"""Documents from files and data sets: what is read, counted, cut, and refused by place."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvferry.errors import BadInput
from kvferry.fitting.capture import CaptureSettings, plan_items
from kvferry.fitting.corpus import SPLITS, Corpus, Document, read_corpus, wrong_documents
from tests.tiny import LAYOUT, shared_tokenizer, tiny_tokenizer


def _write(path: Path, value: str | bytes) -> str:
    path.write_bytes(value if isinstance(value, bytes) else value.encode("utf-8"))
    return str(path)


def _texts(*specs: str, **options: Any) -> set[str]:
    return {d.text for d in read_corpus(specs, **options).documents}


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    spec = _write(tmp_path / "a.txt", "One.\n\nTwo.\n")
    corpus = read_corpus([spec])
    (document,) = corpus.documents
    assert document.text == "One.\n\nTwo.\n"
    assert document.source == spec
    assert document.doc_id == hashlib.sha256(b"One.\n\nTwo.\n").hexdigest()


def test_jsonl_rows_with_empty_ones_counted(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": ""}, {"text": "  "}, {"text": None}, {"text": "two\u2028x"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    corpus = read_corpus([_write(tmp_path / "a.jsonl", lines)])
    assert {d.text for d in corpus.documents} == {"one", "two\u2028x"}
    assert corpus.empty_rows == 3
    assert "3 empty rows left out" in corpus.summary()
    assert sum(corpus.counts[s] for s in SPLITS) == 2


def test_a_folder_is_read_in_full_and_other_files_left(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    _write(tmp_path / "a.txt", "one")
    _write(tmp_path / "deep" / "b.md", "two")
    _write(tmp_path / "deep" / "c.jsonl", '{"text": "three"}')
    _write(tmp_path / "d.py", "not this")
    assert _texts(str(tmp_path)) == {"one", "two", "three"}


def test_another_column(tmp_path: Path) -> None:
    spec = _write(tmp_path / "a.jsonl", '{"body": "one"}')
    assert _texts(spec, column="body") == {"one"}
    with pytest.raises(BadInput, match=r"a field 'text' .*line 1: KeyError"):
        read_corpus([spec])


@pytest.mark.parametrize("bad", ["{not json", '"just a string"', "[1, 2]", "3", '{"other": "x"}'])
def test_a_bad_row_is_named_by_line(bad: str, tmp_path: Path) -> None:
    spec = _write(tmp_path / "a.jsonl", f'{{"text": "one"}}\n\n{bad}\n')
    with pytest.raises(BadInput, match="line 3"):
        read_corpus([spec])


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_invalid_utf8_names_offset_line_and_byte(start: bytes, tmp_path: Path) -> None:
    raw = start + b"first line\nsecond caf\xe9 line\n"
    spec = _write(tmp_path / "a.txt", raw)
    place = raw.index(b"\xe9")
    with pytest.raises(BadInput, match=f"0xe9 at offset {place}, line 2"):
        read_corpus([spec])


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    with_mark = _write(tmp_path / "a.txt", b"\xef\xbb\xbfone")
    assert _texts(with_mark) == {"one"}
    rows = _write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "two"}\r\n{"text": "three"}\r\n')
    assert _texts(rows) == {"two", "three"}


def test_repeated_texts_are_read_once(tmp_path: Path) -> None:
    one = _write(tmp_path / "a.txt", "one")
    two = _write(tmp_path / "b.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": "two"}')
    corpus = read_corpus([one, two])
    assert len(corpus.documents) == 2
    assert corpus.duplicates == 2
    assert "2 repeated texts left out" in corpus.summary()


def test_the_order_of_the_sources_does_not_matter(tmp_path: Path) -> None:
    specs = [_write(tmp_path / f"{i}.txt", f"text {i}") for i in range(6)]
    one, two = read_corpus(specs), read_corpus(specs[::-1])
    assert [d.doc_id for d in one.documents] == [d.doc_id for d in two.documents]
    assert one.identity == two.identity
    assert one.identity != read_corpus(specs[1:]).identity


def test_the_split_follows_from_the_text_alone(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"document {i}"}) for i in range(400)]
    whole = read_corpus([_write(tmp_path / "a.jsonl", "\n".join(rows))])
    part = read_corpus([_write(tmp_path / "b.jsonl", "\n".join(rows[::7]))])
    splits = {d.doc_id: d.split for d in whole.documents}
    assert all(splits[d.doc_id] == d.split for d in part.documents)
    assert whole.counts["fit"] == pytest.approx(320, abs=30)
    assert min(whole.counts.values()) > 15
    assert Document("x", "s", "00000000" + "0" * 56).split == "fit"
    assert Document("x", "s", f"{80:08x}" + "0" * 56).split == "select"
    assert Document("x", "s", f"{99:08x}" + "0" * 56).split == "test"


def test_one_gigantic_document_is_cut_into_sections(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} says that {i * i} is the square of {i}." for i in range(900)]
    spec = _write(tmp_path / "book.txt", "\n\n".join(paragraphs))
    whole = read_corpus([spec])
    assert len(whole.documents) == 1
    layout = LAYOUT.bind(shared_tokenizer())
    with pytest.raises(BadInput, match=r"none for .* among 1 documents.*--section-chars"):
        plan_items(whole, layout, CaptureSettings(tokens=2_000, chunk_tokens=64))
    cut = read_corpus([spec], section_chars=400)
    assert len(cut.documents) > 80
    assert sum(d.text.count("Paragraph") for d in cut.documents) == 900
    assert all(d.text in "\n\n".join(paragraphs) for d in cut.documents)
    items = plan_items(cut, layout, CaptureSettings(tokens=2_000, chunk_tokens=64))
    assert {item.split for item in items} == set(SPLITS)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("gap", [1, 2], ids=["lines", "paragraphs"])
def test_sections_are_pieces_of_the_text_as_it_stands(end: str, gap: int, tmp_path: Path) -> None:
    text = (end * gap).join(f"Line {i} of the poem." for i in range(60))
    documents = read_corpus([_write(tmp_path / "a.txt", text)], section_chars=200).documents
    assert len(documents) > 4
    assert all(d.text in text for d in documents)
    assert sum(d.text.count("Line") for d in documents) == 60


@pytest.mark.parametrize("case", ["none", "missing", "empty folder", "empty file"])
def test_nothing_to_read(case: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    specs = {
        "none": [],
        "missing": [str(tmp_path / "none.txt")],
        "empty folder": [str(tmp_path / "folder")],
        "empty file": [_write(tmp_path / "a.txt", "  \n")],
    }
    with pytest.raises(BadInput):
        read_corpus(specs[case])


def test_hub_sets_need_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"not installed.*kvferry\[datasets\]"):
        read_corpus(["hf:some/set"])


def _fake_datasets(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    "error", [ConnectionError("no route to the hub\nmore"), ConnectionError(), OSError()]
)
def test_hub_sets_without_a_network(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    _fake_datasets(monkeypatch, load)
    with pytest.raises(BadInput, match=r"hub data set 'some/set'.*(ConnectionError|OSError)"):
        read_corpus(["hf:some/set"])


def test_hub_rows_with_split_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [{"body": "one"}, {"body": None}, {"body": "two"}, {"body": 3}]

    _fake_datasets(monkeypatch, load)
    corpus = read_corpus(["hf:some/set:validation:body"])
    assert asked == [("some/set", "validation")]
    assert {d.text for d in corpus.documents} == {"one", "two"}
    assert corpus.empty_rows == 2
    with pytest.raises(BadInput, match="column 'text'"):
        read_corpus(["hf:some/set"])


@pytest.mark.parametrize("count", [2, 3, 50])
def test_wrong_documents_are_never_the_own_one(count: int) -> None:
    partner = wrong_documents(count, seed=4)
    assert sorted(partner) == list(range(count))
    assert all(mine != other for mine, other in enumerate(partner))
    assert wrong_documents(count, seed=4) == partner


def test_one_document_has_no_wrong_partner() -> None:
    with pytest.raises(BadInput, match="at least two documents"):
        wrong_documents(1, seed=0)


def test_items_keep_to_quota_order_and_shards(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"number {i} " * 40}) for i in range(120)]
    corpus = read_corpus([_write(tmp_path / "a.jsonl", "\n".join(rows))])
    layout = LAYOUT.bind(shared_tokenizer())
    settings = CaptureSettings(tokens=1_600, chunk_tokens=64, per_document=2)
    items = plan_items(corpus, layout, settings)
    for split, quota in (("fit", 1_600), ("select", 200), ("test", 200)):
        count = sum(int(i.token_ids.numel()) for i in items if i.split == split)
        assert quota <= count < quota + 64
    assert [i.chunk for i in items] == sorted(i.chunk for i in items)
    from dataclasses import replace

    shards = [plan_items(corpus, layout, replace(settings, shard=(i, 3))) for i in range(3)]
    names = [{(i.doc_id, i.chunk) for i in shard} for shard in shards]
    assert sum(map(len, names)) == len(set().union(*names)) == len(items)


def test_texts_with_very_long_tokens_still_give_whole_chunks() -> None:
    """A run of blanks can be one token of hundreds of characters."""
    tokenizer = tiny_tokenizer(lines=(" " * 400,) * 3)
    layout = LAYOUT.bind(tokenizer)
    documents = tuple(
        Document(f"{i}" + ("x" + " " * 400) * 300, "s", f"{bucket:08x}" + f"{i:056x}")
        for i, bucket in enumerate((0, 1, 85, 95))
    )
    corpus = Corpus(documents, 0, 0, ("s",), {"fit": 2, "select": 1, "test": 1})
    items = plan_items(corpus, layout, CaptureSettings(chunk_tokens=64, per_document=2))
    assert len(items) == 8
    assert {int(item.token_ids.numel()) for item in items} == {64}
