"""The canonical cache: same logits after a round trip, gradients, files refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.errors import BadInput, CorruptFile, NotFinite, WrongPair
from kvferry.models.cache import (
    CanonicalCache,
    LayerKV,
    check_against,
    entries,
    fork,
    forward,
    from_transformers,
    read,
    require_finite,
    rows_from,
    to_transformers,
)
from tests.tiny import NAMES, build, geometry, loaded

IDS = torch.arange(30, 70)


def _read(name: str) -> CanonicalCache:
    model = loaded(name)
    with torch.no_grad():
        return read(model.model, IDS, torch.arange(40), model.revision)


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_a_round_trip(name: str) -> None:
    model = loaded(name).model
    with torch.no_grad():
        native, _ = forward(model, IDS[None], torch.arange(40)[None], logits=8)
        first = read(model, IDS[:32], torch.arange(32), "r")
        rebuilt = to_transformers(model, first)
        carried, after = forward(
            model, IDS[None, 32:], torch.arange(32, 40)[None], cache=rebuilt, logits=0
        )
    assert native is not None
    assert carried is not None
    assert (native - carried).abs().max() < 1e-4
    assert after.get_seq_length() == 40


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3", "stablelm-0.25"])
def test_a_cache_can_be_split_and_put_behind_anchors(name: str) -> None:
    model = loaded(name).model
    with torch.no_grad():
        _, whole = forward(model, IDS[None], torch.arange(40)[None])
        _, anchors = forward(model, IDS[None, :5], torch.arange(5)[None])
        body = from_transformers(
            model, rows_from(model, whole, 5), torch.arange(5, 40), IDS[5:], "r"
        )
        joined = to_transformers(model, body, before=anchors)
    for (k, v), (k2, v2) in zip(entries(whole), entries(joined), strict=True):
        assert (k - k2).abs().max() < 1e-5
        assert (v - v2).abs().max() < 1e-5
    assert anchors.get_seq_length() == 5


def test_select_and_to_keep_positions_and_label() -> None:
    cache = replace(_read("qwen3"), lossy=True)
    part = cache.select(slice(10, None))
    assert len(part) == 30
    assert part.positions[0] == 10
    assert part.token_ids[0] == IDS[10]
    assert part.lossy
    half = part.to(dtype=torch.bfloat16)
    assert half.num_bytes * 2 == part.num_bytes
    assert half.lossy


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3", "stablelm-0.5"])
def test_gradient_reaches_what_is_fed_through(name: str) -> None:
    model = loaded(name).model
    cache = _read(name)
    shift = torch.zeros(1, requires_grad=True)
    kept = [(x.keys.clone(), x.values.clone()) for x in cache.layers]
    moved = CanonicalCache(
        tuple(LayerKV(x.keys + shift, x.values + shift) for x in cache.layers),
        cache.positions,
        cache.token_ids,
        cache.revision,
    )
    handed = to_transformers(model, moved)
    tail, positions = torch.tensor([[7, 8, 9]]), torch.arange(40, 43)[None]
    logits, _ = forward(model, tail, positions, cache=fork(model, handed), logits=1)
    assert logits is not None
    (gradient,) = torch.autograd.grad(logits.square().sum(), shift, retain_graph=True)
    assert float(gradient.abs()) > 0
    # A second backward over the same handed cache fails if anything had been written in place.
    again, _ = forward(model, tail, positions, cache=fork(model, handed), logits=1)
    assert again is not None
    (repeat,) = torch.autograd.grad(again.square().sum(), shift)
    torch.testing.assert_close(repeat, gradient)
    assert all(p.grad is None for p in model.parameters())
    for (keys, values), layer in zip(kept, cache.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


def test_gradient_is_the_finite_difference() -> None:
    model = build("qwen2-yarn", seed=4).model.double()
    with torch.no_grad():
        cache = read(model, IDS, torch.arange(40), "r").to(dtype=torch.float64)

    def loss(shift: torch.Tensor) -> torch.Tensor:
        layers = tuple(LayerKV(x.keys, x.values + shift) for x in cache.layers)
        moved = CanonicalCache(layers, cache.positions, cache.token_ids, "r")
        logits, _ = forward(
            model,
            torch.tensor([[7, 8]]),
            torch.arange(40, 42)[None],
            cache=to_transformers(model, moved),
            logits=1,
        )
        assert logits is not None
        return logits.square().mean()

    shift = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(shift), shift)
    step = 2e-3  # norms compute in float32, so a smaller step is noise
    with torch.no_grad():
        up, down = (loss(torch.full((1,), s, dtype=torch.float64)) for s in (step, -step))
    assert float(gradient) == pytest.approx(float(up - down) / (2 * step), rel=0.02)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fork_leaves_the_original_as_it_is(batch: int) -> None:
    model = loaded("llama").model
    with torch.no_grad():
        _, cache = forward(model, IDS[None], torch.arange(40)[None])
        before = [(k.clone(), v.clone()) for k, v in entries(cache)]
        twin = fork(model, cache, batch=batch)
        tail = torch.arange(5).repeat(batch, 1)
        forward(model, tail, torch.arange(40, 45).repeat(batch, 1), cache=twin)
    assert cache.get_seq_length() == 40
    assert twin.get_seq_length() == 45
    for (k, v), (k2, v2) in zip(before, entries(cache), strict=True):
        assert torch.equal(k, k2)
        assert torch.equal(v, v2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_save_load_save_gives_the_same_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    cache = replace(_read("qwen3").to(dtype=dtype), lossy=True)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    cache.save(first)
    back = CanonicalCache.load(first, revision=cache.revision)
    assert back.lossy
    assert back.revision == cache.revision
    assert torch.equal(back.positions, cache.positions)
    assert torch.equal(back.token_ids, cache.token_ids)
    for a, b in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    back.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_mapped_cache_with_a_graph_can_be_saved(tmp_path: Path) -> None:
    cache = _read("llama")
    shift = torch.zeros(1, requires_grad=True)
    layers = tuple(LayerKV(x.keys + shift, x.values) for x in cache.layers)
    replace(cache, layers=layers).save(tmp_path / "a.safetensors")
    assert not CanonicalCache.load(tmp_path / "a.safetensors").layers[0].keys.requires_grad


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _read("llama").save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match="read the text again"):
        CanonicalCache.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile):
        CanonicalCache.load(tmp_path / "none.safetensors")


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CorruptFile, match="kvferry-cache-1"):
        CanonicalCache.load(path)
    path.write_text(json.dumps({"not": "safetensors"}))
    with pytest.raises(CorruptFile):
        CanonicalCache.load(path)


@pytest.mark.parametrize("dropped", ["layers.0001.values", "positions"])
def test_a_missing_tensor_is_refused(dropped: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    cache = _read("llama")
    cache.save(path)
    tensors = load_file(path)
    del tensors[dropped]
    header = {"format": "kvferry-cache-1", "kinds": ["full"] * 3, "lossy": False}
    save_file(tensors, path, {"header": json.dumps({**header, "revision": cache.revision})})
    with pytest.raises(CorruptFile, match=dropped):
        CanonicalCache.load(path)


def test_another_revision_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _read("llama").save(path)
    with pytest.raises(WrongPair, match="revision"):
        CanonicalCache.load(path, revision=loaded("qwen2").revision)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_numbers_that_are_not_finite_are_refused(value: float, where: str) -> None:
    cache = _read("llama")
    layers = list(cache.layers)
    bad = getattr(layers[1], where).clone()
    bad[3, 0, 0] = value
    layers[1] = replace(layers[1], **{where: bad})
    with pytest.raises(NotFinite, match="layer 1"):
        require_finite(replace(cache, layers=tuple(layers)), "a test")


def test_infinities_of_both_signs_do_not_cancel() -> None:
    cache = _read("llama")
    bad = cache.layers[0].keys.clone()
    bad[0, 0, 0], bad[1, 0, 0] = math.inf, -math.inf
    layers = (replace(cache.layers[0], keys=bad), *cache.layers[1:])
    with pytest.raises(NotFinite):
        require_finite(replace(cache, layers=layers), "a test")


def test_large_but_finite_half_precision_numbers_pass() -> None:
    """Their sum is beyond float16, each of them is not."""
    keys = torch.full((512, 2, 64), 40.0, dtype=torch.float16)
    cache = CanonicalCache(
        (LayerKV(keys, keys),), torch.arange(512), torch.zeros(512, dtype=torch.int64), "r"
    )
    require_finite(cache, "a test")


def test_a_model_with_a_nan_weight_is_refused() -> None:
    model = build("qwen2", seed=5).model
    model.get_decoder().layers[1].self_attn.v_proj.weight.data[0, 0] = math.nan
    with pytest.raises(NotFinite, match="layer 1"), torch.no_grad():
        read(model, IDS, torch.arange(40), "r")


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(BadInput, match="empty text"):
        read(loaded("llama").model, IDS[:0], IDS[:0], "r")


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(WrongPair, match="3 layers"):
        check_against(_read("llama"), geometry(loaded("qwen3")), "the receiver")
    check_against(_read("llama"), geometry(loaded("qwen2")), "the receiver")
