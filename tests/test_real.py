"""The main job on the catalog's real models (``-m real``): a gain that is reading, on real text."""

from __future__ import annotations

import json

import pytest

from kvferry.demo_data import passages
from kvferry.fitting.fidelity import score_tail, tail_loss
from kvferry.models.catalog import catalog
from kvferry.verbs.demo import BACKWARD, FORWARD, PAIR, make_ferries, map_folder

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ferries() -> dict:
    from kvferry.models.load import load_model

    for name in PAIR:
        if catalog()[name].state != "ready":
            pytest.skip(f"{name} is not on disk: run `kvferry models pull {name}`")
    small, large = (load_model(name) for name in PAIR)
    return make_ferries({n: map_folder(n) for n in (FORWARD, BACKWARD)}, small, large)


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_a_passage_s_second_half_is_likelier_after_the_handoff(ferries: dict, name: str) -> None:
    ferry = ferries[name]
    rows = passages()[:4]
    texts = [ferry.layout.context(row["passage"]) for row in rows]
    losses = {"no_context": 0.0, "transfer": 0.0, "wrong_document": 0.0, "receiver_native": 0.0}
    for index, ids in enumerate(texts):
        half = int(ids.numel()) // 2
        other = texts[index - 1]
        held = {
            "no_context": ferry.hand_over_ids(ids[:0], arm="no_context"),
            "transfer": ferry.hand_over_ids(ids[:half], arm="transfer"),
            "wrong_document": ferry.hand_over_ids(other[:half], arm="wrong_document"),
            "receiver_native": ferry.hand_over_ids(ids[:half], arm="receiver_native"),
        }
        for arm, value in held.items():
            tail = ids[half : half + 48]
            losses[arm] += tail_loss(score_tail(value, tail)[0], tail)
    benefit = losses["no_context"] - losses["receiver_native"]
    assert (losses["no_context"] - losses["transfer"]) / benefit > 0.5
    assert losses["transfer"] < losses["wrong_document"]


def test_ask_compares_arms(ferries: dict, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    from typer.testing import CliRunner

    from kvferry.cli import app

    text = tmp_path / "text.txt"
    text.write_text(passages()[0]["passage"], encoding="utf-8")
    done = CliRunner().invoke(
        app,
        [
            *("ask", "--map", str(map_folder(FORWARD)), "--context", str(text)),
            *("--question", passages()[0]["question"]),
            *("--compare", "--max-new-tokens", "8", "--json"),
        ],
    )
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert [a["arm"] for a in record["answers"]] == [
        "source_native",
        "transfer",
        "receiver_native",
        "no_context",
    ]
    assert set(record["answers"][1]["timings_ms"]) >= {"source_prefill", "map", "inject", "tail"}
