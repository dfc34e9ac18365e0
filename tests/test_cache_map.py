"""The map artifact: the same bytes and outputs after saving, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.errors import BadInput, CorruptFile, HashMismatch, NotFinite, Unreachable
from kvferry.fitting.build import build_map
from kvferry.fitting.capture import CaptureSettings, capture
from kvferry.fitting.corpus import Corpus, Document
from kvferry.fitting.ridge import FitSettings, fit
from kvferry.maps.cache_map import CacheMap, Stored
from kvferry.maps.linear import LinearTarget, cache_features, fold
from kvferry.models.cache import CanonicalCache, read
from kvferry.provenance import sha256_file, sha256_text, sorted_json
from tests.tiny import LAYOUT, geometry, loaded, random_map

FILES = ("map.safetensors", "map.json", "README.md")
KINDS: tuple[Stored, ...] = ("float32", "bfloat16", "float16", "int8")
ERROR = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.02}


def _source_cache(name: str = "llama") -> CanonicalCache:
    model = loaded(name)
    with torch.no_grad():
        return read(model.model, torch.arange(40, 60), torch.arange(9, 29), model.revision)


def _map() -> CacheMap:
    return random_map(loaded("llama"), loaded("qwen3", 1))


def _outputs(cache_map: CacheMap) -> list[torch.Tensor]:
    mapped = cache_map.apply(_source_cache(), positions=torch.arange(20))
    return [t for layer in mapped.layers for t in (layer.keys, layer.values)]


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "map.json"
    value = json.loads(path.read_text())
    change(value)
    value.pop("config_sha256", None)  # what is read must hold without it, too
    path.write_text(sorted_json(value))


def _reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights and put the new hash into the config."""
    path = folder / "map.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "kvferry-map-1"})
    _edit(folder, lambda value: value.update(weights_sha256=sha256_file(path)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    _map().save_pretrained(tmp_path / "map")
    return tmp_path / "map"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [
        f"The ferry number {i} leaves at {i % 12} with {i * i} people on board" for i in range(60)
    ]
    documents = [Document(text, "s", sha256_text(text)) for text in texts]
    documents.sort(key=lambda d: d.doc_id)
    counts: dict[str, int] = {
        s: sum(d.split == s for d in documents) for s in ("fit", "select", "test")
    }
    corpus = Corpus(tuple(documents), 0, 0, ("texts/s.txt",), counts)
    folder = tmp_path_factory.mktemp("fit") / "capture"
    settings = CaptureSettings(
        tokens=800, chunk_tokens=48, per_document=1, k_max=2, probe_texts=4, both_directions=True
    )
    capture(loaded("llama"), loaded("qwen3", 1), corpus, settings, folder, layout=LAYOUT)
    return folder


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fitted_saved_and_loaded_maps_give_the_same_outputs(
    direction: str, captured: Path, tmp_path: Path
) -> None:
    made = build_map(fit(captured, FitSettings(direction=direction)))
    made.save_pretrained(tmp_path)
    back = CacheMap.from_pretrained(tmp_path)
    cache = _source_cache("llama") if direction == "forward" else _source_cache("qwen3")
    positions = torch.arange(20)
    one, two = made.apply(cache, positions=positions), back.apply(cache, positions=positions)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    assert two.lossy
    assert two.revision == back.identity == made.identity
    receiver = loaded("qwen3", 1) if direction == "forward" else loaded("llama")
    assert back.receiver_geometry == geometry(receiver)
    assert back.config.receiver.revision == receiver.revision
    assert back.multiply_adds == sum(t.weight.numel() for t in back.targets.values())


def test_the_card_shows_the_figures(captured: Path, tmp_path: Path) -> None:
    made = build_map(fit(captured, FitSettings()))
    made.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    for split in ("fit", "select", "test"):
        figures = made.config.quality[f"r2_{split}"]
        assert f"r2_{split}: K {figures['K']:.4g}, V {figures['V']:.4g}" in card
        assert f"rows {figures['rows']}" in card
    assert "tiny-llama-0 reads, tiny-qwen3-1 answers" in card
    assert made.config.source.revision[:16] in card
    assert "no evidence" in card
    assert "not measured" not in card


def test_a_map_without_figures_says_so(saved: Path) -> None:
    assert "not measured" in (saved / "README.md").read_text()


@pytest.mark.parametrize("stored", KINDS)
def test_save_load_save_gives_the_same_bytes(stored: Stored, tmp_path: Path) -> None:
    made = _map()
    made.save_pretrained(tmp_path / "a", stored=stored)
    back = CacheMap.from_pretrained(tmp_path / "a")
    assert back.config.stored == stored
    back.save_pretrained(tmp_path / "b")
    again = CacheMap.from_pretrained(tmp_path / "b")
    for name, target in back.targets.items():
        # int8 is scaled anew each time: up to one step of 1/127 of a column's largest weight.
        limit = (0.01 if stored == "int8" else 0.0) * float(target.weight.abs().max())
        assert float((again.targets[name].weight - target.weight).abs().max()) <= limit
        assert torch.equal(again.targets[name].bias, target.bias)
    if stored != "int8":
        for file in FILES:
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_int8_saved_again_gives_the_same_bytes(tmp_path: Path) -> None:
    _map().save_pretrained(tmp_path / "a", stored="int8")
    CacheMap.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / FILES[0]).read_bytes() == (tmp_path / "b" / FILES[0]).read_bytes()


@pytest.mark.parametrize("stored", KINDS)
def test_error_and_size_of_each_dtype(stored: Stored, tmp_path: Path) -> None:
    made = _map()
    made.save_pretrained(tmp_path, stored=stored)
    back = CacheMap.from_pretrained(tmp_path)
    for one, two in zip(_outputs(made), _outputs(back), strict=True):
        relative = float((one - two).norm() / one.norm())
        assert relative <= ERROR[stored]
    assert all(t.weight.dtype == torch.float32 for t in back.targets.values())
    on_disk = load_file(tmp_path / "map.safetensors")["0.K.weight"]
    assert on_disk.dtype == getattr(torch, stored)


def test_int8_keeps_columns_of_very_different_size(tmp_path: Path) -> None:
    made = _map()
    target = made.targets["0.K"]
    columns = torch.logspace(-3, 3, target.weight.shape[1])
    rows = torch.logspace(-2, 2, target.weight.shape[0])[:, None]
    made.targets["0.K"] = LinearTarget(target.layers, target.weight * rows * columns, target.bias)
    made.save_pretrained(tmp_path, stored="int8")
    back = CacheMap.from_pretrained(tmp_path).targets["0.K"].weight
    want = made.targets["0.K"].weight
    assert float(((back - want).norm(dim=0) / want.norm(dim=0)).max()) < 0.05
    assert float(((back - want).norm(dim=1) / want.norm(dim=1)).max()) < 0.05


def test_int8_of_a_map_with_dead_rows_and_columns(tmp_path: Path) -> None:
    made = _map()
    target = made.targets["1.V"]
    weight = target.weight.clone()
    weight[3] = 0.0
    weight[:, 2] = 0.0
    made.targets["1.V"] = LinearTarget(target.layers, weight, target.bias)
    made.save_pretrained(tmp_path, stored="int8")
    back = CacheMap.from_pretrained(tmp_path).targets["1.V"].weight
    assert torch.isfinite(back).all()
    assert float(back[3].abs().max()) == 0.0
    assert float(back[:, 2].abs().max()) == 0.0
    assert float((back - weight).norm() / weight.norm()) < 0.02


def test_files_are_sorted_and_nothing_else_is_written(saved: Path) -> None:
    text = (saved / "map.json").read_text()
    assert text == sorted_json(json.loads(text))
    assert sorted(p.name for p in saved.iterdir()) == sorted(FILES)


def test_identity_follows_the_weights(tmp_path: Path) -> None:
    one, two = _map(), random_map(loaded("llama"), loaded("qwen3", 1), seed=5)
    one.save_pretrained(tmp_path / "a")
    two.save_pretrained(tmp_path / "b")
    assert one.identity != two.identity
    assert CacheMap.from_pretrained(tmp_path / "a").identity == one.identity


def test_the_map_is_the_product_of_the_features() -> None:
    made, cache = _map(), _source_cache()
    features = cache_features(cache)
    width = 2 * geometry(loaded("llama")).layers[0].width
    assert [f.shape for f in features] == [(20, width)] * 3
    layer = cache.layers[1]
    torch.testing.assert_close(
        features[1], torch.cat((layer.keys.reshape(20, -1), layer.values.reshape(20, -1)), dim=1)
    )
    mapped = made.apply(cache, positions=torch.arange(20))
    shape = geometry(loaded("qwen3", 1)).layers[2]
    target = made.targets["2.V"]
    x = torch.cat([features[i] for i in target.layers], dim=1).double()
    expected = (x @ target.weight.double() + target.bias.double()).float()
    torch.testing.assert_close(
        mapped.layers[2].values,
        expected.reshape(20, shape.num_kv_heads, shape.head_dim),
        rtol=1e-4,
        atol=1e-4,
    )
    assert torch.equal(mapped.token_ids, cache.token_ids)
    assert mapped.positions.tolist() == list(range(20))


def test_fold_is_the_bias_of_the_centred_product() -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(5, 3, generator=draw), torch.randn(3, 2, generator=draw)
    x_mean, y_mean = torch.randn(3, generator=draw), torch.randn(2, generator=draw)
    torch.testing.assert_close(
        x @ weight + fold(weight, x_mean, y_mean), (x - x_mean) @ weight + y_mean
    )


@pytest.mark.parametrize("place", [0, 200, -1])
def test_a_flipped_byte(place: int, saved: Path) -> None:
    path = saved / "map.safetensors"
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(HashMismatch, match="sha256"):
        CacheMap.from_pretrained(saved)
    assert path.exists()


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_weights(keep: int, saved: Path) -> None:
    path = saved / "map.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(HashMismatch):
        CacheMap.from_pretrained(saved)
    _edit(saved, lambda value: value.update(weights_sha256=sha256_file(path)))
    with pytest.raises(CorruptFile, match="map weights"):
        CacheMap.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(surprise=1), "surprise"),
        (lambda v: v["source"].update(surprise=1), "surprise"),
        (lambda v: v.pop("layers"), "layers"),
        (lambda v: v.update(stored="int4"), "stored"),
        (lambda v: v.update(format="kvferry-map-9"), "kvferry-map-9"),
        (lambda v: v["layers"].pop("1.K"), "1.K"),
        (lambda v: v["layers"].update({"1.K": [0, 99]}), "99|range|layer"),
        (lambda v: v["layers"].update({"1.K": [0, -1]}), "-1|range|layer"),
        (lambda v: v["layers"].update({"1.K": [0]}), "1.K"),
        (lambda v: v["layers"].update({"9.K": [0, 1]}), "9.K"),
        (lambda v: v["receiver"]["geometry"].pop("layers"), "layers"),
        (lambda v: v["receiver"]["geometry"].update(other=1), "other"),
        (lambda v: v["source"]["geometry"]["layers"][0].update(head_dim=99), "weight of"),
    ],
)
def test_a_map_json_that_does_not_fit(change: Any, said: str, saved: Path) -> None:
    _edit(saved, change)
    with pytest.raises(CorruptFile, match=said):
        CacheMap.from_pretrained(saved)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"format": ', "\x00"])
