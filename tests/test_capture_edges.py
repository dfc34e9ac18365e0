"""Captures at their edges: interrupted inside a sum, between files, in plans; what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvferry.errors import (
    BadInput,
    CorruptFile,
    KvferryError,
    TokenizerMismatch,
    UnsupportedGeometry,
    WrongPair,
)
from kvferry.fitting import capture_store
from kvferry.fitting.capture import CaptureSettings, PairReader, capture
from kvferry.fitting.capture_store import load_capture, merge_captures
from kvferry.fitting.corpus import Corpus, Document, read_corpus
from kvferry.fitting.moments import Moments
from kvferry.fitting.ridge import FitSettings, fit
from tests.tiny import LAYOUT, build, loaded, tiny_tokenizer

SETTINGS = CaptureSettings(tokens=500, chunk_tokens=48, per_document=1, k_max=2, probe_texts=2)
WORDS = [
    "the",
    "ferry",
    "leaves",
    "harbour",
    "at",
    "seven",
    "and",
    "the",
    "captain",
    "Ines",
    "is",
    "never",
    "late",
    "in",
    "the",
    "morning",
]
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    draw = random.Random(1)
    rows = [json.dumps({"text": " ".join(draw.choices(WORDS, k=30))}) for _ in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return read_corpus([str(path)])


@pytest.fixture(scope="module")
def pair() -> Pair:
    return loaded("llama"), loaded("qwen3", 1)


def run(pair: Pair, corpus: Corpus, folder: Path, **options: Any) -> dict[str, Any]:
    chosen = options.pop("settings", SETTINGS)
    return capture(*pair, corpus, chosen, folder, layout=LAYOUT, **options)


@pytest.fixture(scope="module")
def whole(pair: Pair, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "capture"
    run(pair, corpus, folder)
    return folder


def same_bytes(a: Path, b: Path) -> bool:
    names = ("moments.safetensors", "capture.json", "plan.json", "identity.json")
    return all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


def test_equal_captures_are_equal_byte_for_byte(
    pair: Pair, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    run(pair, corpus, tmp_path / "again")
    assert same_bytes(tmp_path / "again", whole)
    assert sorted(p.name for p in whole.iterdir()) == [
        ".lock",
        "capture.json",
        "identity.json",
        "moments.safetensors",
        "plan.json",
        "timing.json",
    ]


@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("checkpoint_s", [0.0, 1e9], ids=["checkpoints", "none"])
def test_interrupted_in_the_middle_of_a_sum(
    stop: int,
    checkpoint_s: float,
    pair: Pair,
    corpus: Corpus,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes at any line: half of a text's products must not be saved as if all were in."""
    calls = []
    add = Moments.add

    def half(self: Moments, features: Any, targets: Any) -> None:
        calls.append(1)
        if len(calls) == stop:
            self.rows += int(features[0].shape[0])
            next(iter(self.gram.values())).add_(1.0)
            raise KeyboardInterrupt
        add(self, features, targets)

    with monkeypatch.context() as patch:
        patch.setattr(Moments, "add", half)
        with pytest.raises(KeyboardInterrupt):
            run(pair, corpus, tmp_path / "c", checkpoint_s=checkpoint_s)
    run(pair, corpus, tmp_path / "c")
    assert same_bytes(tmp_path / "c", whole)


