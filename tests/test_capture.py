"""Captures: the same bytes after a kill, merges, bounds, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from kvferry.errors import BadInput, CorruptFile, HashMismatch, NotFinite, OutOfSpace, WrongPair
from kvferry.fitting import capture_store
from kvferry.fitting.build import build_map
from kvferry.fitting.capture import CaptureSettings, capture
from kvferry.fitting.capture_store import load_capture, merge_captures
from kvferry.fitting.corpus import Corpus, read_corpus
from kvferry.fitting.moments import Moments
from kvferry.fitting.ridge import FitSettings, fit, r_squared
from kvferry.maps.cache_map import CacheMap
from kvferry.running.handoff import Handoff
from tests.small_pair import loaded

SETTINGS = CaptureSettings(
    tokens=600, chunk_tokens=64, per_document=1, k_max=2, probe_texts=2, both_directions=True
)
WORDS = ["the", "red", "boat", "of", "Ada", "went", "over", "a", "calm", "sea", "to", "Oslo"]


def write_texts(folder: Path, count: int = 60) -> Path:
    generator = random.Random(0)
    rows = [{"text": " ".join(generator.choices(WORDS, k=24))} for _ in range(count)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus([str(write_texts(tmp_path_factory.mktemp("texts")))])


@pytest.fixture(scope="module")
def pair() -> tuple:  # type: ignore[type-arg]
    return loaded("qwen2", layers=2), loaded("llama", seed=1, layers=3, kv_heads=1)


@pytest.fixture(scope="module")
def whole(pair, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("whole") / "capture"
    capture(*pair, corpus, SETTINGS, folder)
    return folder


def same_bytes(a: Path, b: Path) -> bool:
    names = ("moments.safetensors", "capture.json", "plan.json", "identity.json")
    return all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


class Crash(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Crash])
@pytest.mark.parametrize("moments", [(1,), (3, 7), (9,)])
def test_interrupted_and_resumed_gives_the_same_bytes(  # type: ignore[no-untyped-def]
    pair, corpus: Corpus, whole: Path, tmp_path: Path, error: type, moments: tuple[int, ...]
) -> None:
    folder = tmp_path / "capture"
    for stop in moments:

        def after(done: int, stop: int = stop) -> None:
            if done == stop:
                raise error

        with pytest.raises(error):
            capture(*pair, corpus, SETTINGS, folder, checkpoint_s=0.0, after_item=after)
        assert not (folder / "capture.json").exists()
    capture(*pair, corpus, SETTINGS, folder, checkpoint_s=1e9)
    assert same_bytes(folder, whole)
    assert not (folder / "checkpoint.safetensors").exists()


SCRIPT = """
import sys, time
from pathlib import Path
from kvferry.fitting.capture import capture
from kvferry.fitting.corpus import read_corpus
from tests.small_pair import loaded
from tests.test_capture import SETTINGS
pair = loaded("qwen2", layers=2), loaded("llama", seed=1, layers=3, kv_heads=1)
def after(done):
    print(done, flush=True)
    time.sleep(0.05)
capture(*pair, read_corpus([sys.argv[1]]), SETTINGS, Path(sys.argv[2]), checkpoint_s=0.0,
        after_item=after)
