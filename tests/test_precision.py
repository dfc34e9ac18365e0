"""Models served in other precisions: rounding, capture, maps that refuse, the command line."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import precision_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput, NotFinite, WrongPair
from kvferry.fitting.build import build_map
from kvferry.fitting.capture import CaptureSettings, capture
from kvferry.fitting.capture_store import merge_captures
from kvferry.fitting.corpus import read_corpus
from kvferry.fitting.ridge import FitSettings, fit
from kvferry.maps.cache_map import CacheMap, MapSide
from kvferry.models.cache import entries, forward, read, require_finite
from kvferry.models.cache_precision import (
    FP8_MAX,
    KINDS,
    RoundedLayer,
    bytes_per_token,
    empty_cache,
    kind_of,
    round_cache,
    round_entries,
)
from kvferry.models.load import load_model
from kvferry.models.precision import CACHES, Precision
from kvferry.models.quantise import weight_bytes
from kvferry.provenance import read_json
from kvferry.running.decode import Sampling
from kvferry.running.handoff import Handoff
from kvferry.running.readings import Readings
from tests import small_pair, tiny
from tests.saved_pair import save_pair

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao (extra quant)")
ROUNDING = ("bfloat16", "float16", "int8", "fp8", "fp8_per_token_head")
SHIPPED = Path(__file__).resolve().parent.parent / "src" / "kvferry" / "shipped_maps"


# Rounding


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ROUNDING), st.integers(0, 2**31), st.sampled_from([1e-2, 1.0, 30.0]))
def test_rounding_errors_are_bounded(kind: str, seed: int, size: float) -> None:
    x = size * torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(seed))
    error = (round_entries(x, kind) - x).abs()
    greatest = x.abs().amax(-1, keepdim=True)
    bound = {
        "bfloat16": x.abs() * 2.0**-8,
        "float16": x.abs() * 2.0**-11 + 2.0**-25,
        "int8": greatest / 127 / 2,
        # three bits behind the leading one; below 2^-6 steps of 2^-9
        "fp8": (x.abs() * 2.0**-4).clamp_min(2.0**-10),
        "fp8_per_token_head": (x.abs() * 2.0**-4)
        .clamp_min(2.0**-10)
        .maximum(greatest / FP8_MAX * 2.0**-10),
    }[kind]
    assert bool((error <= bound * (1 + 1e-5) + 1e-12).all())


@pytest.mark.parametrize("kind", CACHES)
def test_rounded_entries_stay_as_they_are(kind: str) -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    once = round_entries(x, kind)
    torch.testing.assert_close(round_entries(once, kind), once, rtol=1e-6, atol=0)
    assert once.dtype == x.dtype
    assert round_entries(x.bfloat16(), kind).dtype == torch.bfloat16
    assert not bool(round_entries(torch.zeros(1, 8), kind).any())
    for broken in (float("nan"), float("inf")):
        assert not bool(torch.isfinite(round_entries(torch.full((1, 8), broken), kind)).any())


def test_fp8_saturates_and_scaled_fp8_does_not() -> None:
    x = torch.tensor([[1000.0, -1000.0, 3.0, 0.0]])
    assert round_entries(x, "fp8").tolist() == [[448.0, -448.0, 3.0, 0.0]]
    scaled = round_entries(x, "fp8_per_token_head")
    torch.testing.assert_close(scaled, x, rtol=0.04, atol=0)


@pytest.mark.parametrize("kind", ROUNDING)
def test_a_token_is_rounded_by_itself_and_gradients_pass(kind: str) -> None:
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    whole = round_entries(x, kind)
    pieces = torch.cat([round_entries(p, kind) for p in x.split(2, dim=-2)], dim=-2)
    assert torch.equal(whole, pieces)
    (gradient,) = torch.autograd.grad((3 * whole).sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 3.0))


def test_what_an_engine_would_keep() -> None:
    assert bytes_per_token(2, 64, 24, "float32") == 4 * bytes_per_token(2, 64, 24, "fp8")
    assert bytes_per_token(2, 64, 24, "int8") == 2 * 24 * 2 * (64 + 4)
    assert set(KINDS) == set(CACHES)


# Models with a rounded cache


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_model_reads_the_same_in_pieces(kind: str) -> None:
    model = tiny.loaded("qwen2").model
    ids, places = torch.arange(5, 37)[None], torch.arange(32)[None]
    with torch.no_grad():
        _, whole = forward(model, ids, places, kind=kind)
        _, part = forward(model, ids[:, :20], places[:, :20], kind=kind)
        _, part = forward(model, ids[:, 20:], places[:, 20:], cache=part)
        _, plain = forward(model, ids, places)
    assert kind_of(whole) == kind_of(part) == kind
    assert kind_of(plain) is None
    after = round_cache(model, plain, kind)
    for layer, (one, two) in enumerate(zip(entries(whole), entries(part), strict=True)):
        for a, b in zip(one, two, strict=True):
            assert float((a - b).norm() / a.norm()) < 0.02  # sums differ, then a step
            torch.testing.assert_close(round_entries(a, kind), a, rtol=1e-5, atol=1e-6)
        if layer == 0:  # later layers have read rounded ones
            torch.testing.assert_close(entries(after)[0][0], one[0])
    assert not torch.equal(entries(whole)[1][0], entries(plain)[1][0])


def test_keys_are_rounded_after_rope() -> None:
    one = tiny.loaded("llama")
    ids, places = torch.arange(5, 25), torch.arange(20)
    canonical = read(one.model, ids, places, "x", kind="int8")
    _, cache = forward(one.model, ids[None], places[None], kind="int8")
    keys = entries(cache)[0][0]
    levels = keys / (keys.abs().amax(-1, keepdim=True) / 127)
    assert float((levels - levels.round()).abs().max()) < 1e-3
    free = canonical.layers[0].keys
    levels = free / (free.abs().amax(-1, keepdim=True) / 127)
    assert float((levels - levels.round()).abs().max()) > 0.1


def test_infinity_is_noticed_and_not_saturated() -> None:
    one = tiny.build("llama")
    weight = one.model.get_decoder().layers[0].self_attn.v_proj.weight
    weight.data[0] = float("inf")
    with pytest.raises(NotFinite):
        require_finite(read(one.model, torch.arange(5, 9), torch.arange(4), "x", kind="fp8"), "it")


def served(name: str, seed: int = 0, cache: str | None = None) -> Any:
    return replace(tiny.loaded(name, seed), cache=cache)


def test_the_handoff_rounds_what_is_read_and_what_is_injected() -> None:
    source, receiver = tiny.loaded("qwen2"), tiny.loaded("llama", 1)
    made = tiny.random_map(source, receiver)
    plain = Handoff(source, receiver, made)
    rounded = Handoff(
        served("qwen2", cache="fp8"),
        served("llama", 1, cache="int8"),
        made,
        allow_other_precision=True,
    )
    greedy = Sampling(4)
    for arm in ("source_native", "transfer", "receiver_native", "no_context"):
        held = rounded.hand_over(tiny.CONTEXT, arm=arm)  # type: ignore[arg-type]
        kind = "fp8" if arm == "source_native" else "int8"
        assert all(isinstance(layer, RoundedLayer) for layer in held.cache.layers)
        for keys, values in entries(held.cache):
            for x in (keys, values):
                torch.testing.assert_close(round_entries(x, kind), x, rtol=1e-5, atol=1e-6)
        asked = rounded.with_question(held, "When?")
        assert kind_of(asked.cache) == kind
        assert rounded.answer(held, ["When?", "Who is late?"], sampling=greedy)
        assert held.identity != plain.hand_over(tiny.CONTEXT, arm=arm).identity  # type: ignore[arg-type]
    one = plain.hand_over(tiny.CONTEXT)
    two = Handoff(
        served("qwen2", cache="fp8"), receiver, made, allow_other_precision=True
    ).hand_over(tiny.CONTEXT)
    assert kind_of(two.cache) is None
    assert not torch.equal(entries(one.cache)[0][1], entries(two.cache)[0][1])
    assert plain.rounding == {}
    assert rounded.rounding["precision"]["source"] == "float32 weights, fp8 cache"


def test_readings_tell_cache_precisions_apart() -> None:
    readings = Readings(8)
    body = torch.arange(5, 30)
    made = tiny.identity_map(tiny.loaded("qwen2"))
    kinds = []
    for cache in (None, "int8", None):
        one = served("qwen2", cache=cache)
        ferry = Handoff(one, one, made, readings=readings, allow_other_precision=True)
        kinds.append(kind_of(ferry.read(one, body).cache))
    assert kinds == [None, "int8", None]


def test_a_mapped_cache_stays_differentiable() -> None:
    one = served("qwen2", cache="int8")
    made = tiny.identity_map(one)
    ferry = Handoff(one, one, made, allow_other_precision=True)
    body = torch.arange(5, 30)
    with torch.no_grad():
        canonical = ferry.canonical(ferry.read(one, body).cache, body)
    weight = ferry.map.targets["0.K"].weight
    weight.requires_grad_(True)
    try:
        logits, _ = forward(
            one.model,
            torch.tensor([[7, 8]]),
            torch.tensor([[60, 61]]),
            cache=ferry.inject(ferry.map_cache(canonical)),
            logits=1,
        )
        assert logits is not None
        torch.autograd.backward(logits.square().sum())
        assert weight.grad is not None
        assert float(weight.grad.abs().sum()) > 0
    finally:
        weight.requires_grad_(False)


# Maps


def test_old_maps_load_and_keep_their_hashes(tmp_path: Path) -> None:
    for folder in sorted(p.parent for p in SHIPPED.glob("*/map.json")):
        config = CacheMap.from_pretrained(folder).config
        raw = read_json(folder / "map.json")
        assert config.model_dump(exclude={"config_sha256"}) == {
            **config.model_dump(exclude={"config_sha256"}),
            "source": raw["source"],
            "receiver": raw["receiver"],
        }
        assert config.source.precision == Precision("float32", "float32")
        if config.config_sha256 is not None:
            assert config.config_sha256 == config.digest
    side = MapSide(spec="a", revision="b", dtype="float32", geometry={})
    assert side.model_dump() == {"spec": "a", "revision": "b", "dtype": "float32", "geometry": {}}


def test_a_map_refuses_other_precisions_unless_told(tmp_path: Path) -> None:
    plain = tiny.loaded("qwen2")
    rounded = served("qwen2", cache="int8")
    made = tiny.identity_map(plain)
    with pytest.raises(WrongPair, match="--allow-other-precision"):
        Handoff(rounded, plain, made)
    with pytest.raises(WrongPair, match="receiver"):
        Handoff(plain, rounded, made)
    assert Handoff(plain, rounded, made, allow_other_precision=True)
    of_int8 = CacheMap(
        made.config.model_copy(
            update={"receiver": made.config.receiver.model_copy(update={"cache": "int8"})}
        ),
        made.targets,
    )
    assert Handoff(plain, rounded, of_int8)
    with pytest.raises(WrongPair, match="int8 cache"):
        Handoff(plain, plain, of_int8)
    assert of_int8.identity != made.identity
    of_int8.save_pretrained(tmp_path)
    again = CacheMap.from_pretrained(tmp_path)
    assert again.config.receiver.precision == Precision("float32", "int8")
    assert again.identity == of_int8.identity
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "float32 weights, int8 cache" in card


# Capture and fit


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("texts") / "prose.jsonl"
    lines = [
        json.dumps({"text": f"In {y} the mill by the river ground {y // 7} sacks. " * 3})
        for y in range(60)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_corpus([str(path)])


def captured(texts: Any, folder: Path, cache: str | None, shard: tuple[int, int] = (0, 1)) -> Any:
    settings = CaptureSettings(tokens=1500, chunk_tokens=64, k_max=2, probe_texts=4, shard=shard)
    return capture(
        replace(small_pair.loaded("qwen2", layers=2), cache=cache),
        replace(small_pair.loaded("llama", seed=1, kv_heads=1), cache=cache),
        texts,
        settings,
        folder,
    )


def test_a_capture_of_rounded_caches_is_another_and_reproducible(
    texts: Any, tmp_path: Path
) -> None:
    plain = captured(texts, tmp_path / "plain", None)
    first = captured(texts, tmp_path / "first", "int8")
    second = captured(texts, tmp_path / "second", "int8")
    assert first["moments_sha256"] == second["moments_sha256"] != plain["moments_sha256"]
    assert first["source"]["cache"] == first["receiver"]["cache"] == "int8"
    assert "cache" not in plain["source"]
    with pytest.raises(WrongPair):
        captured(texts, tmp_path / "plain", "int8")
    with pytest.raises(WrongPair, match="source"):
        merge_captures([tmp_path / "plain", tmp_path / "first"], tmp_path / "merged")
    made = build_map(fit(tmp_path / "first", FitSettings(k_key=2, k_value=2)))
    assert made.config.source.precision == Precision("float32", "int8")
    made.save_pretrained(tmp_path / "map")
    assert CacheMap.from_pretrained(tmp_path / "map").config.receiver.cache == "int8"


# Loading and the command line


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    sentences = [f"In {y} the mill by the river ground {y // 7} sacks." for y in range(900)]
    rows = [{"text": " ".join(sentences[i : i + 12])} for i in range(0, 880, 8)]
    (folder / "prose.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "text.txt").write_text(rows[0]["text"], encoding="utf-8")
    return folder


def run(*arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_loading_refuses(root: Path) -> None:
    folder = str(root / "source")
    for more in (
        {"precision": "int3"},
        {"cache": "fp4"},
        {"precision": "bfloat16", "dtype": "float32"},
        {"precision": "bfloat16", "cache": "float32"},
    ):
        with pytest.raises(BadInput):
            load_model(folder, **more)
    half = load_model(folder, precision="bfloat16")
    assert half.precision == Precision("bfloat16", "bfloat16")
    assert half.cache is None
    assert load_model(folder, cache="float32").cache is None
    assert load_model(folder, cache="bfloat16").precision == Precision("float32", "bfloat16")


def test_a_missing_library_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(BadInput) as caught:
        load_model(str(root / "source"), precision="int8")
    assert "kvferry[quant]" in caught.value.next_step
    ask = ["ask", "--map", root / "map", "--context", root / "text.txt", *ASK]
    done = CliRunner().invoke(app, [*map(str, ask), "--receiver-precision", "int4"])
    assert isinstance(done.exception, BadInput)
    assert "kvferry[quant]" in done.exception.next_step


ASK = ("--question", "How many sacks?", "--max-new-tokens", 2)


def test_verbs_take_the_map_s_precision_or_are_told(root: Path, tmp_path: Path) -> None:
    ask = ["ask", "--map", root / "map", "--context", root / "text.txt", *ASK]
    run(*ask)
    done = CliRunner().invoke(app, [*map(str, ask), "--receiver-cache", "int8"])
    assert isinstance(done.exception, WrongPair)
    run(*ask, "--receiver-cache", "int8", "--source-cache", "fp8", "--allow-other-precision")
    done = CliRunner().invoke(app, [*map(str, ask), "--receiver-cache", "int5"])
    assert isinstance(done.exception, BadInput)
    other = ["--receiver-cache", "int8", "--source-precision", "bfloat16"]
    facts = [
        "bench",
        "facts",
        "--map",
        root / "map",
        "--out",
        tmp_path / "f",
        "-n",
        2,
        "--parts",
        "seen",
    ]
    run(*facts, *other, "--allow-other-precision")
    header = read_json(tmp_path / "f" / "header.json")
    assert header["maps"]["map"]["precision"]["source"] == "bfloat16 weights, bfloat16 cache"
    assert header["maps"]["map"]["precision"]["receiver"] == "float32 weights, int8 cache"
    measure = ["measure", "--map", root / "map", "--corpus", root / "prose.jsonl", "-n", 2]
    measure += ["--context-tokens", 64, "--target-tokens", 8, "--out", tmp_path / "m"]
    run(*measure, "--receiver-cache", "fp8", "--allow-other-precision")
    done = CliRunner().invoke(app, [*map(str, measure), "--json"])
    assert isinstance(done.exception, (BadInput, WrongPair)), "records of two precisions mixed"


def test_capture_fit_and_tune_at_one_precision(root: Path, tmp_path: Path) -> None:
    at = ["--source-cache", "int8", "--receiver-cache", "fp8"]
    run(
        *("capture", root / "source", root / "receiver", "--corpus", root / "prose.jsonl"),
        *("--out", tmp_path / "c", "--tokens", 1500, "--chunk-tokens", 64, "--k-max", 1, *at),
    )
    run("fit", tmp_path / "c", "--out", tmp_path / "map")
    config = CacheMap.from_pretrained(tmp_path / "map").config
    assert (config.source.cache, config.receiver.cache) == ("int8", "fp8")
    where = ["--source", root / "source", "--receiver", root / "receiver"]
    ask = ["ask", "--map", tmp_path / "map", "--context", root / "text.txt", *ASK, *where]
    run(*ask)  # at the map's own precision, nothing to be said
    done = CliRunner().invoke(app, [*map(str, ask), "--source-cache", "float32"])
    assert isinstance(done.exception, WrongPair)
    short = ["--steps", 2, "--rank", 2, "--judge-every", 2, "--held-out", 2, "--data", "facts:2"]
    run("tune", tmp_path / "map", "--out", tmp_path / "t", *short, *where)
    assert CacheMap.from_pretrained(tmp_path / "t" / "map").config.receiver.cache == "fp8"
    # A corrector tuned at another precision makes a map of that precision.
    told = ["--receiver-cache", "int8", "--allow-other-precision"]
    run("tune", root / "map", "--out", tmp_path / "u", *short, *told)
    tuned = CacheMap.from_pretrained(tmp_path / "u" / "map").config
    assert tuned.receiver.precision == Precision("float32", "int8")
    assert tuned.source.precision == Precision("float32", "float32")


def test_the_table_of_costs(root: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["--map", root / "map", "--corpus", root / "prose.jsonl", "--out", tmp_path]
    arguments += ["-n", 3, "--facts", 2, "--parts", "seen", "--context-tokens", 64]
    arguments += ["--target-tokens", 8, "--row", "float32/float32"]
    arguments += ["--row", "bfloat16/bfloat16:float32/fp8"]
    precision_costs.main([str(a) for a in arguments])
    rows = read_json(tmp_path / "costs.json")["rows"]
    assert [row["row"] for row in rows][1] == "bfloat16/bfloat16:float32/fp8"
    assert rows[0]["cost"]["nats"]["transfer"]["mean"] == 0.0
    assert rows[1]["cost"]["nats"]["transfer"]["mean"] != 0.0
    assert rows[1]["cost"]["facts"]["n"] == 32
    size = [row["size"]["receiver"]["cache_bytes_per_token"] for row in rows]
    assert size[0] == 4 * size[1]
    first = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert len(first.splitlines()) == 4
    stamps = [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("*/row.json"))]
    precision_costs.main([str(a) for a in arguments])
    assert [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("*/row.json"))] == stamps
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == first
    with pytest.raises(SystemExit):
        precision_costs.main([*map(str, arguments), "--row", "int8"])


@needs_torchao
@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.02), ("int4", 0.3)])
def test_quantised_weights(root: Path, precision: str, limit: float) -> None:
    whole = load_model(str(root / "source"))
    packed = load_model(str(root / "source"), precision=precision, cache="int8")
    assert packed.precision == Precision(precision, "int8")
    assert packed.dtype == torch.float32
    decoder = lambda m: weight_bytes(m.model.get_decoder().layers)  # noqa: E731
    assert decoder(packed) < 0.45 * decoder(whole)
    ids, places = torch.arange(5, 40), torch.arange(35)
    one, two = (read(m.model, ids, places, "x").layers[0].keys for m in (whole, packed))
    assert 0 < float((one - two).norm() / one.norm()) < limit
    head = packed.model.get_output_embeddings().weight
    assert torch.equal(head, whole.model.get_output_embeddings().weight)


@needs_torchao
def test_a_corrector_through_quantised_models(root: Path, tmp_path: Path) -> None:
    at = ["--source-precision", "int8", "--receiver-precision", "int4"]
    short = ["--steps", 2, "--rank", 2, "--judge-every", 2, "--held-out", 2, "--data", "facts:2"]
    run("tune", root / "map", "--out", tmp_path, *short, *at, "--allow-other-precision")
    tuned = CacheMap.from_pretrained(tmp_path / "map").config
    assert (tuned.source.weights, tuned.receiver.weights) == ("int8", "int4")


def test_a_cache_that_rounds_from_the_start() -> None:
    model = tiny.loaded("qwen2").model
    assert kind_of(empty_cache(model, None)) is None
    assert kind_of(empty_cache(model, "fp8")) == "fp8"
