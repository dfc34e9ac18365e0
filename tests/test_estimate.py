"""Sizes and times: bounds that hold, bytes as on disk, rates as measured, and the doc's figures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvferry.fitting import estimate
from kvferry.fitting.capture import CaptureSettings
from kvferry.fitting.check import check_pair
from kvferry.fitting.check_costs import estimate_capture
from kvferry.fitting.estimate import Rates
from kvferry.fitting.moments import Moments, moments_bytes, pairs_needed, target_key
from kvferry.maps.cache_map import Stored, _pack
from kvferry.maps.linear import LinearTarget
from kvferry.models.geometry import Geometry
from kvferry.models.light import LightModel, read_light
from tests.light_models import qwen3, qwen3_14b, qwen3_32b, save

DOC = Path(__file__).parents[1] / "docs" / "large-pairs.md"
STATED = Rates(400_000.0, 1_000.0, "stated")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "int8"])
def test_map_bytes_are_those_of_the_tensors(stored: Stored) -> None:
    ours = Geometry.from_config(qwen3())
    theirs = Geometry.from_config(qwen3(num_hidden_layers=3, head_dim=24))
    target = LinearTarget((0, 2), torch.rand(128, 48), torch.zeros(48))
    one = sum(tensor.nbytes for tensor in _pack("0.K", target, stored).values())
    assert estimate.map_bytes(2, ours, theirs, stored) == 6 * one
    assert estimate.map_bytes(9, ours, theirs, stored) == estimate.map_bytes(
        4, ours, theirs, stored
    )


def test_moments_bound_holds_and_is_reached() -> None:
    ours = Geometry.from_config(qwen3(num_hidden_layers=7))
    theirs = Geometry.from_config(qwen3(num_hidden_layers=5, head_dim=24))
    f, w = estimate.feature_width(ours), estimate.target_width(theirs)
    names = [target_key(i, t) for i in range(5) for t in "KV"]
    draw = random.Random(5)
    for k in range(1, 9):
        bound = estimate.moments_bound_bytes(k, ours, theirs, splits=1)
        for _ in range(20):
            plan = {name: draw.sample(range(7), min(k, 7)) for name in names}
            assert moments_bytes(plan, f, w) <= bound
    everything = {name: list(range(7)) for name in names}
    exact = moments_bytes(everything, f, w)
    assert exact == estimate.moments_bound_bytes(7, ours, theirs, splits=1)
    held = Moments.empty(everything, f, w)
    assert exact == sum(t.nbytes for t in (*held.gram.values(), *held.cross.values()))


def test_reading_rate_matches_what_was_measured() -> None:
    from transformers import Qwen2Config

    def side(hidden: int, inner: int, depth: int, heads: int) -> tuple[Geometry, int]:
        config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=2,
            vocab_size=151_936,
            tie_word_embeddings=True,
        )
        geometry = Geometry.from_config(config)
        return geometry, geometry.parameters - 151_936 * hidden

    small, large = side(896, 4864, 24, 14), side(1536, 8960, 28, 12)
    reached = 160e9 * estimate.READ_EFFICIENCY
    alone = reached / estimate.read_flops(*small, 512)
    both = reached / (estimate.read_flops(*small, 512) + estimate.read_flops(*large, 512))
    assert alone == pytest.approx(240, rel=0.08)
    assert both == pytest.approx(50, rel=0.02)


def test_rates_are_measured() -> None:
    rates = estimate.measure_rates(seconds=0.01)
    assert rates.model_gflops > 0
    assert rates.float64_gflops > 0
    assert "measured now" in rates.basis


@pytest.fixture(scope="module")
def qwen_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LightModel, LightModel]:
    """Qwen3-14B and 32B as configs alone; no figure below depends on the tokenizer."""
    base = tmp_path_factory.mktemp("large")
    source = read_light(str(save(base / "14b", qwen3_14b())))
    return source, read_light(str(save(base / "32b", qwen3_32b())))


def _nearest(k: int, source_depth: int, receiver_depth: int) -> dict[str, list[int]]:
    """A plan in which every target takes the k source layers at its own relative depth."""
    plan = {}
    for layer in range(receiver_depth):
        middle = layer * (source_depth - 1) / (receiver_depth - 1)
        near = sorted(range(source_depth), key=lambda i: (abs(i - middle), i))[:k]
        plan.update({target_key(layer, kind): near for kind in "KV"})
    return plan


def size_line(k: int, ours: Geometry, theirs: Geometry) -> str:
    sizes = [estimate.map_bytes(k, ours, theirs, s) for s in ("float32", "bfloat16", "int8")]
    features = k * estimate.feature_width(ours)
    cells = [str(k), str(features), *(f"{size / 1e9:.2f}" for size in sizes)]
    return f"| {' | '.join(cells)} |"


def moments_line(k: int, ours: Geometry, theirs: Geometry) -> str:
    f, w = estimate.feature_width(ours), estimate.target_width(theirs)
    plan = _nearest(k, ours.depth, theirs.depth)
    near_blocks = sum(len(js) for js in pairs_needed(plan).values())
    cells = (
        str(k),
        str(estimate.pairs_bound(k, ours, theirs)),
        f"{estimate.moments_bound_bytes(k, ours, theirs) / 1e9:.1f}",
        str(near_blocks),
        f"{3 * moments_bytes(plan, f, w) / 1e9:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def memory_line(gigabytes: int, ours: Geometry, theirs: Geometry) -> str:
    def near(k: int) -> int:
        f, w = estimate.feature_width(ours), estimate.target_width(theirs)
        return 3 * moments_bytes(_nearest(k, ours.depth, theirs.depth), f, w)

    limit = gigabytes * 10**9
    sure = estimate.largest_k(limit, 8, lambda k: estimate.moments_bound_bytes(k, ours, theirs))
    likely = estimate.largest_k(limit, 8, near)
    return f"| {gigabytes}GB | {sure or 'none'} | {likely or 'none'} |"


def time_line(k: int, source: LightModel, receiver: LightModel) -> str:
    settings = CaptureSettings(k_max=k, memory_bytes=10**15)
    need = estimate_capture(source, receiver, settings, 0, STATED, "cuda")
    cells = (
        str(k),
        f"{need.read_s / 60:.1f}",
        f"{need.moments_s / 60:.0f}",
        f"{need.choose_s / 60:.1f}",
        f"{need.fit_s / 60:.0f}",
        f"{need.fit_bytes / 1e9:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def fixed_figures(source: LightModel, receiver: LightModel) -> dict[str, str]:
    """Figures that the doc's text states, by what they are."""
    ours, theirs = source.geometry, receiver.geometry
    assert ours is not None
    assert theirs is not None
    settings = CaptureSettings()
    need = estimate_capture(source, receiver, settings, 0, STATED, "cuda")
    least = estimate.moments_bound_bytes(1, ours, theirs) / 1e9
    flops = estimate.read_flops(ours, source.body_parameters, 512)
    flops += estimate.read_flops(theirs, receiver.body_parameters, 512)
    probe_texts = settings.probe_texts + settings.probe_texts // 2
    probe_rows = probe_texts * settings.chunk_tokens
    return {
        "parameters": f"{source.parameters / 1e9:.2f} and {receiver.parameters / 1e9:.2f} billion",
        "weights": f"{need.models_bytes / 1e9:.1f} GB in bfloat16",
        "source cache": f"{ours.bytes_per_token(2) / 1e3:.0f} KB",
        "receiver cache": f"{theirs.bytes_per_token(2) / 1e3:.0f} KB",
        "least moments": f"{least:.1f} GB",
        "probe": f"{estimate.probe_bytes(probe_rows, ours, theirs) / 1e9:.1f} GB",
        "probe rows": f"{probe_rows} rows",
        "read": f"{flops / 1e9:.0f} GFLOP a token",
        "rows": f"{need.rows} rows",
        "moments flops": f"{estimate.moments_flops(4, ours, theirs) / 1e9:.1f} GFLOP a row",
    }


