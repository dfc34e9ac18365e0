"""Blind judging: pairs, both orders, sheets and figures, by the library and by the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput, CorruptFile
from kvferry.judging.blind import (
    Pair,
    figures,
    judge_pairs,
    read_pairs,
    read_sheet,
    verdict,
    write_sheet,
)
from kvferry.judging.paired_stats import sign_test
from kvferry.provenance import add_record, read_json, read_records, write_json
from tests.saved_pair import save_model

ARMS = ("transfer", "receiver_native")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run of eight prompts: transfer answers in long words, the other arm in short ones."""
    folder = tmp_path / "run"
    prompts = [{"id": f"p{i}", "request": f"Say {i} in words."} for i in range(8)]
    write_json(
        folder / "header.json",
        {"format": "kvferry-answers-1", "maps": {"m": {}}, "prompts": prompts},
    )
    for i in range(8):
        for arm, text in zip(ARMS, (f"splendid {i}", f"bad {i}"), strict=True):
            text = {0: "", 1: "I'm sorry, no."}.get(i, text) if arm == "transfer" else text
            row = {"map": "m", "prompt_id": f"p{i}", "arm": arm, "text": text}
            add_record(folder / "records.jsonl", row)
    return folder


class Likes:
    """Prefers one word, with a bias for what is shown first."""

    def __init__(self, word: str, *, bias: float = 0.0) -> None:
        self.word, self.bias, self.asked = word, bias, 0

    def describe(self) -> dict[str, Any]:
        return {"kind": "test", "model": self.word}

    def odds(self, request: str, first: str, second: str) -> float:
        assert request.startswith("Say")
        self.asked += 1
        return float(self.word in first) - float(self.word in second) + self.bias


def test_pairs_hide_the_arms_and_take_turns(made: Path) -> None:
    found = read_pairs(made, *ARMS, seed=1)
    assert len(found.pairs) == 8
    assert sum(pair.first_is_a for pair in found.pairs) == 4
    assert found == read_pairs(made, *ARMS, seed=1)
    assert found.identity != read_pairs(made, *ARMS, seed=2).identity
    assert [p.prompt_id for p in found.pairs] != [f"p{i}" for i in range(8)]
    for pair in found.pairs:
        assert pair.answer("b") == f"bad {pair.prompt_id[1:]}"


@pytest.mark.parametrize(
    ("word", "bias", "expected"),
    [("splendid", 0.0, (6, 2, 0)), ("bad", 0.5, (0, 0, 8)), ("bad", 2.0, (0, 8, 0))],
)
def test_a_win_needs_both_orders(
    made: Path, tmp_path: Path, word: str, bias: float, expected: tuple[int, ...]
) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    report = judge_pairs(Likes(word, bias=bias), found, tmp_path / "judged")
    assert (report["wins"], report["ties"], report["losses"]) == expected
    assert report["p_two_sided"] == sign_test(expected[0], expected[2])
    assert report["askings"] == 16
    if bias == 2.0:
        assert report["said_first"] == 16
        assert report["disagreed"] == 8
        assert report["lean"]["b"] == 8  # the place cancels out
    assert report["answers"]["transfer"]["empty"] == 1
    assert report["answers"]["transfer"]["refusals"] == 1
    assert report["answers"]["receiver_native"]["mean_words"] == 2


def test_judging_resumes(made: Path, tmp_path: Path) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    report = judge_pairs(Likes("bad"), found, tmp_path / "judged")
    records = tmp_path / "judged" / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    judge = Likes("bad")
    assert judge_pairs(judge, found, tmp_path / "judged") == report
    assert 0 < judge.asked < 16
    assert records.read_bytes() == whole
    with pytest.raises(BadInput, match="other judge"):
        judge_pairs(Likes("good"), found, tmp_path / "judged")


