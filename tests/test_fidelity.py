"""``kvferry measure``: an identity map recovers everything; a cut run goes on to the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.errors import BadInput
from kvferry.fitting.corpus import read_corpus
from kvferry.fitting.fidelity import FidelitySettings, measure, pick, summarise
from kvferry.running.handoff import Handoff
from kvferry.running.readings import Readings
from tests.small_pair import identity_map, loaded, random_map
from tests.test_capture import write_texts

SETTINGS = FidelitySettings(context_tokens=48, target_tokens=8, resamples=200)


@pytest.fixture(scope="module")
def ferries() -> dict[str, Handoff]:
    model, other = loaded("qwen2", layers=2), loaded("llama", seed=1)
    readings = Readings(16)
    return {
        "same": Handoff(model, model, identity_map(model), readings=readings),
        "random": Handoff(model, other, random_map(model, other), readings=readings),
    }


def run(ferries: dict[str, Handoff], texts: Path, folder: Path) -> dict:  # type: ignore[type-arg]
    documents = read_corpus([str(texts)]).documents
    chosen = pick(ferries["same"], documents, 4, SETTINGS)
    return measure(ferries, chosen, SETTINGS, folder, label="texts", arguments={})


def test_an_identity_map_recovers_everything(ferries: dict[str, Handoff], tmp_path: Path) -> None:
    summary = run(ferries, write_texts(tmp_path, 12), tmp_path / "out")
    same = summary["maps"]["same"]
    assert same["n"] == 4
    assert same["recovered"]["transfer"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert same["top1_agreement"]["transfer"] == 1.0
    assert same["attention_cosine"]["transfer"] == pytest.approx(1.0, abs=1e-5)
    # The wrong document handed over is the wrong document read natively, here.
    recovered = same["recovered"]
    assert recovered["wrong_document"]["value"] == pytest.approx(
        recovered["receiver_native_wrong_document"]["value"], abs=1e-3
    )
    # Other weights and a map of noise don't.
    assert summary["maps"]["random"]["top1_agreement"]["transfer"] < 1.0


def test_a_cut_run_goes_on_to_the_same_summary(ferries: dict[str, Handoff], tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 12)
    whole = run(ferries, texts, tmp_path / "whole")
    run(ferries, texts, tmp_path / "cut")
    records = tmp_path / "cut" / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:3]) + lines[3][:40])
    assert run(ferries, texts, tmp_path / "cut") == whole
    assert len([json.loads(line) for line in records.read_text().splitlines()]) == len(lines)
    assert summarise(tmp_path / "cut") == whole


def test_a_folder_of_another_measurement(ferries: dict[str, Handoff], tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 12)
    run(ferries, texts, tmp_path / "out")
    with pytest.raises(BadInput, match="a run with other maps"):
        run({"same": ferries["same"]}, texts, tmp_path / "out")


def test_too_few_long_texts(ferries: dict[str, Handoff], tmp_path: Path) -> None:
    documents = read_corpus([str(write_texts(tmp_path, 12))]).documents
    with pytest.raises(BadInput, match="at least two documents"):
        pick(ferries["same"], documents, 4, FidelitySettings(context_tokens=10_000))