def test_the_doc_states_what_the_functions_give(qwen_pair: tuple[LightModel, LightModel]) -> None:
    text = DOC.read_text(encoding="utf-8")
    source, receiver = qwen_pair
    ours, theirs = source.geometry, receiver.geometry
    assert ours is not None
    assert theirs is not None
    lines = [make(k, ours, theirs) for k in range(1, 9) for make in (size_line, moments_line)]
    lines += [memory_line(size, ours, theirs) for size in (8, 16, 32, 64, 128, 256)]
    lines += [time_line(k, source, receiver) for k in (1, 2, 4, 6, 8)]
    missing = [line for line in lines if line not in text.splitlines()]
    assert not missing, "\n".join(missing)
    flat = " ".join(text.split())
    for what, figure in fixed_figures(source, receiver).items():
        assert figure in flat, (what, figure)


def test_the_large_pair_is_ready_with_limits(qwen_pair: tuple[LightModel, LightModel]) -> None:
    report = check_pair(
        *qwen_pair, CaptureSettings(), device="cuda", rates=STATED, free_bytes=10**12
    )
    assert report.verdict == "ready with limits"
    said = " ".join(reason.text for reason in report.reasons)
    assert "may not hold even k = 1" in said
    assert "no map of this pair is below 20 MB" in said