def test_verdicts_by_hand() -> None:
    pair = Pair(1, "p", "r", "one", "two", first_is_a=False)
    assert verdict(pair, [1.0, -1.0]) == "b"
    assert verdict(pair, [-1.0, 1.0]) == "a"
    assert verdict(pair, [1.0, 1.0]) == verdict(pair, [0.0, -1.0]) == "tie"
    assert sign_test(0, 0) == 1.0
    assert sign_test(8, 0) == pytest.approx(2 / 256)


def test_a_sheet_names_no_arm_and_is_read_back(made: Path, tmp_path: Path) -> None:
    found = read_pairs(made, *ARMS, seed=3)
    paths = write_sheet(found, tmp_path / "sheet.md")
    text = paths["sheet"].read_text("utf-8")
    shown = text + paths["answers"].read_text("utf-8")
    assert not any(name in shown for name in (*ARMS, "native", '"m"'))
    assert text.count("## ") == 8
    assert "(no answer)" in text
    key = read_json(paths["key"])
    assert key["compared"]["a"] == "transfer"
    rows = [json.loads(line) for line in paths["answers"].read_text("utf-8").splitlines()]
    for row, pair in zip(rows, found.pairs, strict=True):
        row["better"] = (
            "A" if "splendid" in pair.first else "b" if "splendid" in pair.second else ""
        )
    filled = tmp_path / "filled.jsonl"
    filled.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    report = figures(found, read_sheet(found, filled))
    assert (report["wins"], report["losses"], report["unanswered"]) == (6, 0, 2)
    with pytest.raises(BadInput, match="filled in"):
        write_sheet(found, tmp_path / "sheet.md")
    with pytest.raises(BadInput, match="other arms, seed or answers"):
        read_sheet(read_pairs(made, *ARMS, seed=4), filled)


@pytest.mark.parametrize("line", ["{", "[]", '{"pair": 1}', "{sheet, 99, A}", "{sheet, 1, C}"])
def test_marks_that_are_none(made: Path, tmp_path: Path, line: str) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    if line.startswith("{sheet"):
        _, pair, better = line.strip("{}").split(", ")
        line = json.dumps({"sheet": found.identity, "pair": int(pair), "better": better})
    filled = tmp_path / "filled.jsonl"
    filled.write_text(line, "utf-8")
    with pytest.raises(BadInput, match=r"filled\.jsonl:1"):
        read_sheet(found, filled)


def test_a_fence_is_longer_than_any_in_an_answer(made: Path, tmp_path: Path) -> None:
    path = made / "records.jsonl"
    rows = read_records(path)
    path.unlink()
    for row in rows:
        mine = (row["prompt_id"], row["arm"]) == ("p7", "transfer")
        add_record(path, row | {"text": "a\n~~~~\nb"} if mine else row)
    paths = write_sheet(read_pairs(made, *ARMS, seed=0), tmp_path / "sheet.md")
    assert "\n~~~~~text\na\n~~~~\nb\n~~~~~\n" in paths["sheet"].read_text("utf-8")


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["judge", *map(str, arguments)])


