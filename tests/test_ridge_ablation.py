"""The ridge's ablation on small random models: raw readings, variants, losses, table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.ridge_ablation.__main__ import main
from benchmarks.ridge_ablation.fitting import load_layer_map
from benchmarks.ridge_ablation.layers import load_block
from benchmarks.ridge_ablation.losses import load_texts, map_texts
from benchmarks.ridge_ablation.moments import BlockMoments, Ridge
from benchmarks.ridge_ablation.pieces import (
    READS,
    Readings,
    ReadSettings,
    half,
    piece_path,
    plan_pieces,
)
from benchmarks.ridge_ablation.projection import Projection
from benchmarks.ridge_ablation.reading import noting, read_one, read_pieces
from benchmarks.ridge_ablation.table import table_lines, table_rows
from benchmarks.ridge_ablation.variants import default_variants, parse

from kvferry.errors import BadInput, NotFinite, WrongPair
from kvferry.fitting.corpus import read_corpus
from kvferry.models.cache import read
from kvferry.models.load import load_model
from kvferry.models.rope import angles, rotary_module, rotate
from kvferry.provenance import read_json, read_records
from kvferry.running.prompt import PromptLayout
from tests.saved_pair import save_model
from tests.small_pair import CLASSES, loaded

CUT = ["--tokens", 1600, "--chunk-tokens", 96, "--texts", 3]
CUT += ["--context-tokens", 80, "--target-tokens", 16]
NAMES = (
    "kv1,kv2,all,head2,res1,kv2+res1,kv1+emb,joint2/lambda0.01,joint2/normed/lambda0.01,"
    "joint2/normed/rank8,kv2/attention,kv2/norm,kv2/rank8,kv2/rank8q,kv2/rows800,kv1-2"
)


def ask(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    save_model(folder / "source", "qwen2", layers=2, kv_heads=1)
    save_model(folder / "receiver", "qwen2", seed=1, layers=3, kv_heads=1)
    words = {"mill": "ground sacks of rye", "ferry": "carried carts over", "tower": "rang hours"}
    for name, verb in words.items():
        rows = [
            {"text": " ".join(f"In {y} the {name} {verb}, {y * 7 % 113}." for y in range(i, i + 9))}
            for i in range(1500, 1560)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def read_command(root: Path, out: Path) -> list[Any]:
    return ["read", root / "source", root / "receiver", "--train", root / "mill.jsonl", "--train",
            root / "ferry.jsonl", "--test", root / "tower.jsonl", *CUT, "--out", out]  # fmt: skip


@pytest.fixture(scope="module")
def readings(root: Path) -> Readings:
    assert ask(*read_command(root, root / "readings")) == 0
    return Readings.open(root / "readings")


@pytest.fixture(scope="module")
def fitted(root: Path, readings: Readings) -> Path:
    out = root / "forward"
    command = ["fit", readings.folder, "--variants", NAMES, "--k-max", 2, "--out", out]
    command += ["--losses", "--answering", root / "receiver"]
    assert ask(*command) == 0
    return out


def test_the_plan_takes_turns_among_books_and_keeps_test_texts_apart(readings: Readings) -> None:
    rows = readings.header["pieces"]
    books = [row["book"] for row in rows if row["split"] == "fit"]
    assert abs(books.count("mill.jsonl") - books.count("ferry.jsonl")) <= 1
    assert books[:4] == ["mill.jsonl", "ferry.jsonl"] * 2
    assert {row["book"] for row in rows if row["split"] == "test"} == {"tower.jsonl"}
    assert 1600 <= readings.rows("fit") < 1600 + 96
    assert readings.rows("test") == 3 * 80


def test_reading_goes_on_after_a_stop_with_the_same_bytes(
    root: Path, tmp_path: Path, readings: Readings
) -> None:
    models = [load_model(str(root / side)) for side in ("source", "receiver")]
    bound = PromptLayout().bind(models[1].tokenizer)
    settings = ReadSettings(1600, 96, 2, 3, 80, 16)
    books = {n: read_corpus([str(root / n)]) for n in ("mill.jsonl", "ferry.jsonl")}
    pieces = plan_pieces(books, read_corpus([str(root / "tower.jsonl")]), bound, settings)

    def stop(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_pieces(*models, pieces, bound, settings, tmp_path, after_piece=stop)
    (tmp_path / "pieces" / ".0004.safetensors.x.part").write_bytes(b"half")
    assert not piece_path(tmp_path, 4).exists()
    assert ask(*read_command(root, tmp_path)) == 0
    found = sorted(p.name for p in (tmp_path / "pieces").iterdir())
    assert found == sorted(p.name for p in (readings.folder / "pieces").iterdir())
    for name in [*(f"pieces/{n}" for n in found), "frozen.safetensors"]:
        assert (tmp_path / name).read_bytes() == (readings.folder / name).read_bytes(), name
    with pytest.raises(WrongPair):
        read_pieces(*models, pieces[1:], bound, settings, tmp_path)


@pytest.mark.parametrize("name", [n for n in CLASSES if "yarn" not in n])
def test_what_is_kept_is_what_the_model_holds(name: str) -> None:
    model = loaded(name)
    prefix, ids = torch.arange(1, 9), torch.arange(20, 90)
    kept = read_one(model, prefix, ids, "source")
    whole = torch.cat((prefix, ids))
    cache = read(model.model, whole, torch.arange(len(whole)), model.revision)
    own: Any = model.model
    eager = own.config._attn_implementation
    own.set_attn_implementation("eager")
    shown = own(whole[None], output_attentions=True, output_hidden_states=True)
    own.set_attn_implementation(eager)
    later = torch.arange(len(whole) - 1, -1, -1).clamp_min(1)
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys.flatten(1), layer.values.flatten(1)
        stored = kept[f"source.kv.{index}"].float()
        assert torch.allclose(stored, torch.cat((keys, values), 1)[8:], rtol=2e-3, atol=1e-2)
        block = own.get_decoder().layers[index]
        projection = Projection.of(block.input_layernorm, block.self_attn, layer.keys.shape[1])
        residual = shown.hidden_states[index][0]
        assert torch.allclose(
            kept[f"source.res.{index}"].float(), residual[8:], rtol=2e-3, atol=1e-2
        )
        normed = projection.normed(residual)
        assert torch.allclose(normed, block.input_layernorm(residual), atol=1e-4)
        assert torch.allclose(projection.keys(normed), keys, atol=1e-3)
        assert torch.allclose(projection.values(normed), values, atol=1e-3)
        weights = shown.attentions[index][0].tril(-1).mean(0).sum(0) / later
        assert torch.allclose(kept["source.received"][index], weights[8:], atol=1e-5)


def test_the_query_moment_weighs_errors_as_logits_do() -> None:
    model = loaded("llama")
    ids = torch.arange(30, 90)
    with torch.no_grad(), noting(model.model) as notes:
        read(model.model, ids, torch.arange(len(ids)), model.revision)
    block: Any = model.model.get_decoder().layers[0]
    normed = block.input_layernorm(notes.residual[0])
    heads = block.self_attn.q_proj(normed).reshape(len(ids), 2, 2, -1)
    error = torch.randn(heads.shape[-1], generator=torch.Generator().manual_seed(0))
    squares = []
    for distance in (1, 4, 16, 64, 256):
        cos, sin = angles(rotary_module(model.model), torch.tensor([0, distance]))
        query = rotate(heads[:, 0], cos[1].expand(len(ids), -1), sin[1].expand(len(ids), -1))
        squares.append((query @ error).square().mean())
    found = error @ notes.queries[0][0] @ error
    assert torch.isclose(found, torch.stack(squares).mean(), rtol=1e-3)


def test_a_linear_target_is_found() -> None:
    draw = torch.Generator().manual_seed(0)
    x = {"a": torch.randn(300, 5, generator=draw), "b": torch.randn(300, 4, generator=draw)}
    true = torch.randn(9, 3, generator=draw)
    y = {"K": torch.cat((x["a"], x["b"]), 1) @ true + 7.0}
    for weights in (torch.ones(300), torch.rand(300, generator=draw) + 0.1):
        moments = BlockMoments.of(x, y, [(("b", "a"), "K")], weights)
        gram, cross, x_mean, y_mean = moments.problem(("b", "a"), ["K"])
        ridge = Ridge.of(gram, cross)
        weight = ridge.solve(1e-9)
        assert weight is not None
        made = (torch.cat((x["b"], x["a"]), 1) - x_mean) @ weight + y_mean
        error = (made - y["K"]).square().sum() / (y["K"] - y["K"].mean(0)).square().sum()
        assert 1.0 - float(error) > 1 - 1e-10
        wide = torch.randn(3, 3, generator=draw).double()
        for metric in (None, wide @ wide.T):
            left, right = ridge.low_rank(weight, 1e-9, 3, metric)
            assert torch.allclose(left @ right, weight, atol=1e-8)
            left, right = ridge.low_rank(weight, 1e-9, 1, metric)
            assert torch.linalg.matrix_rank(left @ right) == 1


def test_a_model_to_itself_is_found(root: Path, tmp_path: Path) -> None:
    command = read_command(root, tmp_path / "readings")
    command[2] = command[1]
    assert ask(*command) == 0
    command = ["fit", tmp_path / "readings", "--variants", "kv1,res1/normed", "--k-max", 2]
    command += ["--losses", "--answering", root / "source", "--out", tmp_path / "fit"]
    assert ask(*command) == 0
    for row in table_rows(tmp_path / "fit"):
        if row["variant"] == "kv1":
            assert min(row["r2_test"].values()) > 0.9999
            assert row["losses"]["recovered"]["transfer"]["value"] == pytest.approx(1.0, abs=0.02)
        assert row["losses"]["n"] == 3


def test_the_normed_target_equals_the_direct_fit_without_key_norm(
    readings: Readings, fitted: Path
) -> None:
    plan_reads = READS["forward"][0]
    records = {r["variant"]: r for r in read_records(fitted / "records.jsonl")}
    direct, normed = records["joint2/lambda0.01"], records["joint2/normed/lambda0.01"]
    for kind in ("K", "V"):
        assert direct["r2_test"][kind] == pytest.approx(normed["r2_test"][kind], abs=1e-4)
    maps = load_layer_map(fitted, parse("joint2/normed/lambda0.01"), 1)
    assert set(maps) == {"H"}
    assert plan_reads == "source"


def test_every_variant_has_a_record_and_a_row(readings: Readings, fitted: Path) -> None:
    rows = {row["variant"]: row for row in table_rows(fitted)}
    assert set(rows) == set(NAMES.split(","))
    for name, row in rows.items():
        assert row["losses"]["n"] == 3, name
        assert set(row["losses"]["recovered"]) == {"transfer", "wrong_document"}
        assert row["rows"] == (800 if "rows800" in name else readings.rows("fit"))
        assert row["code"]["kvferry"]
    width = 16  # a head of each model, keys or values
    assert rows["kv2"]["numbers"] == 3 * 2 * (2 * 2 * width) * width
    assert rows["kv1-2"]["numbers"] == 3 * (2 * width + 2 * 2 * width) * width
    assert rows["head2"]["numbers"] == rows["kv2"]["numbers"]  # one head: all heads are the same
    assert rows["head2"]["r2_test"]["K"] == pytest.approx(rows["kv2"]["r2_test"]["K"], abs=1e-6)
    assert rows["kv2/rank8"]["numbers"] == 3 * 2 * (4 * width + width) * 8
    assert rows["kv2+res1"]["multiply_adds"] == 3 * 2 * (4 * width + 64) * width
    lines = table_lines(fitted)
    assert "n = 3 texts" in lines[0]
    body = [line.split(" | ") for line in lines[4:]]
    shares = [float(cells[1].split()[0]) for cells in body]
    assert shares == sorted(shares, reverse=True)
    assert len(body) == len(rows)


def test_a_stopped_fit_goes_on_and_adds_variants(
    root: Path, readings: Readings, fitted: Path, tmp_path: Path
) -> None:
    command = ["fit", readings.folder, "--k-max", 2, "--out", tmp_path, "--variants"]
    assert ask(*command, "kv1") == 0
    assert "no losses yet" in table_lines(tmp_path)[0]
    path = tmp_path / "weights" / "kv1" / "001.json"
    path.unlink()
    before = (path.with_suffix(".safetensors")).read_bytes()
    assert ask(*command, "kv1,kv2", "--losses", "--answering", root / "receiver") == 0
    assert path.with_suffix(".safetensors").read_bytes() == before
    whole = {r["variant"]: r for r in read_records(fitted / "records.jsonl")}
    for record in read_records(tmp_path / "records.jsonl"):
        assert record["r2_test"] == pytest.approx(whole[record["variant"]]["r2_test"], abs=1e-6)
    records = tmp_path / "losses" / "records.jsonl"
    kept = records.read_bytes()
    records.write_bytes(kept[: len(kept) // 2])
    assert ask(*command, "kv1,kv2", "--losses", "--answering", root / "receiver") == 0

    def plain(lines: bytes) -> list[dict[str, Any]]:
        rows = [json.loads(line) | {"seconds": 0} for line in lines.splitlines()]
        return sorted(rows, key=lambda row: (row["map"], row["doc_id"]))

    assert plain(records.read_bytes()) == plain(kept)


def test_the_other_direction_and_its_mapped_caches(
    root: Path, readings: Readings, tmp_path: Path
) -> None:
    from benchmarks.ridge_ablation.fitting import fit_variants

    variant = parse("kv2+res1")
    plan = fit_variants(readings, "backward", [variant], tmp_path, k_max=2)
    texts = load_texts(readings)
    caches = map_texts(readings, plan, variant, texts, tmp_path)
    assert [len(cache.layers) for cache in caches] == [2, 2, 2]
    rows = load_block(readings, plan, "test", "kv.0")
    assert rows.shape[0] == sum(len(cache) for cache in caches)
    command = ["fit", readings.folder, "--variants", "kv2+res1", "--k-max", 2, "--out", tmp_path]
    assert ask(*command) == 2  # the folder holds the other direction
    assert ask(*command[:-1], tmp_path / "x", "--losses", "--answering", root / "source") == 2


def test_a_fit_without_a_key_norm_s_shortcut(tmp_path: Path, root: Path) -> None:
    save_model(tmp_path / "receiver", "qwen3-qk-norm", seed=3, layers=2, kv_heads=1)
    command = read_command(root, tmp_path / "readings")
    command[2] = tmp_path / "receiver"
    assert ask(*command) == 0
    names = "joint2/lambda0.01,joint2/normed/lambda0.01"
    command = ["fit", tmp_path / "readings", "--variants", names, "--k-max", 2]
    assert ask(*command, "--out", tmp_path / "fit") == 0
    direct, normed = read_records(tmp_path / "fit" / "records.jsonl")
    assert direct["r2_test"]["V"] == pytest.approx(normed["r2_test"]["V"], abs=1e-3)
    assert abs(direct["r2_test"]["K"] - normed["r2_test"]["K"]) > 1e-3


@pytest.mark.parametrize(
    "name",
    ["", "kv0", "kv", "magic3", "kv2/magic", "kv2+kv3", "kv2/rank0", "kv2/normed", "head2+res1",
     "kv2/rank4/rank5", "joint2-3", "joint2/normed/rank4q", "kv2/lambda0"],
)  # fmt: skip
def test_names_that_say_no_variant(name: str) -> None:
    with pytest.raises(BadInput):
        parse(name)


def test_what_is_refused(root: Path, readings: Readings, tmp_path: Path) -> None:
    fit = ["fit", readings.folder, "--k-max", 2, "--out", tmp_path / "x", "--variants"]
    for name in ("kv3", "res9", "kv2/rank99", "kv2/rows99999"):
        assert ask(*fit, name) == 2, name
    assert ask("fit", tmp_path / "nothing", "--out", tmp_path / "y") == 2
    assert ask("table", tmp_path) == 2
    same = read_command(root, tmp_path / "z")
    same[same.index("--test") + 1] = root / "mill.jsonl"
    assert ask(*same) == 2
    assert half(torch.tensor([1e6]), "a layer").tolist() == [1e6]
    assert half(torch.tensor([0.5]), "a layer").dtype == torch.float16
    with pytest.raises(NotFinite):
        half(torch.tensor([torch.nan]), "a layer")


def test_the_default_list_fits_the_pair() -> None:
    names = [v.name for v in default_variants(width=128, same_heads=True, rows=20_000)]
    assert len(names) == len(set(names))
    assert "kv4/rank128" not in names
    assert {"kv4/rank64", "head4", "kv4/rows5000", "joint4/normed"} <= set(names)
    assert not [
        v.name for v in default_variants(width=256, same_heads=False, rows=8) if v.same_head
    ]


def test_provenance_is_in_the_header(fitted: Path) -> None:
    header = read_json(fitted / "header.json")
    assert header["rows"]["test"] == 240
    assert header["code"]["kvferry"]
    assert header["readings"] == read_json(fitted / "losses" / "header.json")["readings"]
