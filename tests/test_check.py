"""``kvferry check``: verdicts with their reasons, exit codes, bad input, sizes; never a weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from kvferry.errors import BadInput, CorruptFile, KvferryError, Unreachable
from kvferry.fitting import check as checking
from kvferry.fitting.capture import CaptureSettings
from kvferry.fitting.check import CheckReport, check_pair
from kvferry.fitting.estimate import Rates
from kvferry.models.light import locate_light, read_light
from kvferry.verbs.check import duration, parse_rates, register
from tests.light_models import qwen3, save, tiny_tokenizer
from tests.tiny_gguf import tiny_model, write_gguf

RATES = Rates(100.0, 50.0, "as stated by a test")
PLENTY = 64_000_000_000


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(checking, "_free_bytes", lambda: PLENTY)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two config-only folders of one family."""
    return (
        save(tmp_path / "small", qwen3()),
        save(tmp_path / "large", qwen3(hidden_size=96, num_hidden_layers=6, head_dim=24)),
    )


def run(*arguments: object) -> Result:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    words = ["check", *map(str, arguments), "--rates", "100,50"]
    return CliRunner().invoke(app, words)


def report(source: Path, receiver: Path, **changes: Any) -> CheckReport:
    settings = CaptureSettings(**changes)
    models = read_light(str(source)), read_light(str(receiver))
    return check_pair(*models, settings, rates=RATES, free_bytes=PLENTY)


def texts(found: CheckReport, level: str) -> str:
    return " | ".join(reason.text for reason in found.reasons if reason.level == level)


def test_a_ready_pair_exits_0_and_says_everything(pair: tuple[Path, Path]) -> None:
    result = run(*pair)
    assert result.exit_code == 0, result.output
    for words in (
        "layers 0-3: full, 2 KV heads x 16",
        "layers 0-5: full, 2 KV heads x 24",
        "agree: all ",
        "maps and moments",
        "verdict       ready\n",
        "at 100 GFLOP/s for the models and 50 in float64, as stated",
        "capture will need the weights",
    ):
        assert words in result.output or words in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= 80


def test_json_is_one_line_of_the_report(pair: tuple[Path, Path]) -> None:
    result = run(*pair, "--json", "--k-max", "3")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert value["verdict"] == "ready"
    assert [row["k"] for row in value["maps"]] == [1, 2, 3, 4]
    assert value["settings"]["k_max"] == 3
    assert set(value["code"]) == {"kvferry", "commit", "dirty"}
    assert CheckReport.model_validate(value).capture is not None


def test_swapped_and_identical_pairs(pair: tuple[Path, Path]) -> None:
    forward, backward = report(*pair), report(*pair[::-1])
    assert forward.verdict == backward.verdict == "ready"
    assert forward.maps[0].features == 64
    assert backward.maps[0].features == 96
    assert forward.source == backward.receiver
    same = report(pair[0], pair[0])
    assert same.verdict == "ready"
    assert "one model" in texts(same, "note")


def test_other_tokenizers_are_unsupported_with_ids(pair: tuple[Path, Path]) -> None:
    tiny_tokenizer(vocab=290, lines=["zyx zyx wvu wvu tsr tsr"]).save_pretrained(pair[1])
    result = run(*pair)
    assert result.exit_code == 3
    assert "tokenizers    disagree" in result.output
    found = report(*pair)
    assert found.verdict == "unsupported"
    assert found.tokenizers.differing
    assert " / " in texts(found, "unsupported")


