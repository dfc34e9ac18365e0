"""``kvferry bench questions`` and ``bench prompts`` on small random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput
from kvferry.judging.choice_runs import ARMS, summarise_choices, wrong_documents
from kvferry.judging.tasks.choice_text import ChoiceText, Question
from kvferry.judging.tasks.openstax import read_split
from kvferry.judging.tasks.prompts import PASSAGE_CHARS, WHOLE, read_prompts, split_request
from kvferry.maps.cache_map import CacheMap
from kvferry.provenance import read_json, read_records
from tests.benchmark_data import write_prompts, write_textbooks
from tests.saved_pair import save_pair

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    write_textbooks(folder / "data")
    write_prompts(folder / "data")
    return folder


def run(*arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def questions(root: Path, out: Path, *more: Any) -> dict[str, Any]:
    where = ["--map", root / "map", "--data", root / "data", "--out", out]
    return run("bench", "questions", *where, *more)


def prompts(root: Path, out: Path, *more: Any) -> dict[str, Any]:
    where = ["--map", root / "map", "--data", root / "data", "--out", out]
    return run("bench", "prompts", *where, "-n", 4, "--max-new-tokens", 6, *more)


def test_questions_in_every_arm(root: Path, tmp_path: Path) -> None:
    summary = questions(root, tmp_path / "run")
    entry = summary["maps"]["map"]["test"]
    assert entry["n"] == entry["by_sum"]["n"] == 6
    assert set(entry["arms"]) == set(ARMS)
    assert sum(kind["n"] for kind in entry["by_kind"].values()) == 6
    assert summarise_choices(tmp_path / "run") == summary
    counts = summary["arguments"]["questions"]
    assert counts["left_out"] == {
        "answer not found in the section": 3,
        "asks for what is not so": 3,
        "options speak of other options": 3,
    }
    lengths = set()
    for row in read_records(tmp_path / "run" / "records.jsonl"):
        for arm in ARMS:
            for place, sums in enumerate(row["sums"][arm]):
                sizes = row["option_tokens"][place]
                lengths |= set(sizes)
                assert row["chosen_sum"][arm][place] == sums.index(max(sums))
                means = [total / size for total, size in zip(sums, sizes, strict=True)]
                assert means[row["chosen"][arm][place]] == pytest.approx(max(means), abs=1e-4)
    assert len(lengths) > 1


def test_questions_resume_and_refuse_another_cue(root: Path, tmp_path: Path) -> None:
    summary = questions(root, tmp_path / "run", "-n", 4, "--cue", "It is")
    assert summary["arguments"]["cue"] == "It is"
    records = tmp_path / "run" / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    assert questions(root, tmp_path / "run", "-n", 4, "--cue", "It is") == summary
    assert records.read_bytes() == whole
    where = ["--map", str(root / "map"), "--data", str(root / "data"), "-n", "4"]
    done = CliRunner().invoke(app, ["bench", "questions", *where, "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, BadInput)


def test_questions_print_both_ways_to_choose(root: Path, tmp_path: Path) -> None:
    where = ["--map", str(root / "map"), "--data", str(root / "data"), "-n", "4"]
    done = CliRunner().invoke(app, ["bench", "questions", *where, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.exception
    assert "by sum" in done.stdout
    assert "uncontested" in done.stdout


def test_a_wrong_document_is_of_another_group_and_without_the_answer() -> None:
    def text(name: str, group: str, context: str, answer: str) -> ChoiceText:
        return ChoiceText(name, context, (Question("?", "", (answer, "no"), 0),), group)

    texts = [
        text("a", "one", "The mill grinds.", "mill"),
        text("b", "two", "A dog by the mills.", "dog"),
        text("c", "one", "The wheel turns.", "wheel"),
        text("d", "three", "Rain falls.", "rain"),
    ]
    assert wrong_documents(texts) == [3, 0, 1, 2]
    assert wrong_documents([texts[0], texts[2], texts[3]]) == [2, 2, 1]
    with pytest.raises(BadInput, match="wrong document"):
        wrong_documents([texts[0], texts[1]])
    plain = [ChoiceText("a", "x", ()), ChoiceText("b", "x", ())]
    assert wrong_documents(plain) == [1, 0]


def test_how_a_request_becomes_context_and_question() -> None:
    long = "x" * PASSAGE_CHARS
    assert split_request(f"Do it:\n{long}") == (long, "Do it:")
    assert split_request(f"Do it:\n{long[1:]}") is None
    assert split_request("Read.\nA is B.\nQuestion: Who?") == ("Read.\nA is B.", "Who?")
    assert split_request("Question: Who?") is None


def test_prompts_take_turns_and_repeat_none(root: Path) -> None:
    found = read_prompts(root / "data", 6)
    assert [prompt.id for prompt in found] == [
        "mt_bench/82",
        "mt_bench/101",
        "vicuna/1",
        "mt_bench/81",
        "vicuna/3",
        "mt_bench/83",
    ]
    assert [prompt.whole for prompt in found] == [False, False, True, True, True, True]
    assert found[2].question == WHOLE
    with pytest.raises(BadInput, match="6 different"):
        read_prompts(root / "data", 7)
    with pytest.raises(BadInput, match="mt_bench"):
        read_prompts(root, 2)


def test_the_real_prompts() -> None:
    if not (DATA / "mt_bench").is_dir():
        pytest.skip("the prompts (../shared/data) aren't beside this checkout")
    found = read_prompts(DATA, 40)
    assert len({prompt.request for prompt in found}) == 40
    assert len({(prompt.id.split("/")[0], prompt.category) for prompt in found}) == 17
    assert sum(not prompt.whole for prompt in found) == 8


def test_answers_in_every_arm_resume(root: Path, tmp_path: Path) -> None:
    summary = prompts(root, tmp_path / "run")
    arms = summary["maps"]["map"]
    assert set(arms) == set(ARMS)
    assert all(entry["n"] == 4 for entry in arms.values())
    records = tmp_path / "run" / "records.jsonl"
    rows = read_records(records)
    assert {row["prompt_id"] for row in rows} == {
        prompt["id"] for prompt in read_json(tmp_path / "run" / "header.json")["prompts"]
    }
    assert all(len(row["token_ids"]) <= 6 and row["ttft_ms"] > 0 for row in rows)
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    again = prompts(root, tmp_path / "run")
    assert {name: entry["mean_tokens"] for name, entry in again["maps"]["map"].items()} == {
        name: entry["mean_tokens"] for name, entry in arms.items()
    }
    texts = {(row["prompt_id"], row["arm"]): row["text"] for row in rows}
    for row in read_records(records):
        assert row["text"] == texts[row["prompt_id"], row["arm"]]


def test_arms_can_be_added_and_own_answers_are_generated_once(root: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in (root / "map").iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    first = prompts(root, tmp_path / "run", "--map", twin, "--arms", "receiver_native")
    assert set(first["maps"]["map"]) == {"receiver_native"}
    both = prompts(root, tmp_path / "run", "--map", twin, "--arms", "transfer,receiver_native")
    assert set(both["maps"]["twin"]) == {"receiver_native", "transfer"}
    copied = [row["copied"] for row in read_records(tmp_path / "run" / "records.jsonl")]
    assert copied.count(True) == 4
    where = ["--map", str(root / "map"), "--data", str(root / "data"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "prompts", *where, "--arms", "magic"])
    assert isinstance(done.exception, BadInput)


def test_an_arm_that_is_named_twice_is_asked_once(root: Path, tmp_path: Path) -> None:
    found = prompts(root, tmp_path / "run", "--arms", "transfer,transfer")
    assert found["maps"]["map"]["transfer"]["n"] == 4


def test_own_answers_are_not_shared_between_precisions(root: Path, tmp_path: Path) -> None:
    rounded = CacheMap.from_pretrained(root / "map")
    side = rounded.config.receiver.model_copy(update={"cache": "fp8"})
    rounded.config = rounded.config.model_copy(update={"receiver": side})
    rounded.save_pretrained(tmp_path / "rounded")
    more = ["--map", tmp_path / "rounded", "--arms", "receiver_native"]
    prompts(root, tmp_path / "run", *more)
    rows = read_records(tmp_path / "run" / "records.jsonl")
    assert len(rows) == 8
    assert not any(row["copied"] for row in rows)


@pytest.mark.parametrize(
    "change",
    [
        {"turns": "Write a poem"},
        {"turns": [5]},
        {"turns": ["half of a pair: \ud800"]},
        {"question_id": 1},
    ],
)
def test_prompts_that_are_none(root: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    path = tmp_path / "data" / "mt_bench" / "mt_bench_question.jsonl"
    rows = [json.loads(line) | change for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(BadInput, match=r"question\.jsonl:[12]"):
        read_prompts(tmp_path / "data", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"module": [1]},
        {"options": 5},
        {"options": "abcd"},
        {"question": 5},
        {"question": ""},
        {"answer": ["A"]},
        {"id": "same"},
        {"question": "Where \ud800?"},
    ],
)
def test_review_questions_that_are_none(root: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    path = tmp_path / "data" / "openstax_mcq" / "anatomy_physiology.jsonl"
    rows = [json.loads(line) | change for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(BadInput, match=r"physiology\.jsonl:\d+"):
        read_split(tmp_path / "data", "test")
