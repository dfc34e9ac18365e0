"""Review questions over excerpts: which are kept, what an excerpt is, what the splits share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput
from kvferry.fitting.tune_data import read_rows
from kvferry.judging.tasks.openstax import (
    ReviewQuestion,
    characters,
    choice_texts,
    cut_section,
    read_split,
    shared_text,
    token_count,
)
from kvferry.judging.tasks.words import shingles, words
from tests.benchmark_data import write_textbooks
from tests.small_pair import tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
OPENED: list[str] = []
WATCH: list[bool] = []
sys.addaudithook(
    lambda event, arguments: (
        OPENED.append(str(arguments[0])) if WATCH and event in ("open", "os.listdir") else None
    )
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_textbooks(tmp_path / "data")


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    if not (DATA / "openstax_mcq").is_dir():
        pytest.skip("the textbooks (../shared/data) aren't beside this checkout")
    OPENED.clear()
    WATCH.append(True)
    try:
        return {"tune": read_split(DATA, "tune"), "test": read_split(DATA, "test")}
    finally:
        WATCH.clear()


def test_what_is_kept_and_what_is_counted(data: Path) -> None:
    test = read_split(data, "test")
    assert test.asked == 15
    assert test.left_out == {
        "options speak of other options": 3,
        "asks for what is not so": 3,
        "answer not found in the section": 3,
    }
    assert len(test.rows) == 6
    for row in test.rows:
        assert row.options[row.answer] in row.context.casefold()
        assert "By the end" not in row.context
    tune = read_split(data, "tune")
    assert {row.book for row in tune.rows} == {"biology", "anatomy_physiology"}
    assert not {row.module for row in tune.rows} & {row.module for row in test.rows}
    counts = tune.counts()
    assert counts["kept"] + sum(counts["left_out"].values()) == counts["asked"] == 45


def test_a_question_says_whether_a_wrong_option_is_stated_too(data: Path) -> None:
    path = data / "openstax_prose" / "anatomy_physiology.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows[-1]["text"] += " The kings of the place watched it all from afar."
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    found = [row for row in read_split(data, "test").rows if row.question.startswith("Who")]
    assert [row.contested for row in found] == [False, False, True]


def test_pieces_are_consecutive_whole_and_within_the_budget() -> None:
    paragraphs = [f"Paragraph {i} has a sentence. It has another one." for i in range(9)]
    paragraphs.insert(4, "A heading")
    paragraphs.append(" ".join(f"Sentence {i} of a long paragraph." for i in range(40)))
    pieces = cut_section("\n\n".join(paragraphs), count=len, tokens=200)
    assert all(len(piece) <= 200 for piece in pieces)
    assert " ".join(" ".join(pieces).split()) == " ".join(" ".join(paragraphs).split())
    assert not any(piece.endswith("A heading") for piece in pieces)
    assert len(pieces) > 8


def test_counting_by_characters_is_never_below_the_tokens(data: Path) -> None:
    count = token_count(tokenizer())  # bytes: the most tokens a text can have
    for row in read_split(data, "test", count=count, tokens=150).rows:
        assert len(row.context.encode()) <= 150
    assert characters("abcd") == 2


def test_text_shared_with_the_test_sections_is_dropped_and_named(data: Path) -> None:
    path = data / "openstax_prose" / "biology.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    copied = read_split(data, "test").rows[0].context.split("\n\n")[-1]
    rows[0]["text"] += "\n\n" + copied
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tune = read_split(data, "tune")
    assert {name.rsplit("/", 1)[0] for name in tune.shared} == {"biology/m10"}
    assert tune.left_out["shares text with test"] == len(tune.shared) > 0
    assert not shared_text(tune.rows, read_split(data, "test").rows)


def row(name: str, context: str, module: str = "m", question: str = "Which one?") -> ReviewQuestion:
    return ReviewQuestion(name, "biology", module, context, question, ("a", "b"), 0, False)


def test_seven_words_in_a_row_are_not_shared_text_eight_are() -> None:
    eight = "one two three four five six seven eight"
    test = [row("t", f"Before it: {eight.upper()}, after it.", question="Where?")]
    assert shared_text([row("x", f"other {eight} words")], test) == ["x"]
    assert shared_text([row("x", f"other {eight[:-6]} words")], test) == []
    assert shared_text([row("x", "nothing alike", question="where")], test) == ["x"]


def test_questions_of_one_excerpt_are_asked_together(data: Path) -> None:
    rows = read_split(data, "test").rows
    texts = choice_texts(rows, seed=1)
    assert sum(len(text.questions) for text in texts) == len(rows)
    assert len({text.context for text in texts}) == len(texts) < len(rows)
    assert texts == choice_texts(rows, seed=1)
    assert sum(len(text.questions) for text in choice_texts(rows, n=3, seed=1)) == 3


def test_rows_that_tune_reads(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["rows", "openstax", "--data", str(data), "--out", str(out), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout.splitlines()[-1])
    rows = read_rows(out)
    assert len(rows) == found["kept"] == len(read_split(data, "tune").rows)
    assert all(one.answer in one.choices for one in rows)
    done = CliRunner().invoke(app, [*arguments[:-1], "--split", "test"])
    assert done.exit_code == 0
    assert "6 of 15 questions" in " ".join(done.stdout.split())


@pytest.mark.parametrize("what", ["split", "missing", "damaged", "field", "nothing"])
def test_what_is_refused(data: Path, tmp_path: Path, what: str) -> None:
    prose = data / "openstax_prose" / "anatomy_physiology.jsonl"
    if what == "missing":
        prose.unlink()
    elif what == "damaged":
        prose.write_text('{"module": \n', "utf-8")
    elif what == "field":
        prose.write_text('{"module": "m1"}\n', "utf-8")
    elif what == "nothing":
        prose.write_text('{"module": "m1", "text": "Nothing."}\n', "utf-8")
    split = "us_history" if what == "split" else "test"
    arguments = ["rows", "openstax", "--data", str(data), "--split", split]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "r.jsonl")])
    assert isinstance(done.exception, BadInput)
    assert not (tmp_path / "r.jsonl").exists()


def test_other_books_are_never_opened(data: Path, tmp_path: Path) -> None:
    for folder in ("openstax_mcq", "openstax_prose"):
        (data / folder / "us_history.jsonl").mkdir()  # opening it would fail
    assert read_split(data, "tune").rows
    with pytest.raises(BadInput):
        read_split(data, "us_history")  # type: ignore[arg-type]


def test_the_real_splits(real: dict[str, Any]) -> None:
    tune, test = real["tune"], real["test"]
    assert (tune.asked, test.asked) == (1017, 353)
    assert len(tune.rows) >= 480
    assert len(test.rows) >= 160
    for split in (tune, test):
        assert split.asked == len(split.rows) + sum(split.left_out.values())
        for one in split.rows:
            assert characters(one.context) <= 600
            assert len(one.options) == 4
    assert {one.book for one in test.rows} == {"anatomy_physiology"}
    assert not {one.module for one in tune.rows} & {one.module for one in test.rows}
    assert tune.shared


def test_the_real_splits_share_no_text(real: dict[str, Any]) -> None:
    seen: set[tuple[str, ...]] = set()
    for one in real["test"].rows:
        seen |= shingles(words(one.context), 8)
    for one in real["tune"].rows:
        assert not shingles(words(one.context), 8) & seen, one.id


def test_the_sealed_book_is_never_opened(real: dict[str, Any]) -> None:
    opened = {Path(path).name for path in OPENED if str(DATA) in path}
    assert opened == {"biology.jsonl", "anatomy_physiology.jsonl"}
    assert not [path for path in OPENED if "us_history" in path]
