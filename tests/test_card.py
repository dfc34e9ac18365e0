"""``kvferry card``: figures of held-out runs in a map's card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput, WrongPair
from kvferry.maps.cache_map import CacheMap
from tests.benchmark_data import write_textbooks
from tests.saved_pair import save_pair


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, a map tuned on facts and running text, and runs with it and its ridge."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    write_textbooks(folder / "data")
    for name in ("prose", "other"):
        text = [
            f"In {year} the {name} by the river ground {year // 7} sacks." for year in range(900)
        ]
        rows = [{"text": " ".join(text[i : i + 12])} for i in range(0, 880, 8)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = ["--data", "facts:2", "--data", f"text:{folder}/prose.jsonl", "--held-out", 4]
    cut = ["--context-tokens", 64, "--target-tokens", 24]
    run("tune", folder / "map", *data, *cut, "--steps", 2, "--rank", 2, "--out", folder / "tune")
    where = ["--map", folder / "tune" / "map"]
    run("bench", "facts", *where, "--ridge", "-n", 2, "--out", folder / "facts")
    sections = ["--data", folder / "data"]
    run("bench", "questions", *where, *sections, "-n", 4, "--out", folder / "questions")
    for name in ("prose", "other"):
        corpus = ["--corpus", folder / f"{name}.jsonl", "-n", 3, "--out", folder / f"m-{name}"]
        run("measure", *where, *corpus, "--context-tokens", 64, "--target-tokens", 24)
    return folder


def run(*arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_card_has_what_runs_gave(root: Path) -> None:
    folder = root / "tune" / "map"
    before = CacheMap.from_pretrained(folder)
    weights = (folder / "map.safetensors").read_bytes()
    names = ("facts", "questions", "m-prose", "m-other")
    made = run("card", folder, *(f"--run={root / name}" for name in names))
    rows = made["held_out"]
    domains = {(row["task"], row["part"]): row["domain"] for row in rows}
    assert domains == {
        ("facts-2", "seen"): "in",
        ("facts-2", "unseen_phrasing"): "out",
        ("facts-2", "unseen_kinds"): "out",
        ("openstax-1", "test"): "out",
        ("running text", "prose.jsonl"): "in",
        ("running text", "other.jsonl"): "out",
    }
    summary = json.loads((root / "facts" / "summary.json").read_text("utf-8"))["maps"]["map"]
    for row in rows[:3]:
        arms = summary[row["part"]]["arms"]
        assert row["right"] == {arm: found["correct"] for arm, found in arms.items()}
    after = CacheMap.from_pretrained(folder)
    assert after.identity == before.identity == made["identity"]
    assert after.config.quality["held_out"] == rows
    assert after.config.quality.keys() - {"held_out"} == before.config.quality.keys()
    assert (folder / "map.safetensors").read_bytes() == weights
    card = (folder / "README.md").read_text("utf-8")
    assert f"| facts-2, seen | in | 32 | {rows[0]['right']['transfer']} |" in card
    assert "| other.jsonl | out | 3 |" in card
    again = run("card", folder, "--run", root / "m-other")
    assert [row["part"] for row in again["held_out"]] == ["other.jsonl"]
    assert "facts-2, seen" not in (folder / "README.md").read_text("utf-8")


def test_a_card_prints_its_tables(root: Path) -> None:
    folder = root / "tune" / "map"
    done = CliRunner().invoke(app, ["card", str(folder), "--run", str(root / "m-other")])
    assert done.exit_code == 0, done.exception
    assert "| other.jsonl | out | 3 |" in done.stdout


def test_a_card_refuses_other_maps_and_other_folders(root: Path, tmp_path: Path) -> None:
    folder = root / "tune" / "map"
    card = (folder / "README.md").read_bytes()
    (tmp_path / "header.json").write_text('{"format": "something"}', encoding="utf-8")
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    for where, kind, said in (
        (root / "map", WrongPair, "a run with this map"),
        (folder, BadInput, "no header.json"),
    ):
        given = root / "questions" if where != folder else tmp_path / "none"
        done = CliRunner().invoke(app, ["card", str(where), "--run", str(given)])
        assert isinstance(done.exception, kind)
        assert said in done.exception.expected + done.exception.got
    done = CliRunner().invoke(app, ["card", str(folder), "--run", str(tmp_path)])
    assert isinstance(done.exception, BadInput)
    assert "something" in done.exception.got
    assert (folder / "README.md").read_bytes() == card
