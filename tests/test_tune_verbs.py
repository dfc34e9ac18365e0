"""``kvferry tune`` and ``kvferry bench facts`` from the command line, on small random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput
from kvferry.fitting.tune_data import read_rows
from kvferry.judging.choice_runs import summarise_choices
from kvferry.judging.tasks import facts
from kvferry.judging.tasks.facts import PARTS, make_texts
from kvferry.maps.cache_map import CacheMap
from tests.saved_pair import save_pair


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    sentences = [
        f"In {year} the mill by the river ground {year // 7} sacks." for year in range(900)
    ]
    rows = [{"text": " ".join(sentences[i : i + 12])} for i in range(0, 880, 8)]
    (folder / "prose.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    asked = [
        {
            "context": row["text"],
            "question": "How many sacks?",
            "choices": ["few", "many"],
            "answer": index % 2,
        }
        for index, row in enumerate(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    return folder


def run(*arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


SHORT = ["--steps", 3, "--rank", 2, "--judge-every", 3, "--held-out", 4]
CUT = ["--context-tokens", 64, "--target-tokens", 24, "--answer-tokens", 4]


@pytest.mark.parametrize(
    ("data", "scope"),
    [(["facts:2"], "task"), (["text:prose.jsonl"], "generic"), (["rows:rows.jsonl"], "task")],
)
def test_a_corrector_from_each_kind_of_data(
    root: Path, tmp_path: Path, data: list[str], scope: str
) -> None:
    specs = [f"--data={spec.replace(':', f':{root}/') if '.' in spec else spec}" for spec in data]
    made = run("tune", root / "map", *specs, "--out", tmp_path, *SHORT, *CUT)
    assert made["best"]["n"] > 0
    tuned = CacheMap.from_pretrained(tmp_path / "map")
    ridge = CacheMap.from_pretrained(root / "map")
    assert tuned.config.weights_sha256 == ridge.config.weights_sha256
    assert tuned.config.tuned is not None
    assert tuned.config.tuned["from_map"] == tuned.without_corrector().identity == ridge.identity
    assert tuned.config.tuned["scope"] == scope
    card = (tmp_path / "map" / "README.md").read_text(encoding="utf-8")
    assert scope in card
    assert "rank 2" in card


def test_a_mixture_with_the_source_s_own_answers(root: Path, tmp_path: Path) -> None:
    arguments = ["tune", root / "map", "--data", f"source:{root}/prose.jsonl=2"]
    arguments += ["--data", f"text:{root}/prose.jsonl", "--out", tmp_path, *SHORT, *CUT]
    arguments += ["--objective", "source_kl=0.5", "--objective", "answers"]
    one = run(*arguments)
    kept = (tmp_path / "source_answers.jsonl").read_text(encoding="utf-8")
    assert run(*arguments)["identity"] == one["identity"]
    assert (tmp_path / "source_answers.jsonl").read_text(encoding="utf-8") == kept
    tuned = CacheMap.from_pretrained(tmp_path / "map").config.tuned
    assert tuned is not None
    assert tuned["scope"] == "mixed"
    assert set(tuned["data"].values()) == {2.0, 1.0}


def test_bench_facts_counts_from_records(root: Path, tmp_path: Path) -> None:
    run("tune", root / "map", "--data", "facts:2", "--out", tmp_path / "tuned", *SHORT)
    arguments = ["bench", "facts", "--map", tmp_path / "tuned" / "map", "--ridge", "-n", 2]
    summary = run(*arguments, "--out", tmp_path / "run")
    assert set(summary["maps"]) == {"map", "map (ridge)"}
    for parts in summary["maps"].values():
        assert set(parts) == set(PARTS)
        for entry in parts.values():
            assert entry["n"] == 32
            assert all(0 <= arm["correct"] <= 32 for arm in entry["arms"].values())
    assert summarise_choices(tmp_path / "run") == summary
    native = [parts["seen"]["arms"]["receiver_native"] for parts in summary["maps"].values()]
    assert native[0] == native[1]
    records = tmp_path / "run" / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])  # a kill in the middle of a line
    assert run(*arguments, "--out", tmp_path / "run") == summary
    assert sorted(records.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_maps_side_by_side(root: Path, tmp_path: Path) -> None:
    run("tune", root / "map", "--data", "facts:2", "--out", tmp_path / "tuned", *SHORT)
    tuned = tmp_path / "tuned" / "map"
    arguments = ["compare", tuned, "--ridge", "-n", 2, "--out", tmp_path / "run"]
    found = run(*arguments, "--corpus", root / "prose.jsonl", "--documents", 3)
    for entry in (*found["facts"].values(), found["prose"]):
        assert set(entry["maps"]) == {"map", "map (ridge)"}
        assert entry["maps"]["map"]["p_two_sided"] == 1.0
    for entry in found["facts"].values():
        first, second = entry["maps"].values()
        assert second["correct"] - first["correct"] == second["fixed"] - second["regressed"]
    done = CliRunner().invoke(app, ["compare", str(root / "map"), "--out", str(tmp_path / "x")])
    assert isinstance(done.exception, BadInput)


@pytest.mark.parametrize("part", PARTS)
def test_facts_are_in_the_text_and_nowhere_else(part: facts.Part) -> None:
    for text in make_texts(part, 6, seed=3):
        assert len(text.questions) == 16
        for question in text.questions:
            assert len(set(question.candidates)) == facts.PEOPLE
            assert all(candidate in text.context for candidate in question.candidates)
    assert make_texts(part, 2, seed=3) == make_texts(part, 2, seed=3)
    assert make_texts(part, 2, seed=3) != make_texts(part, 2, seed=4)


def test_what_is_held_out_is_disjoint() -> None:
    assert not set(facts.SEEN_NAMES.split()) & set(facts.UNSEEN_NAMES.split())
    assert not set(facts.SEEN_KINDS) & set(facts.UNSEEN_KINDS)
    assert not set(facts.SEEN_FRAMES) & set(facts.UNSEEN_FRAMES)
    texts = make_texts("seen", 40, seed=0)
    seen = " ".join(text.context for text in texts)
    asked = {question.text for text in texts for question in text.questions}
    for kind in facts.SEEN_KINDS:
        held = facts.CLAUSES[kind][-1].split("{v}")[0]
        assert held not in seen, kind
        held_questions = {
            facts.QUESTIONS[kind][-1].format(name=name) for name in facts.SEEN_NAMES.split()
        }
        assert not held_questions & asked, kind


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", "magic:3"],
        ["--data", "facts:none"],
        ["--data", "facts:2=0"],
        ["--data", "facts:2", "--kind", "magic"],
        ["--data", "facts:2", "--objective", "magic"],
        ["--data", "facts:2", "--layers", "0,x"],
        ["--data", "rows:missing.jsonl"],
    ],
)
def test_what_tune_refuses(root: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(
        app, ["tune", str(root / "map"), "--out", str(tmp_path / "t"), *arguments]
    )
    assert isinstance(done.exception, BadInput), done.output


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"context": "a"}',
        '{"context": "", "question": "b"}',
        '{"context": "a", "question": "b", "choices": ["c", "c"], "answer": 0}',
        '{"context": "a", "question": "b", "choices": ["c", "d"], "answer": 2}',
        '{"context": "a", "question": "b", "choices": ["c", "d"], "answer": "e"}',
        '{"context": "a", "question": "b", "choices": ["c", "d"], "answer": -1}',
        '{"context": "a", "question": "b", "choices": "cd", "answer": "c"}',
        '{"context": "a", "question": "b\\ud800", "answer": "c"}',
        "[" * 100_000,
    ],
)
def test_rows_that_are_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"rows\.jsonl:1"):
        read_rows(path)


def test_tensorboard_events_are_written(root: Path, tmp_path: Path) -> None:
    arguments = ["tune", str(root / "map"), "--data", "facts:2", "--out", str(tmp_path / "t")]
    arguments += ["--tensorboard", str(tmp_path / "events"), *map(str, SHORT)]
    done = CliRunner().invoke(app, arguments)
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        assert isinstance(done.exception, BadInput)
        assert "kvferry[tensorboard]" in done.exception.next_step
        return
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "events").iterdir())