def test_a_map_json_that_is_none(text: str, saved: Path) -> None:
    (saved / "map.json").write_text(text)
    with pytest.raises(CorruptFile):
        CacheMap.from_pretrained(saved)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_tensors_of_another_shape(part: str, saved: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"1.V.{part}"] = tensors[f"1.V.{part}"][..., :-1].contiguous()

    _reweigh(saved, cut)
    with pytest.raises(CorruptFile, match=r"1\.V"):
        CacheMap.from_pretrained(saved)


@pytest.mark.parametrize("name", ["1.V.row_scale", "1.V.column_scale"])
def test_int8_scales_of_another_shape(name: str, tmp_path: Path) -> None:
    _map().save_pretrained(tmp_path, stored="int8")

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    _reweigh(tmp_path, cut)
    with pytest.raises(CorruptFile, match="map weights"):
        CacheMap.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_missing_file(name: str, saved: Path) -> None:
    (saved / name).unlink()
    with pytest.raises(CorruptFile, match=name):
        CacheMap.from_pretrained(saved)


def test_a_missing_card_is_no_harm(saved: Path) -> None:
    (saved / "README.md").unlink()
    assert CacheMap.from_pretrained(saved)


@pytest.mark.parametrize("spec", ["no-such-folder", "./a/b", "/a/b", "a/b/c"])
def test_no_such_folder(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="a map's folder"):
        CacheMap.from_pretrained(spec)