@pytest.mark.parametrize("call", [1, 3, 5, 8])
def test_interrupted_while_a_model_reads(
    call: int,
    pair: Pair,
    corpus: Corpus,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the layers are chosen, before any sum."""
    calls = []
    read = PairReader.read

    def interrupted(self: PairReader, item: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return read(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(PairReader, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(pair, corpus, tmp_path / "c")
    run(pair, corpus, tmp_path / "c")
    assert same_bytes(tmp_path / "c", whole)


@pytest.mark.parametrize("name", ["plan.json", "capture.json"])
def test_interrupted_between_two_files(
    name: str,
    pair: Pair,
    corpus: Corpus,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = capture_store.write_json

    def interrupted(path: Path, value: Any) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        write(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(capture_store, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(pair, corpus, tmp_path / "c")
    assert not (tmp_path / "c" / "capture.json").exists()
    run(pair, corpus, tmp_path / "c", checkpoint_s=0.0)
    assert same_bytes(tmp_path / "c", whole)


def test_a_resumed_capture_reads_only_what_is_left(
    pair: Pair, corpus: Corpus, tmp_path: Path
) -> None:
    def stop(done: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(pair, corpus, tmp_path, after_item=stop)
    seen: list[int] = []
    header = run(pair, corpus, tmp_path, after_item=seen.append)
    assert seen == list(range(7, len(header["items"]) + 1))


def test_the_moments_are_those_of_both_models_read_apart(
    pair: Pair, corpus: Corpus, whole: Path
) -> None:
    """Against transformers alone: un-rotated keys from k_proj, values from v_proj, by hooks."""
    header, by_split = load_capture(whole, "forward")
    bound = LAYOUT.bind(pair[1].tokenizer)
    texts = {d.doc_id: d.text for d in corpus.documents}
    source = pair[0].model
    kept: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    attention = source.get_decoder().layers[1].self_attn
    start = len(bound.prefix_ids)
    hooks = [
        getattr(attention, f"{n}_proj").register_forward_hook(
            lambda _m, _i, out, n=n: kept[n].append(out[0, start:].double())
        )
        for n in "kv"
    ]
    try:
        for item in header["items"]:
            if item["split"] == "fit":
                ids = bound.context(texts[item["doc_id"]])[: item["tokens"]]
                with torch.no_grad():
                    source(torch.cat((bound.prefix(), ids))[None])
    finally:
        for hook in hooks:
            hook.remove()
    rows = torch.cat((torch.cat(kept["k"]), torch.cat(kept["v"])), dim=1)
    moments = by_split["fit"]
    assert moments.rows == rows.shape[0] == header["rows"]["fit"]
    if 1 in moments.x_sum:
        torch.testing.assert_close(moments.x_sum[1], rows.sum(0), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(moments.block(1, 1), rows.T @ rows, rtol=1e-4, atol=1e-2)
    else:
        pytest.fail("layer 1 is in no list: choose another layer for this test")


def test_both_directions_are_two_captures_in_one_reading(
    pair: Pair, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    run(pair, corpus, tmp_path / "both", settings=replace(SETTINGS, both_directions=True))
    run(pair[::-1], corpus, tmp_path / "back")
    both = load_file(tmp_path / "both" / "moments.safetensors")
    one = load_file(whole / "moments.safetensors")
    back = load_file(tmp_path / "back" / "moments.safetensors")
    assert all(torch.equal(both[name], one[name]) for name in one)
    assert len(both) == len(one) + len(back)
    for name, value in back.items():
        other = both[name.replace("forward/", "backward/")]
        torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
    with pytest.raises(BadInput, match="--both-directions"):
        load_capture(whole, "backward")


def test_shards_merged_are_one_run(pair: Pair, corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    parts = []
    for index in range(2):
        parts.append(tmp_path / str(index))
        run(
            pair,
            corpus,
            parts[-1],
            settings=replace(SETTINGS, shard=(index, 2)),
            plan_from=whole,
        )
    header = merge_captures(parts, tmp_path / "merged")
    one = load_file(whole / "moments.safetensors")
    two = load_file(tmp_path / "merged" / "moments.safetensors")
    assert one.keys() == two.keys()
    for name, value in one.items():
        scale = float(value.abs().max())
        assert float((two[name] - value).abs().max()) <= 1e-10 * scale, name
    assert header["rows"] == load_capture(whole, "forward")[0]["rows"]
    fits = [fit(folder, FitSettings()) for folder in (whole, tmp_path / "merged")]
    for name, target in fits[0].targets.items():
        torch.testing.assert_close(
            fits[1].targets[name].weight, target.weight, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(WrongPair):
        merge_captures(parts, parts[0])
    with pytest.raises(BadInput, match="two or more"):
        merge_captures(parts[:1], tmp_path / "x")
    with pytest.raises(BadInput, match="no capture"):
        merge_captures([parts[0], tmp_path / "nothing"], tmp_path / "x")
    with pytest.raises(BadInput, match="chunk 0 in two of them"):
        merge_captures([whole, parts[1]], tmp_path / "x")


def test_captures_of_other_models_are_not_merged(
    pair: Pair, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    other = (loaded("llama", 7), pair[1])
    run(other, corpus, tmp_path / "other", plan_from=whole)
    with pytest.raises(WrongPair, match="the same source"):
        merge_captures([whole, tmp_path / "other"], tmp_path / "x")


def test_a_shard_without_texts_for_the_choice_of_layers(
    pair: Pair, corpus: Corpus, tmp_path: Path
) -> None:
    """One text alone is never both a fit and a select text."""
    with pytest.raises(BadInput, match=r"no (fit|select) text among 1.*--plan-from"):
        run(pair, corpus, tmp_path, settings=replace(SETTINGS, shard=(0, 60)))


def test_a_shard_without_select_texts_can_be_captured_but_not_fitted_alone(
    pair: Pair, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    items = load_capture(whole, "forward")[0]["items"]
    index = next(i for i, item in enumerate(items) if item["split"] == "fit")
    count = len(items)
    run(
        pair,
        corpus,
        tmp_path / "one",
        settings=replace(SETTINGS, shard=(index, count)),
        plan_from=whole,
    )
    with pytest.raises(KvferryError, match="select"):
        fit(tmp_path / "one", FitSettings())


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_shards_that_do_not_exist(
    shard: tuple[int, int], pair: Pair, corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="shard"):
        run(pair, corpus, tmp_path, settings=replace(SETTINGS, shard=shard))


@pytest.mark.parametrize(
    "case",
    ["no moments", "short moments", "changed moments", "no header", "other json", "not json"],
)
def test_damaged_captures(case: str, whole: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(whole, tmp_path / "c"))
    moments, header = folder / "moments.safetensors", folder / "capture.json"
    raw = moments.read_bytes()
    if case == "no moments":
        moments.unlink()
    elif case == "short moments":
        moments.write_bytes(raw[: len(raw) // 2])
    elif case == "changed moments":
        moments.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif case == "no header":
        header.unlink()
    elif case == "other json":
        header.write_text("{}")
    else:
        header.write_text("half a")
    with pytest.raises(BadInput if case == "no header" else CorruptFile):
        fit(folder, FitSettings())


def test_a_plan_is_taken_only_from_a_capture(pair: Pair, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"plan\.json"):
        run(pair, corpus, tmp_path / "c", plan_from=tmp_path / "nothing")


@pytest.mark.parametrize("lambdas", [(), (0.0,), (-1.0, 0.1)])
def test_lambdas_above_zero(lambdas: tuple[float, ...], whole: Path) -> None:
    with pytest.raises(BadInput, match="lambdas above zero"):
        fit(whole, FitSettings(lambdas=lambdas))


@pytest.mark.parametrize("k", [0, 3, -1])
def test_k_within_what_was_captured(k: int, whole: Path) -> None:
    with pytest.raises(BadInput, match="k between 1 and 2"):
        fit(whole, FitSettings(k_key=k))


def test_smaller_k_takes_the_best_layers_first(whole: Path) -> None:
    result = fit(whole, FitSettings(k_key=1, k_value=2))
    plan = load_capture(whole, "forward")[0]["plan"]["forward"]
    for name, target in result.targets.items():
        assert list(target.layers) == plan[name][: 1 if name.endswith("K") else 2]
    assert {len(v) for v in result.r2.values()} == {6}


def test_pairs_that_are_not_run(pair: Pair, corpus: Corpus, tmp_path: Path) -> None:
    windowed = build("mistral", sliding_window=16)
    with pytest.raises(UnsupportedGeometry, match="sliding"):
        run((windowed, pair[1]), corpus, tmp_path / "a")
    other = build(
        "qwen3", seed=1, tokenizer=tiny_tokenizer(vocab=290, lines=("quite other words 13",))
    )
    with pytest.raises(TokenizerMismatch):
        run((pair[0], other), corpus, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_texts_longer_than_the_models_are_refused_before_reading(
    pair: Pair, tmp_path: Path
) -> None:
    """512 positions, and a chunk of 600 tokens after the prefix."""
    documents = tuple(
        Document("#" * 700 + str(i), "s", f"{bucket:08x}" + f"{i:056x}")
        for i, bucket in enumerate((0, 1, 85, 95))
    )
    corpus = Corpus(documents, 0, 0, ("s",), {"fit": 2, "select": 1, "test": 1})
    with pytest.raises(KvferryError, match="512"):
        run(pair, corpus, tmp_path, settings=replace(SETTINGS, chunk_tokens=600))