def test_limits_each_have_their_reason(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    shorter = save(tmp_path / "shorter", qwen3(max_position_embeddings=300))
    found = report(shorter, pair[1])
    assert found.verdict == "ready with limits"
    assert "prompts up to 300 tokens" in texts(found, "limit")
    assert "--chunk-tokens" in texts(found, "limit")
    assert run(shorter, pair[1]).exit_code == 3

    other = save(tmp_path / "other", qwen3(), tiny_tokenizer(template="{{messages[0].content}}!"))
    assert "chat templates differ" in texts(report(other, pair[1]), "limit")

    packed = save(tmp_path / "packed", qwen3(quantization_config={"quant_method": "gptq"}))
    assert "gptq" in texts(report(packed, pair[1]), "limit")

    small = save(tmp_path / "embeddings", qwen3(vocab_size=100))
    assert "no embedding" in texts(report(small, pair[1]), "limit")


def test_templates_that_render_alike_and_padding_are_no_limits(tmp_path: Path) -> None:
    template = str(tiny_tokenizer().chat_template)
    ours = save(tmp_path / "a", qwen3())
    theirs = save(tmp_path / "b", qwen3(vocab_size=640), tiny_tokenizer(template=template + "{##}"))
    found = report(ours, theirs)
    assert found.verdict == "ready"
    assert "padded differently (600 and 640 rows)" in texts(found, "note")


def test_a_template_that_drops_the_text_is_unsupported(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", qwen3(), tiny_tokenizer(template="nothing"))
    assert "can't hold the prompt" in texts(report(folder, folder), "unsupported")
    raising = tiny_tokenizer(template="{{ raise_exception('no') }}")
    folder = save(tmp_path / "b", qwen3(), raising)
    assert report(folder, folder).verdict == "unsupported"


def test_memory_limits_name_the_k_that_fits(pair: tuple[Path, Path]) -> None:
    rows = report(*pair).maps
    found = report(*pair, memory_bytes=rows[1].moments_bytes, k_max=4)
    assert "sure to hold k up to 2 of 4" in texts(found, "limit")
    assert [row.fits_memory for row in found.maps] == [True, True, False, False]
    assert "may not hold even k = 1" in texts(report(*pair, memory_bytes=1000), "limit")


def test_free_memory_limits_say_what_would_fit(pair: tuple[Path, Path]) -> None:
    models = read_light(str(pair[0])), read_light(str(pair[1]))
    settings = CaptureSettings(probe_texts=1, chunk_tokens=32)

    def said(free: int) -> str:
        found = check_pair(*models, settings, rates=RATES, free_bytes=free)
        return texts(found, "limit")

    need = check_pair(*models, settings, rates=RATES, free_bytes=PLENTY).capture
    assert need is not None
    whole = need.models_bytes + need.peak_bytes
    assert said(whole) == ""
    assert "is free now: --k-max 3 fits, and so does --memory 4MB" in said(whole - 1)
    assert "choosing layers alone takes" in said(need.models_bytes + need.probe_bytes - 1)
    assert "the models alone take" in said(1)


def test_both_directions_need_both_moments(pair: tuple[Path, Path]) -> None:
    both = report(*pair, both_directions=True).maps[0].moments_bytes
    ways = report(*pair), report(*pair[::-1])
    assert both == sum(one.maps[0].moments_bytes for one in ways)


def _unsupported_config(kind: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 600,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    make = {
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **sizes, layer_types=["sliding_attention"] * 3 + ["full_attention"], head_dim=16
        ),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=128),
        "deepseek": lambda: transformers.DeepseekV3Config(**sizes),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(**sizes, head_dim=16),
        "t5": lambda: transformers.T5Config(vocab_size=600),
        "qwen2_vl": lambda: transformers.Qwen2VLConfig(),
    }
    return make[kind]()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma3", "sliding layers are not run yet (layers 0-2)"),
        ("mistral", "sliding layers are not run yet (layers 0-3)"),
        ("deepseek", "mla layers are not run yet (layers 0-3)"),
        ("qwen3_next", "linear layers are not run yet (layers 0-2)"),
        ("t5", "class 't5' is not run yet"),
        ("qwen2_vl", "qwen2_vl with vision_config, text_config: more than text"),
    ],
)
def test_other_kinds_are_refused_by_name(
    kind: str, words: str, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    folder = save(tmp_path / kind, _unsupported_config(kind))
    for names in ((folder, pair[0]), (pair[0], folder)):
        assert words in texts(report(*names), "unsupported")
        result = run(*names)
        assert result.exit_code == 3, result.output
        assert "verdict       unsupported" in result.output
        assert max(map(len, result.output.splitlines())) <= 80


def test_a_class_unknown_to_transformers_is_unsupported(tmp_path: Path) -> None:
    folder = save(tmp_path / "new", qwen3())
    (folder / "config.json").write_text('{"model_type": "not-made-yet"}')
    found = report(folder, folder)
    assert "not-made-yet" in texts(found, "unsupported")
    assert found.source.geometry == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "{}",
        '{"model_type": "qwen3", "hidden_size": "many"}',
        '{"model_type": "llama", "num_hidden_layers": -2}',
        '{"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}}',
    ],
)
def test_a_broken_config_is_bad_input(text: str, pair: tuple[Path, Path]) -> None:
    (pair[0] / "config.json").write_text(text)
    result = run(*pair)
    assert isinstance(result.exception, CorruptFile), result.output
    assert "config" in str(result.exception)


