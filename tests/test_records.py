"""Records that aren't a run's own are refused by the verbs that go on from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import main
from kvferry.errors import CorruptFile
from kvferry.provenance import add_record, read_records, start_records


def test_records_twice_or_without_a_name_are_refused(tmp_path: Path) -> None:
    path = start_records(tmp_path, {"a": 1}, same=("a",), once=("map", "text"))
    add_record(path, {"map": "m", "text": 1})
    add_record(path, {"map": "m", "text": 2})
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert len(read_records(path, once=("map", "text"))) == 1
    for line in ({}, {"map": "m", "text": 1}):
        path.write_bytes(whole + json.dumps(line).encode() + b"\n")
        with pytest.raises(CorruptFile, match=r"records\.jsonl:3"):
            start_records(tmp_path, {"a": 1}, same=("a",), once=("map", "text"))
    path.write_bytes(whole)
    with pytest.raises(CorruptFile, match="score"):
        read_records(path, keys=("score",))
    (tmp_path / "header.json").unlink()
    with pytest.raises(CorruptFile, match="records alone"):
        start_records(tmp_path, {"a": 2}, same=("a",))


def test_a_path_that_cannot_be_written_gets_the_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("about: x\nneeds: {}\nsteps: ['models list']\n", encoding="utf-8")
    monkeypatch.setattr(
        "sys.argv", ["kvferry", "recipe", str(recipe), "--work", str(recipe / "below")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("expected", "got", "next", "r.yaml"))
