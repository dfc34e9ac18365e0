"""GGUF to folder, folder to model: parity with transformers, revisions, and damaged files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import BadInput, CorruptFile, OutOfSpace, Unreachable, UnsupportedGeometry
from kvferry.models import convert, revision
from kvferry.models.catalog import catalog
from kvferry.models.load import ModelFolder, load_config, load_model, load_tokenizer, locate
from kvferry.models.locate import packed_as
from tests.tiny_gguf import byte_tokens, tiny_model, write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def shared(original: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The GGUF file and the folder converted from it, made once."""
    base = tmp_path_factory.mktemp("shared")
    gguf = write_gguf(base / "tiny.gguf", original)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_HOME", str(base / "home"))
        return gguf, convert.convert_gguf(gguf, base / "tiny", source="a test")


@pytest.fixture
def folder(shared: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the converted folder, free to be damaged."""
    return Path(shutil.copytree(shared[1], tmp_path / "tiny"))


def test_conversion_keeps_weights_logits_and_tokens(folder: Path, original: Any) -> None:
    loaded = load_model(str(folder))
    ids = torch.tensor([loaded.tokenizer("hello bell")["input_ids"]])
    assert all(
        torch.equal(value, original.state_dict()[name])
        for name, value in loaded.model.state_dict().items()
    )
    torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, atol=1e-6, rtol=0)
    assert loaded.tokenizer.decode(ids[0]) == "hello bell"
    assert byte_tokens().index("hell") in ids[0].tolist()
    assert loaded.tokenizer.eos_token == "<|endoftext|>"
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "<s>user:x<|endoftext|>"


def test_folder_has_all_files_and_a_note(shared: tuple[Path, Path]) -> None:
    gguf, folder = shared
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "kvferry.json",
    }
    note = json.loads((folder / "kvferry.json").read_text())
    assert note["gguf_sha256"] == revision.remembered_sha256(gguf)
    assert note["content_sha256"] == revision.content_hash(folder)
    assert note["gguf_sha256"] == revision.revision(folder)
    assert note["chat_template"] is True
    assert note["file_type"] == "f32"
    assert packed_as(ModelFolder(folder, str(gguf), revision.revision(folder))) == "f32"
    assert set(note["versions"]) >= {"transformers", "gguf", "torch"}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert not list(folder.parent.glob(".*making"))


def test_conversion_twice_gives_the_same_revision(
    shared: tuple[Path, Path], tmp_path: Path
) -> None:
    again = convert.convert_gguf(shared[0], tmp_path / "again", source="a test")
    assert revision.revision(again) == revision.revision(shared[1])


def test_loaded_model_is_frozen_and_in_eval_mode(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.model.dtype == torch.float32
    assert loaded.model.config._attn_implementation == "sdpa"
    assert (loaded.spec, loaded.revision) == (str(folder), revision.revision(folder))
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_gguf_file_is_converted_once(
    shared: tuple[Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = locate(str(shared[0]))
    assert first.path.is_relative_to(home)
    monkeypatch.setattr(convert, "convert_gguf", None)
    assert locate(str(shared[0])) == first
    assert load_config(first).model_type == "llama"
    assert len(load_tokenizer(first)) == len(byte_tokens())


def test_revision_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    before = revision.revision(folder)
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (elsewhere / "README.md").write_text("notes do not count")
    assert revision.revision(elsewhere) == before
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data + b" ")
        assert revision.revision(folder) != before, name
        (folder / name).write_bytes(data)
    assert revision.revision(folder) == before


def test_hashes_are_remembered_outside_the_folder(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(folder.iterdir())
    before = revision.revision(folder)
    assert sorted(folder.iterdir()) == files
    assert list((home / "hashes").iterdir())
    monkeypatch.setattr(revision, "sha256_file", None)
    assert revision.revision(folder) == before


def test_unwritable_memory_stops_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "file"))
    assert len(revision.revision(folder)) == 64


@pytest.mark.parametrize("kept", [0, 3, 30, 500, 3_000, 0.5, 0.98])
def test_truncated_gguf(shared: tuple[Path, Path], tmp_path: Path, kept: float) -> None:
    data = shared[0].read_bytes()
    size = int(kept * len(data)) if isinstance(kept, float) else kept
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[:size])
    with pytest.raises(CorruptFile) as caught:
        locate(str(broken))
    assert "broken.gguf" in caught.value.expected
    assert str(size) in caught.value.got
    assert not list(broken.parent.rglob("*making"))


def test_gguf_of_an_unknown_architecture(shared: tuple[Path, Path], tmp_path: Path) -> None:
    data = shared[0].read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(b"llama", b"lhama"))
    with pytest.raises(UnsupportedGeometry, match="lhama"):
        locate(str(other))


def test_gguf_without_one_tensor(original: Any, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "whole.gguf", original)
    data = gguf.read_bytes()
    gguf.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(CorruptFile, match=r"missing \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        locate(str(gguf))


def test_disk_that_fills_while_converting(
    shared: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutOfSpace):
        convert.convert_gguf(shared[0], tmp_path / "out" / "m", source="a test")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kept", [4, 200, 0.5, 0.98])
def test_truncated_safetensors(folder: Path, kept: float) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(CorruptFile, match="truncated"):
        load_model(str(folder))


def test_missing_weight_is_never_random(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match="1 missing"):
        load_model(str(folder))


def test_folder_without_config_weights_or_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptFile, match=r"no config\.json"):
        load_model(str(tmp_path / "empty"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        load_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"no model\.safetensors"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "more than text"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "nobody-knows", "auto_map": {"AutoConfig": "x.Y"}}, "config.json"),
    ],
)
def test_what_is_no_plain_causal_model(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "config.json").write_text(json.dumps(change))
    with pytest.raises(UnsupportedGeometry, match=message):
        load_model(str(folder))


def test_unknown_names_dtypes_and_devices(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"did you mean qwen2\.5-coder-0\.5b"):
        load_model("qwen2.5-coder-0.5")
    with pytest.raises(BadInput, match="a dtype"):
        load_model(str(folder), dtype="int8")
    with pytest.raises(BadInput, match="a device"):
        load_model(str(folder), device="warp")
    with pytest.raises(BadInput, match="no such file"):
        locate("nowhere/x.gguf")
    if not torch.cuda.is_available():
        with pytest.raises(BadInput, match="0 CUDA devices"):
            load_model(str(folder), device="cuda")


def test_absent_model_without_pull_names_the_command() -> None:
    with pytest.raises(BadInput, match="kvferry models pull smollm2-135m"):
        locate("smollm2-135m", pull=False)


def test_catalog_name_loads_its_folder(folder: Path) -> None:
    row = catalog()["smollm2-135m"]
    shutil.copytree(folder, row.folder)
    assert locate("smollm2-135m") == ModelFolder(
        row.folder, "smollm2-135m", revision.revision(folder)
    )


def test_hub_id_takes_only_safe_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate("owner/name").path == folder
    assert asked["repo"] == "owner/name"
    assert not {"*.bin", "*.py", "*.pt", "*"} & set(asked["allow_patterns"])


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(Unreachable, match="owner/name"):
        locate("owner/name", pull=False)


def test_import_of_the_package_loads_no_torch() -> None:
    code = "import sys, kvferry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
