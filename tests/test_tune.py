"""The corrector: nothing at the start, learns through the frozen receiver, resumes, is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import BadInput, HashMismatch, WrongPair
from kvferry.fitting.train import TuneSettings, TuneText, kept, tune
from kvferry.maps.cache_map import CacheMap
from kvferry.maps.corrector import KINDS, Corrector, CorrectorConfig
from kvferry.running.choices import Asked
from kvferry.running.handoff import Handoff
from kvferry.running.readings import Readings
from tests.small_pair import loaded, random_map

SETTINGS = TuneSettings(
    corrector=CorrectorConfig(rank=8),
    steps=30,
    batch=4,
    learning_rate=2e-2,
    warmup=3,
    judge_every=15,
    checkpoint_every=5,
)


@pytest.fixture
def ferry() -> Handoff:
    source, receiver = loaded("qwen2", layers=2), loaded("llama", seed=1, layers=3, kv_heads=1)
    return Handoff(source, receiver, random_map(source, receiver), readings=Readings(64))


def texts(ferry: Handoff, first: int, count: int) -> list[TuneText]:
    """A context of one word over and over; the answer is that word."""
    words = ["red", "boat", "calm", "sea"]
    options = tuple(ferry.layout.continuation(word)[:1] for word in words)
    made = []
    for index in range(first, first + count):
        body = ferry.layout.context(" ".join([words[index % 4]] * (6 + index)))
        asked = tuple(Asked(ferry.layout.tail(f"{q}?"), options, index % 4) for q in ("a", "the"))
        made.append(TuneText(f"t{index}", body, asked))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [False, True])
def test_an_untrained_corrector_changes_nothing(ferry: Handoff, kind: str, gate: bool) -> None:
    config = CorrectorConfig(kind=kind, rank=3, gate=gate)  # type: ignore[arg-type]
    corrector = Corrector(config, ferry.map.shape)
    features = [torch.randn(5, ferry.map.shape.features) for _ in range(ferry.map.shape.depth)]
    mapped = ferry.map.ridge(features)
    residuals = corrector(features, mapped)
    assert residuals.keys() == mapped.keys()
    assert all(r.shape == mapped[n].shape and not r.any() for n, r in residuals.items())
    assert corrector.parameter_count >= corrector.multiply_adds > 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(ferry: Handoff, kind: str) -> None:
    corrector = Corrector(CorrectorConfig(kind=kind, rank=3, gate=True), ferry.map.shape)  # type: ignore[arg-type]
    for parameter in corrector.parameters():
        torch.nn.init.normal_(parameter)
    features = [torch.randn(5, ferry.map.shape.features) for _ in range(ferry.map.shape.depth)]
    values = corrector(features, ferry.map.ridge(features))
    torch.stack([v.square().sum() for v in values.values()]).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in corrector.parameters())


def test_placement_on_keys_values_and_layers(ferry: Handoff) -> None:
    config = CorrectorConfig(keys=False, layers=(1, 2))
    assert Corrector(config, ferry.map.shape).names == ("1.V", "2.V")


def test_within_a_standard_error_the_lower_loss_is_kept() -> None:
    def log(*rows: tuple[int, int, float]) -> list[dict[str, Any]]:
        return [
            {"correct": c, "margin": (c - w) / 100, "n": 100, "held_out_loss": loss}
            for c, w, loss in rows
        ]

    def place(rows: list[dict[str, Any]]) -> int:
        return rows.index(kept(rows))

    assert place(log((80, 10, 2.0), (78, 10, 1.0))) == 1  # two fewer of 100 are noise: 4 are one sd
    assert place(log((80, 10, 2.0), (75, 10, 1.0))) == 0
    assert place(log((80, 10, 1.0), (82, 10, 2.0))) == 0
    assert place(log((80, 10, 1.0), (90, 10, 2.0))) == 1
    assert place(log((80, 10, 2.0), (77, 10, 1.9), (82, 10, 3.0))) == 2  # the kept one fell behind
    assert place(log((80, 10, 2.0), (80, 10, 2.0))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_is_kept(ferry: Handoff, kind: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, corrector=CorrectorConfig(kind=kind, rank=8), steps=90)  # type: ignore[arg-type]
    summary = tune(ferry, texts(ferry, 0, 8), texts(ferry, 8, 4), settings, tmp_path / "run")
    assert summary["best"]["correct"] > summary["best"]["wrong_document_correct"]
    text = texts(ferry, 8, 1)[0]
    before = ferry.hand_over_ids(text.body, arm="transfer")
    assert "correct" in before.spans.ms
    ferry.map.save_pretrained(tmp_path / "map")
    again = CacheMap.from_pretrained(tmp_path / "map")
    assert again.config.corrector == settings.corrector
    assert again.identity == ferry.map.identity
    twin = Handoff(ferry.source, ferry.receiver, again)
    one = ferry.hand_over_ids(text.body, arm="transfer").cache.layers[1]
    two = twin.hand_over_ids(text.body, arm="transfer").cache.layers[1]
    assert torch.equal(one.keys, two.keys)
    bare = Handoff(ferry.source, ferry.receiver, CacheMap(again.config, again.targets))
    assert not torch.equal(
        bare.hand_over_ids(text.body, arm="transfer").cache.layers[1].keys, one.keys
    )
    path = tmp_path / "map" / "corrector.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(HashMismatch):
        CacheMap.from_pretrained(tmp_path / "map")


@pytest.mark.parametrize(
    "objective", ["answers", "receiver_kl", "source_kl", "hidden", "attention"]
)
def test_every_objective_falls(ferry: Handoff, objective: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, objectives={objective: 1.0}, judge_every=1, steps=20)
    summary = tune(ferry, texts(ferry, 0, 8), texts(ferry, 8, 2), settings, tmp_path / "run")
    losses = [row["loss"] for row in summary["log"][1:]]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_killed_run_resumes_to_the_same_result(ferry: Handoff, tmp_path: Path) -> None:
    from kvferry.fitting import train

    data = texts(ferry, 0, 8), texts(ferry, 8, 2)
    whole = tune(ferry, *data, SETTINGS, tmp_path / "whole")
    real, count = train._Run._one_step, [0]

    def dies(run: train._Run) -> None:
        count[0] += 1
        if count[0] == 18:
            raise KeyboardInterrupt
        real(run)

    ferry.map.corrector = None  # or it would be where the next run starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train._Run, "_one_step", dies)
        with pytest.raises(KeyboardInterrupt):
            tune(ferry, *data, SETTINGS, tmp_path / "cut")
    ferry.map.corrector = None
    again = tune(ferry, *data, SETTINGS, tmp_path / "cut")
    assert again == whole
    names = ("best.safetensors", "checkpoint.safetensors", "tune.json")
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_tuning_refuses(ferry: Handoff, tmp_path: Path) -> None:
    data = texts(ferry, 0, 4), texts(ferry, 8, 2)
    with pytest.raises(BadInput, match="objectives among"):
        tune(ferry, *data, replace(SETTINGS, objectives={"magic": 1.0}), tmp_path / "a")
    with pytest.raises(BadInput, match="not trained on"):
        tune(ferry, data[0], data[0][:2], SETTINGS, tmp_path / "a")
    with pytest.raises(BadInput, match="two or more held out"):
        tune(ferry, data[0], data[1][:1], SETTINGS, tmp_path / "a")
    few = replace(SETTINGS, steps=2)
    tune(ferry, *data, few, tmp_path / "a")
    with pytest.raises(WrongPair, match="another map, data or settings"):
        tune(ferry, *data, replace(few, seed=1), tmp_path / "a")


def test_check_tells_a_corrector_s_size_and_work(ferry: Handoff) -> None:
    from kvferry.fitting.estimate import corrector_parameters, map_multiply_adds
    from kvferry.models.geometry import Geometry

    ours, theirs = (Geometry.from_config(m.model.config) for m in (ferry.source, ferry.receiver))
    made = Corrector(CorrectorConfig(rank=5), ferry.map.shape)
    assert corrector_parameters(2, 5, ours, theirs) == made.parameter_count == made.multiply_adds
    assert map_multiply_adds(2, ours, theirs) == ferry.map.multiply_adds


def test_a_warm_start_matches_attention_first(ferry: Handoff, tmp_path: Path) -> None:
    data = texts(ferry, 0, 8), texts(ferry, 8, 2)
    settings = replace(SETTINGS, steps=26, warm_start=24, match_layers=(0, 2), judge_every=1)
    losses = [row["loss"] for row in tune(ferry, *data, settings, tmp_path / "run")["log"][1:]]
    assert sum(losses[16:24]) < sum(losses[:8]) < 8.0  # a relative error
    assert losses[24] > 1.0  # then cross-entropy over a vocabulary
    with pytest.raises(BadInput, match="layers to match from 0 to 2"):
        tune(ferry, *data, replace(settings, match_layers=(3,)), tmp_path / "other")


def test_recorded_attention_is_what_the_model_did(ferry: Handoff) -> None:
    from kvferry.fitting.fidelity import attention_outputs
    from kvferry.models.attention_probe import recorded_attention

    model = ferry.receiver.model
    ids = torch.arange(1, 9).view(2, 4)
    with torch.no_grad():
        plain = model(ids).logits
        with recorded_attention(model) as calls, attention_outputs(model) as outputs:
            recorded = model(ids).logits
    assert torch.equal(recorded, plain)
    assert model.config._attn_implementation == "sdpa"
    for call, output in zip(calls, outputs, strict=True):
        held = call.keys[:1, :, :2], call.values[:1, :, :2]
        assert torch.allclose(call.output()[0], output, atol=1e-6)
        assert torch.allclose(call.output_on(*held)[0], output, atol=1e-6)


def test_going_on_from_a_corrector(ferry: Handoff, tmp_path: Path) -> None:
    data = texts(ferry, 0, 8), texts(ferry, 8, 4)
    first = tune(ferry, *data, SETTINGS, tmp_path / "first")
    more = replace(SETTINGS, seed=1, steps=3)
    second = tune(ferry, *data, more, tmp_path / "second")
    start, end = second["log"][0], first["best"]
    assert (start["correct"], start["held_out_loss"]) == (end["correct"], end["held_out_loss"])
    with pytest.raises(BadInput, match="own corrector"):
        tune(ferry, *data, replace(more, corrector=CorrectorConfig(rank=2)), tmp_path / "third")


def test_a_watcher_is_told_every_step(ferry: Handoff, tmp_path: Path) -> None:
    seen: dict[int, dict[str, float]] = {}
    settings = replace(SETTINGS, steps=4, judge_every=2)
    data = texts(ferry, 0, 8), texts(ferry, 8, 2)
    tune(ferry, *data, settings, tmp_path / "run", watch=seen.__setitem__)
    assert sorted(seen) == [1, 2, 3, 4]
    assert "correct" in seen[2]
    assert "correct" not in seen[3]
