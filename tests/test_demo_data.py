"""The demo's passages: real text, one answer each, balanced positions, marks that don't leak."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

SOURCE = (
    Path(__file__).resolve().parents[2]
    / "shared"
    / "data"
    / "openstax_prose"
    / "anatomy_physiology.jsonl"
)
FIELDS = {
    "id",
    "book",
    "module",
    "title",
    "passage",
    "question",
    "options",
    "answer",
    "accept",
    "licence",
}


def folder() -> Any:
    return resources.files("kvferry") / "demo_data"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    text = (folder() / "passages.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_there_are_twelve_rows_of_the_stated_schema(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 12
    for row in rows:
        assert set(row) == FIELDS
        assert row["book"] == "anatomy_physiology"
        assert row["licence"] == "CC BY 3.0"
        assert len(row["options"]) == len(set(row["options"])) == 4
        assert row["answer"] in range(4)
        assert row["accept"]
        assert all(accepted == accepted.lower().strip() != "" for accepted in row["accept"])
        assert row["question"].endswith("?")
        assert 140 <= len(row["passage"].split()) <= 260
        assert row["passage"][-1] in ".”"
    for field in ("id", "module", "passage", "question"):
        assert len({row[field] for row in rows}) == 12


def test_correct_positions_are_balanced(rows: list[dict[str, Any]]) -> None:
    assert Counter(row["answer"] for row in rows) == dict.fromkeys(range(4), 3)


def test_the_answer_is_stated_in_the_passage(rows: list[dict[str, Any]]) -> None:
    """The first accepted string is the passage's own; the others are spellings of it."""
    for row in rows:
        assert row["accept"][0] in row["passage"].lower(), row["id"]


def test_accepted_strings_mark_the_correct_option_and_no_other(
    rows: list[dict[str, Any]],
) -> None:
    for row in rows:
        for index, option in enumerate(row["options"]):
            marked = any(accepted in option.lower() for accepted in row["accept"])
            assert marked == (index == row["answer"]), (row["id"], option)
        assert not any(accepted in row["question"].lower() for accepted in row["accept"])


def test_no_wrong_option_is_mentioned_in_the_passage(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        wrong = [option for i, option in enumerate(row["options"]) if i != row["answer"]]
        assert not [option for option in wrong if option.lower() in row["passage"].lower()]


def test_passages_are_verbatim_from_the_second_half_of_the_book(
    rows: list[dict[str, Any]],
) -> None:
    if not SOURCE.exists():
        pytest.skip("the book's text (../shared/data) isn't beside this checkout")
    book = [json.loads(line) for line in SOURCE.read_text(encoding="utf-8").splitlines()]
    second_half = {row["module"]: row for row in book[len(book) // 2 :]}
    for row in rows:
        section = second_half[row["module"]]
        assert row["passage"] in section["text"], row["id"]
        assert row["title"] == section["title"]


def test_the_attribution_names_licence_and_every_section(rows: list[dict[str, Any]]) -> None:
    text = (folder() / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for needed in ("OpenStax College", "2014", "CC BY 3.0", "Changes made"):
        assert needed in text
    for row in rows:
        assert f"| {row['id']} | {row['module']} | {row['title']} |" in text