@pytest.mark.parametrize("error", [ConnectionError("no route\nmore"), ConnectionError()])
def test_a_hub_that_cannot_be_asked(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(Unreachable, match="ConnectionError"):
        CacheMap.from_pretrained("owner/some-map")


def test_a_hub_that_answers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def answer(repo: str, **options: Any) -> str:
        asked.append((repo, options["revision"]))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    assert CacheMap.from_pretrained("owner/some-map", revision="abc").targets
    assert asked == [("owner/some-map", "abc")]


def test_a_full_disk_leaves_the_old_map(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from kvferry.errors import OutOfSpace
    from kvferry.maps import cache_map

    before = {name: (saved / name).read_bytes() for name in FILES}

    def full(tensors: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_map, "save_file", full)
    with pytest.raises(OutOfSpace, match="full disk"):
        random_map(loaded("llama"), loaded("qwen3", 1), seed=3).save_pretrained(saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_numbers_that_are_not_finite_are_not_saved(stored: Stored, part: str, saved: Path) -> None:
    before = {name: (saved / name).read_bytes() for name in FILES}
    made = _map()
    getattr(made.targets["1.V"], part).view(-1)[3] = float("nan")
    with pytest.raises(NotFinite, match=r"1\.V"):
        made.save_pretrained(saved, stored=stored)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_weights_too_large_for_float16_are_not_saved_as_infinity(tmp_path: Path) -> None:
    made = _map()
    made.targets["0.K"].weight.mul_(1e6)
    with pytest.raises(NotFinite, match="float16"):
        made.save_pretrained(tmp_path, stored="float16")
    made.save_pretrained(tmp_path, stored="bfloat16")


def test_unsaved_maps_of_other_weights_have_other_names() -> None:
    assert _map().identity != random_map(loaded("llama"), loaded("qwen3", 1), seed=5).identity


def test_a_map_in_memory_and_its_int8_copy_have_other_names(tmp_path: Path) -> None:
    made = _map()
    made.save_pretrained(tmp_path, stored="int8")
    back = CacheMap.from_pretrained(tmp_path)
    same = torch.equal(back.targets["0.K"].weight, made.targets["0.K"].weight)
    assert (back.identity == made.identity) == same