def test_the_verb_with_a_model_and_a_sheet(made: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "judge", "qwen2", layers=2)
    sheet = tmp_path / "sheet.md"
    done = invoke(made, "--judge", model, "--sheet", sheet, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(done.stdout.splitlines()[-1])["model"]
    assert report["wins"] + report["ties"] + report["losses"] == report["n"] == 8
    folder = made / "judged" / "m-transfer-receiver_native-0"
    header = read_json(folder / "judge" / "header.json")
    assert len(header["judge"]["revision"]) == 64
    assert "{request}" in header["judge"]["prompt"]
    rows = read_records(folder / "judge" / "records.jsonl")
    assert all(len(row["odds_first"]) == 2 for row in rows)
    filled = tmp_path / "sheet.answers.jsonl"
    marks = [json.loads(line) for line in filled.read_text("utf-8").splitlines()]
    filled.write_text(
        "\n".join(json.dumps(mark | {"better": "neither"}) for mark in marks), "utf-8"
    )
    done = invoke(made, "--answers", filled, "--judge", model)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "0 wins, 8 ties, 0 losses" in " ".join(done.stdout.split())
    assert read_json(folder / "people-sheet.answers.json")["ties"] == 8


def test_a_judge_s_limit_is_kept(made: Path, tmp_path: Path) -> None:
    from kvferry.errors import ContextTooLong
    from kvferry.judging.local_judge import LocalJudge
    from kvferry.models.load import load_model

    save_model(tmp_path / "judge", "llama", layers=1)
    judge = LocalJudge(load_model(str(tmp_path / "judge")))
    assert judge.odds("Say it.", "it", "no") != judge.odds("Say it.", "no", "it")
    with pytest.raises(ContextTooLong, match="4096"):
        judge.odds("Say it.", "it" * 3000, "no")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--sheet", "sheet.txt"],
        ["--sheet", "s.md", "--a", "magic"],
        ["--sheet", "s.md", "--a", "transfer", "--b", "transfer"],
        ["--sheet", "s.md", "--map", "other"],
        ["--answers", "missing.jsonl"],
    ],
)
def test_what_the_verb_refuses(made: Path, arguments: list[str]) -> None:
    assert isinstance(invoke(made, *arguments).exception, BadInput)


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "header.json", {"format": "kvferry-choices-1", "maps": {}})
    assert isinstance(invoke(tmp_path, "--sheet", tmp_path / "s.md").exception, BadInput)


@pytest.mark.parametrize(
    "line",
    ["{}", '{"map": "m", "prompt_id": "p7", "arm": "transfer", "text": "twice"}'],
)
def test_records_that_are_none_of_the_run(made: Path, tmp_path: Path, line: str) -> None:
    with (made / "records.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with pytest.raises(CorruptFile, match=r"records\.jsonl:17"):
        read_pairs(made, *ARMS, seed=0)


@pytest.mark.parametrize(
    "change", [{"maps": 3}, {"maps": {}}, {"prompts": [1]}, {"prompts": [{"id": "p1"}]}]
)
def test_a_run_s_header_that_is_none(made: Path, change: dict[str, Any]) -> None:
    path = made / "header.json"
    path.write_text(json.dumps(read_json(path) | change), encoding="utf-8")
    with pytest.raises(CorruptFile, match=r"header\.json"):
        read_pairs(made, *ARMS, seed=0)


@pytest.mark.parametrize("pair", [[1], {"a": 1}, True, 1.0, "1"])
def test_a_pair_that_is_no_number(made: Path, tmp_path: Path, pair: Any) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    filled = tmp_path / "f.jsonl"
    row = {"sheet": found.identity, "pair": pair, "better": "A"}
    filled.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(BadInput, match="no number"):
        read_sheet(found, filled)


def test_a_sheet_saved_with_a_mark_in_front_and_one_without_marks(
    made: Path, tmp_path: Path
) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    paths = write_sheet(found, tmp_path / "sheet.md")
    with pytest.raises(BadInput, match="none marked"):
        read_sheet(found, paths["answers"])
    row = {"sheet": found.identity, "pair": 1, "better": "A"}
    paths["answers"].write_text("\ufeff" + json.dumps(row), encoding="utf-8")
    assert len(read_sheet(found, paths["answers"])) == 1


def test_a_sheet_never_goes_over_another_file(made: Path, tmp_path: Path) -> None:
    found = read_pairs(made, *ARMS, seed=0)
    notes = tmp_path / "notes.md"
    notes.write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match=r"notes\.md"):
        write_sheet(found, notes)
    assert [file.name for file in tmp_path.glob("notes*")] == ["notes.md"]
    paths = write_sheet(found, tmp_path / "sheet.md")
    paths["answers"].unlink()  # as after a kill before it was written
    assert write_sheet(found, tmp_path / "sheet.md") == paths
    paths["answers"].rename(tmp_path / "filled.jsonl")
    with pytest.raises(BadInput, match=r"sheet\.(md|key)"):
        write_sheet(read_pairs(made, *ARMS, seed=1), tmp_path / "sheet.md")