def test_missing_and_damaged_files_are_bad_input(pair: tuple[Path, Path]) -> None:
    file = pair[0] / "tokenizer.json"
    whole = file.read_text()
    for damage in (whole[:100], "", "{}", '{"version": "1.0"}'):
        file.write_text(damage)
        assert isinstance(run(*pair).exception, CorruptFile), damage
    file.unlink()
    assert "no tokenizer.json" in str(run(*pair).exception)
    (pair[0] / "config.json").unlink()
    assert "no config.json" in str(run(*pair).exception)


def test_names_that_are_no_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "nowhere"), str(tmp_path / "no.gguf"), "a/b/c"):
        assert isinstance(run(name, pair[1]).exception, BadInput), name
    absent = run("qwen2.5-coder-0.5b", pair[1]).exception
    assert isinstance(absent, BadInput)
    assert absent.next_step == "run `kvferry models pull qwen2.5-coder-0.5b`"
    assert "not pulled yet" in absent.got


def test_a_hub_id_fetches_no_weights(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[list[str]] = []

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if repo.startswith("off"):
            raise LocalEntryNotFoundError("offline")
        return str(pair[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert run("org/model", pair[1]).exit_code == 0
    assert "config.json" in asked[0]
    assert not [
        p
        for p in asked[0]
        if "safetensors" in p
        or (p.endswith((".bin", ".py", "*")) and p not in ("tokenizer*", "chat_template*"))
    ]
    assert isinstance(run("off/line", pair[1]).exception, Unreachable)


def test_a_gguf_gives_config_and_tokenizer_alone(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "files" / "tiny.gguf", tiny_model())
    folder = locate_light(str(gguf))
    assert not list(folder.glob("*.safetensors"))
    assert locate_light(str(gguf)) == folder
    found = report(gguf, gguf)
    assert found.source.geometry == ["layers 0-1: full, 2 KV heads x 8"]
    assert "weights as in tiny.gguf" in texts(found, "note")
    cut = gguf.with_name("cut.gguf")
    cut.write_bytes(gguf.read_bytes()[:900])
    for path in (cut, gguf.with_name("page.gguf")):
        if not path.exists():
            path.write_text("<html>")
        with pytest.raises(CorruptFile):
            locate_light(str(path))


@pytest.mark.parametrize("rates", ["fast", "1", "0,5", "nan,1", "1,2,3"])
def test_rates_are_two_numbers(rates: str) -> None:
    with pytest.raises(BadInput):
        parse_rates(rates)


def test_devices(pair: tuple[Path, Path]) -> None:
    models = read_light(str(pair[0])), read_light(str(pair[1]))
    for device in ("tpu", "cuda"):
        with pytest.raises(KvferryError):
            check_pair(*models, CaptureSettings(), device=device)
    if not torch.cuda.is_available():
        assert "no CUDA device here" in run(*pair, "--device", "cuda").output


def test_durations() -> None:
    assert [duration(s) for s in (0.1, 59, 600, 7200)] == ["1 s", "59 s", "10 min", "2.0 h"]


def test_check_leaves_the_folders_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = {p: p.read_bytes() for folder in pair for p in folder.iterdir()}
    copies = shutil.copytree(pair[0], tmp_path / "copy")
    report(pair[0], copies)
    assert before == {p: p.read_bytes() for folder in pair for p in folder.iterdir()}