"""


def test_killed_with_sigkill_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parent.parent
    arguments = [sys.executable, "-c", SCRIPT, str(texts)]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    subprocess.run(
        [*arguments, str(straight)], check=True, cwd=root, env=environment, capture_output=True
    )
    with subprocess.Popen(
        [*arguments, str(killed)],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if int(line) == 4:
                running.send_signal(signal.SIGKILL)
                break
        running.stdout.close()
    assert running.returncode == -signal.SIGKILL
    assert not (killed / "capture.json").exists()
    subprocess.run(
        [*arguments, str(killed)], check=True, cwd=root, env=environment, capture_output=True
    )
    assert same_bytes(straight, killed)


def test_two_shards_merged_equal_one_run(pair, corpus: Corpus, whole: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    parts = [tmp_path / "a", tmp_path / "b"]
    for index, part in enumerate(parts):
        settings = replace(SETTINGS, shard=(index, 2))
        capture(*pair, corpus, settings, part, plan_from=whole)
    merged = tmp_path / "merged"
    header = merge_captures(parts, merged)
    _, one = load_capture(whole, "forward")
    _, two = load_capture(merged, "forward")
    assert sum(header["rows"].values()) == sum(m.rows for m in one.values())
    for split, moments in one.items():
        for name in moments.candidates:
            torch.testing.assert_close(
                moments.cross[name], two[split].cross[name], rtol=1e-10, atol=1e-9
            )
    with pytest.raises(BadInput, match="in two of them"):
        merge_captures([parts[0], parts[0]], tmp_path / "twice")


def test_merging_other_plans_is_refused(pair, corpus: Corpus, whole: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    other = tmp_path / "other"
    capture(*pair, corpus, replace(SETTINGS, k_max=1), other)
    with pytest.raises(WrongPair, match="choice of source layers"):
        merge_captures([whole, other], tmp_path / "out")


def test_a_folder_of_another_capture_is_refused(pair, corpus: Corpus, whole: Path) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    with pytest.raises(WrongPair, match="other models, texts or settings"):
        capture(*pair, corpus, replace(SETTINGS, tokens=300), whole)
    assert capture(*pair, corpus, SETTINGS, whole)["format"] == "kvferry-capture-1"


def test_memory_bound_shortens_the_lists(pair, corpus: Corpus, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    header = capture(*pair, corpus, replace(SETTINGS, memory_bytes=600_000), tmp_path / "c")
    assert {len(v) for v in header["plan"]["forward"].values()} == {1}
    with pytest.raises(BadInput, match="--memory of at least"):
        capture(*pair, corpus, replace(SETTINGS, memory_bytes=1000), tmp_path / "d")


def test_a_full_disk_leaves_the_last_checkpoint(  # type: ignore[no-untyped-def]
    pair, corpus: Corpus, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "capture"
    saved = capture_store.save_file
    calls = []

    def full_after_two(tensors, path, header) -> None:  # type: ignore[no-untyped-def]
        calls.append(path)
        if len(calls) > 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(tensors, path, header)

    monkeypatch.setattr(capture_store, "save_file", full_after_two)
    with pytest.raises(OutOfSpace, match="full disk"):
        capture(*pair, corpus, SETTINGS, folder, checkpoint_s=0.0)
    assert (folder / "checkpoint.safetensors").stat().st_size > 1000
    assert not [p for p in folder.iterdir() if p.name.endswith(".part")]
    monkeypatch.setattr(capture_store, "save_file", saved)
    capture(*pair, corpus, SETTINGS, folder)
    assert same_bytes(folder, whole)


def test_damaged_files_are_named(pair, corpus: Corpus, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "capture"

    def after(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(*pair, corpus, SETTINGS, folder, after_item=after)
    with pytest.raises(BadInput, match="unfinished"):
        load_capture(folder, "forward")
    path = folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CorruptFile, match="moments in"):
        capture(*pair, corpus, SETTINGS, folder)


def test_nan_activations_stop_a_capture(corpus: Corpus, tmp_path: Path) -> None:
    ill = loaded("qwen2", layers=2)
    with torch.no_grad():
        ill.model.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="layer 0"):
        capture(ill, loaded("llama", seed=1), corpus, SETTINGS, tmp_path / "c")


def test_moments_streamed_merged_and_direct_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    candidates = {"0.K": [0, 2], "0.V": [1, 0], "1.K": [2], "1.V": [2, 1]}
    x = [torch.randn(90, 6, generator=generator) + i for i in range(3)]
    y = {name: torch.randn(90, 4, generator=generator) + x[0][:, :4] for name in candidates}

    def summed(*rows: slice) -> Moments:
        moments = Moments.empty(candidates, 6, 4)
        for part in rows:
            moments.add([t[part] for t in x], {n: t[part] for n, t in y.items()})
        return moments

    batch = summed(slice(None))
    streamed = summed(slice(0, 7), slice(7, 50), slice(50, 90))
    merged = summed(slice(50, 90))
    merged.merge(summed(slice(0, 7)))
    merged.merge(summed(slice(7, 50)))
    for name, layers in candidates.items():
        direct = torch.cat([x[i] for i in layers], dim=1).double().numpy()
        target = y[name].double().numpy()
        gram = np.cov(direct.T, bias=True)
        cross = (direct - direct.mean(0)).T @ (target - target.mean(0)) / 90
        for moments in (batch, streamed, merged):
            got = moments.problem(name, layers)
            np.testing.assert_allclose(got[0].numpy(), gram, atol=1e-10)
            np.testing.assert_allclose(got[1].numpy(), cross, atol=1e-10)
        weight = torch.tensor(np.linalg.solve(gram + 0.1 * np.eye(len(gram)), cross))
        x_mean, y_mean = torch.tensor(direct.mean(0)), torch.tensor(target.mean(0))
        predicted = (direct - direct.mean(0)) @ weight.numpy() + target.mean(0)
        expected = 1 - ((target - predicted) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()
        got_r2 = r_squared(batch, name, layers, weight, x_mean, y_mean)
        assert got_r2 == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "int8"])
def test_a_fitted_map_is_saved_and_loaded(whole: Path, pair, tmp_path: Path, stored: str) -> None:  # type: ignore[no-untyped-def]
    result = fit(whole, FitSettings(direction="forward"))
    assert result.mean_r2("fit", "K") > 0.3
    made = build_map(result, stored=stored)  # type: ignore[arg-type]
    made.save_pretrained(tmp_path / "a")
    read = CacheMap.from_pretrained(tmp_path / "a")
    assert read.identity == made.identity
    limit = {"float32": 0.0, "bfloat16": 5e-3, "float16": 1e-3, "int8": 2e-2}[stored]
    for name, target in made.targets.items():
        scale = target.weight.abs().max()
        assert (read.targets[name].weight - target.weight).abs().max() <= limit * scale
    if stored != "int8":
        read.save_pretrained(tmp_path / "b")
        for file in ("map.safetensors", "map.json", "README.md"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert "r2_test" in (tmp_path / "a" / "README.md").read_text()
    assert Handoff(*pair, read)("Ada went to Oslo.", "Who?").arm == "transfer"


def test_damaged_maps_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "map"
    build_map(fit(whole, FitSettings())).save_pretrained(folder)
    weights, config = folder / "map.safetensors", folder / "map.json"
    good, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(HashMismatch, match="sha256"):
        CacheMap.from_pretrained(folder)
    weights.write_bytes(good[: len(good) // 2])
    with pytest.raises(CorruptFile):
        CacheMap.from_pretrained(folder)
    weights.write_bytes(good)
    config.write_text(text.replace('"k_key"', '"k_kee"'))
    with pytest.raises(CorruptFile, match="k_"):
        CacheMap.from_pretrained(folder)
    config.write_text(text[:100])
    with pytest.raises(CorruptFile, match="JSON"):
        CacheMap.from_pretrained(folder)
    config.write_text(text)
    assert CacheMap.from_pretrained(folder).config.stored == "float32"
    with pytest.raises(BadInput, match="k between 1 and 2"):
        fit(whole, FitSettings(k_key=9))


def test_grouped_products_equal_the_layers_one_by_one(whole: Path, pair) -> None:  # type: ignore[no-untyped-def]
    from kvferry.maps.linear import cache_features

    ferry = Handoff(*pair, build_map(fit(whole, FitSettings())))
    body = ferry.layout.context("Ada went to Oslo.")
    cache = ferry.canonical(ferry.read(pair[0], body).cache, body)
    mapped = ferry.map_cache(cache)
    for index, layer in enumerate(mapped.layers):
        alone = ferry.map.layer(index, cache_features(cache))
        torch.testing.assert_close(layer.keys, alone.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.values, alone.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_rounded_weights_leave_no_offset(whole: Path, tmp_path: Path, stored: str) -> None:
    """At the features' mean a stored map gives the target's mean, however coarse its weights."""
    from dataclasses import replace

    made = build_map(fit(whole, FitSettings()))
    for name, target in made.targets.items():  # one feature with a mean of hundreds
        assert target.center is not None
        center = target.center.clone()
        center[0] = 300.0
        bias = target.bias + (target.center - center) @ target.weight
        made.targets[name] = replace(target, center=center, bias=bias)
    exact = {n: t.center @ t.weight + t.bias for n, t in made.targets.items()}
    made.save_pretrained(tmp_path, stored=stored)  # type: ignore[arg-type]
    for name, target in CacheMap.from_pretrained(tmp_path).targets.items():
        torch.testing.assert_close(
            target.center @ target.weight + target.bias, exact[name], rtol=1e-3, atol=2e-3
        )


def test_two_captures_into_one_folder(pair, corpus: Corpus, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "capture"
    folder.mkdir()
    (folder / ".moments.safetensors.x1.part").write_bytes(b"left by a kill")
    with FileLock(folder / ".lock"), pytest.raises(BadInput, match="another process"):
        capture(*pair, corpus, SETTINGS, folder)
    capture(*pair, corpus, SETTINGS, folder)
    assert not list(folder.glob(".*.part"))


def test_merge_refuses_another_chunk_length(
    pair, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    other = replace(SETTINGS, chunk_tokens=32)
    capture(*pair, corpus, other, tmp_path / "short", plan_from=whole)
    with pytest.raises(WrongPair, match="chunk length"):
        merge_captures([whole, tmp_path / "short"], tmp_path / "merged")
