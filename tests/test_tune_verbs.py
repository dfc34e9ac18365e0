"""``kvferry tune`` and ``kvferry bench facts`` from the command line, on small random models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput, ContextTooLong, CorruptFile, OutOfSpace
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
    [
        (["facts:2", "recite:2=0.5"], "task"),
        (["text:prose.jsonl"], "generic"),
        (["facts:2", "text:prose.jsonl=0.5"], "mixed"),
        (["rows:rows.jsonl"], "task"),
    ],
)
def test_a_corrector_from_each_kind_of_data(
    root: Path, tmp_path: Path, data: list[str], scope: str
) -> None:
    specs = [
        f"--data={spec.replace(':', f':{root}/') if '.jsonl' in spec else spec}" for spec in data
    ]
    made = run("tune", root / "map", *specs, "--out", tmp_path, *SHORT, *CUT)
    assert made["best"]["n"] > 0
    if scope == "mixed":
        parts = made["log"][0]["by_source"]
        assert len(parts) == len(data)
        for what in ("correct", "wrong_document_correct", "n"):
            assert sum(part[what] for part in parts.values()) == made["log"][0][what]
    tuned = CacheMap.from_pretrained(tmp_path / "map")
    ridge = CacheMap.from_pretrained(root / "map")
    assert tuned.config.weights_sha256 == ridge.config.weights_sha256
    assert tuned.config.tuned is not None
    assert tuned.config.tuned["from_map"] == tuned.without_corrector().identity == ridge.identity
    assert tuned.config.tuned["scope"] == scope
    card = (tmp_path / "map" / "README.md").read_text(encoding="utf-8")
    assert scope in card
    assert "rank 2" in card


def test_a_text_of_one_piece_is_cut_into_documents(root: Path, tmp_path: Path) -> None:
    rows = map(json.loads, (root / "prose.jsonl").read_text("utf-8").splitlines())
    (tmp_path / "one.txt").write_text("\n\n".join(row["text"] for row in rows), encoding="utf-8")
    arguments = ["tune", root / "map", "--data", f"text:{tmp_path}/one.txt", *SHORT, *CUT]
    done = CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "a")])
    assert isinstance(done.exception, BadInput)  # all of it is of one split
    made = run(*arguments, "--section-chars", 500, "--out", tmp_path / "b")
    assert made["best"]["n"] == 4


def test_a_mixture_with_the_source_s_own_answers(root: Path, tmp_path: Path) -> None:
    arguments = ["tune", root / "map", "--data", f"source:{root}/prose.jsonl=2"]
    arguments += ["--data", f"text:{root}/prose.jsonl", "--out", tmp_path / "out", *SHORT]
    arguments += [*CUT, "--objective", "source_kl=0.5", "--objective", "answers"]
    one = run(*arguments)
    answers = tmp_path / "out" / "source_answers" / "records.jsonl"
    kept = answers.read_bytes()
    assert run(*arguments)["identity"] == one["identity"]
    assert answers.read_bytes() == kept
    done = CliRunner().invoke(app, [*map(str, arguments), "--answer-tokens", "9"])
    assert isinstance(done.exception, BadInput)  # these answers are of another length
    assert "max_new_tokens" in done.exception.got
    tuned = CacheMap.from_pretrained(tmp_path / "out" / "map").config.tuned
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
        ["--data", "facts:2", "--layers", "99"],
        ["--data", "facts:2", "--layers=-1"],
        ["--data", "facts:2", "--learning-rate", "inf"],
        ["--data", "facts:2", "--learning-rate", "0"],
        ["--data", "facts:2", "--clip", "0"],
        ["--data", "facts:2", "--seed", str(10**30)],
        ["--data", "facts:2", "--data", "facts:2"],
        ["--data", "facts:2", "--objective", "answers", "--objective", "answers=2"],
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


def test_a_recital_says_the_facts_of_its_text() -> None:
    recitals = facts.make_recitals(6, seed=3)
    texts = make_texts("seen", 6, seed=3, questions=3 * facts.PEOPLE)
    for recital, text in zip(recitals, texts, strict=True):
        assert (recital.text_id, recital.context) == (text.text_id, text.context)
        known = {q.candidates[q.answer] for q in text.questions}
        assert {statement.value.strip() for statement in recital.statements} == known
        assert len(recital.statements) == 3 * facts.PEOPLE
        said = "".join(s.before + s.value + s.after for s in recital.statements)
        assert said.count(".") == len(recital.statements)


def test_only_values_of_a_recital_are_targets(root: Path) -> None:
    from kvferry.judging.facts_data import recital_data
    from kvferry.running.choices import answer_all
    from kvferry.running.handoff import Handoff

    ferry = Handoff.from_pretrained(root / "map")
    data = recital_data(ferry, 1, seed=3)
    row = data.train[0].asked[0].continuation
    words = ferry.receiver.tokenizer.decode(row.targets)
    values = [s.value.strip() for s in facts.make_recitals(1, seed=3)[0].statements]
    assert [v for v in values if v in words] == values
    assert row.targets.numel() < row.answer.numel()
    whole = replace(row, scored=None)
    cache = ferry.read(ferry.receiver, data.train[0].body).cache
    some, every = (answer_all(ferry.receiver, cache, [r]).logits for r in (row, whole))
    assert torch.allclose(some, every[row.scored], atol=1e-5)


@pytest.fixture(scope="module")
def tuned(root: Path) -> Path:
    """A finished tuning, to be copied before it is damaged."""
    run("tune", root / "map", "--data", "facts:2:7", "--out", root / "tuned", *SHORT)
    return root / "tuned"


def refused(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)]).exception


@pytest.mark.parametrize("rank", [10**11, 10**22])
def test_a_rank_beyond_memory(root: Path, tmp_path: Path, rank: int) -> None:
    arguments = ["tune", root / "map", "--data", "facts:2", "--out", tmp_path, "--rank", rank]
    assert isinstance(refused(*arguments), OutOfSpace)


@pytest.mark.parametrize("field", ["question", "choices"])
def test_rows_beyond_a_model_s_limit_are_refused_before_any_work(
    root: Path, tmp_path: Path, field: str
) -> None:
    long = "why " * 2000
    row = {"question": "q?", "choices": ["x", "y"], "answer": 0}
    row |= {field: [long, "y"] if field == "choices" else long}
    rows = [json.dumps({"context": f"c{place}", **row}) for place in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = ["--data", f"rows:{tmp_path}/rows.jsonl", "--out", tmp_path / "t"]
    assert isinstance(refused("tune", root / "map", *data), ContextTooLong)
    assert not (tmp_path / "t").exists()


def test_going_on_takes_the_corrector_as_it_is(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned, tmp_path / "one")
    own = tmp_path / "one" / "map"
    more = ["--data", "facts:2:8", "--go-on", "--steps", 1, "--held-out", 2]
    for said in (["--rank", 16], ["--kind", "trunk"], ["--gate"]):
        error = refused("tune", own, *more, *said, "--out", tmp_path / "two")
        assert isinstance(error, BadInput)
        assert said[0] in error.got
    before = (own / "map.json").read_bytes()
    assert isinstance(refused("tune", own, *more, "--out", tmp_path / "one"), BadInput)
    assert (own / "map.json").read_bytes() == before
    run("tune", own, *more, "--out", tmp_path / "two")


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "best.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "another"])
def test_a_damaged_checkpoint(
    root: Path, tuned: Path, tmp_path: Path, name: str, damage: str
) -> None:
    arguments = ["tune", root / "map", "--data", "facts:2:7", "--out", tmp_path, *SHORT]
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    if damage == "another":
        path.write_bytes((tmp_path / "map" / "corrector.safetensors").read_bytes())
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:1000] if damage == "cut" else b"")
    if (damage, name) == ("gone", "checkpoint.safetensors"):
        run(*arguments)  # begins anew, to the same result
        assert path.read_bytes() == whole
    else:
        assert isinstance(refused(*arguments), CorruptFile)


def test_questions_on_facts_that_were_tuned_on_are_refused(tuned: Path, tmp_path: Path) -> None:
    asked = ["bench", "facts", "--map", tuned / "map", "-n", 2, "--out", tmp_path / "b"]
    for seed in (7, 507):
        error = refused(*asked, "--seed", seed)
        assert isinstance(error, BadInput)
        assert "tuned" in error.got
    run(*asked, "--seed", 7, "--parts", "unseen_kinds")


def test_what_cannot_be_compared_is_refused_before_any_work(root: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.", encoding="utf-8")
    folder = tmp_path / "run"
    assert isinstance(refused("compare", root / "map", "--out", folder), BadInput)
    twin = tmp_path / "twin"
    shutil.copytree(root / "map", twin)
    two = ["compare", root / "map", twin, "-n", 2, "--out", folder]
    assert isinstance(refused(*two, "--corpus", short), BadInput)
    assert not folder.exists()


def test_seeds_that_a_map_has_seen() -> None:
    from kvferry.judging.choice_runs import seeds_used

    names = ["facts-2:24:7", "facts-2:24:9:recited", "text:books.jsonl"]
    assert seeds_used(names) == {7, 9, 507, 509}
