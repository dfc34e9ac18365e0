"""What people type wrong, and files that were damaged: exit code 2, three lines, no traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.models.load import load_model
from tests.saved_pair import save_pair
from tests.small_pair import identity_map

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, a corpus, a finished capture and its map, all made by the command line."""
    folder = tmp_path_factory.mktemp("cli")
    save_pair(folder)
    lines = [
        json.dumps(
            {"text": f"Row {i}: " + " ".join(f"word{(i * 7 + j) % 97} and" for j in range(60))}
        )
        for i in range(60)
    ]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = run(folder, *CAPTURE, "--out", "capture")
    assert done.returncode == 0, done.stderr
    done = run(folder, "fit", "capture", "--out", "fitted")
    assert done.returncode == 0, done.stderr
    return folder


CAPTURE = ["capture", "./source", "./receiver", "--corpus", "texts.jsonl", "--tokens", "2000"]
CAPTURE += ["--chunk-tokens", "64", "--k-max", "2"]
MEASURE = ["--corpus", "texts.jsonl", "-n", "3", "--context-tokens", "100", "--target-tokens", "16"]
PAIR = ["--source", "./source", "--receiver", "./receiver"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, *arguments: str, limit: str = "") -> Done:
    """The command line's own ``main``; in a process of its own only where a limit is set."""
    if limit:
        command = [sys.executable, "-m", "kvferry.cli", *arguments]
        done = subprocess.run(
            ["bash", "-c", f'ulimit {limit}; exec "$0" "$@"', *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)
    out, err, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["kvferry", *arguments])
        patch.setenv("COLUMNS", "80")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(SystemExit) as ended:
            main()
    signal.signal(signal.SIGTERM, handler)
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def refused(folder: Path, *arguments: str, limit: str = "") -> str:
    done = run(folder, *arguments, limit=limit)
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CAPTURE, "--out", "texts.jsonl"], "exists"),
        (["fit", "capture", "--out", "texts.jsonl"], "exists"),
        (["fit", "capture", "--out", "m", "--lambda", "nan"], "finite lambdas"),
        (["fit", "capture", "--out", "m", "--lambda", "1e-320"], "a lambda large enough"),
        (["fit", "capture", "--out", "m", "--k-key", "0"], "k-key"),
        (["bench", *PAIR, "--map", "fitted", "--out", "fitted"], "a folder"),
        (["bench", *PAIR, "--map", "fitted", "--lengths", "999999999999"], "4096 tokens in all"),
        (["bench", *PAIR, "--map", "fitted", "--lengths", "4000", "--new-tokens", "90"], "4096"),
        (["bench", "--lengths", "64"], "--map"),
        (["measure", *PAIR, "--map", "fitted", "--out", "z", *MEASURE, "--seed", "-1"], "seed"),
        (["check", "~nosuchuser/x", "./source"], "expected"),
        (["check", "x" * 5000, "./source"], "expected"),
        ([*CAPTURE, "--out", "q", "--device", "meta"], "a device: cpu, cuda"),
        ([*CAPTURE, "--out", "q", "--memory", "1KB"], "got       0.001 MB"),
        (["capture", "./source", "./receiver", "--corpus", "", "--out", "q"], "an empty name"),
    ],
)
def test_refusals(root: Path, arguments: list[str], message: str) -> None:
    said = refused(root, *arguments)
    assert message in said or message in " ".join(said.split())


def test_a_map_of_folders_is_measured_from_anywhere(root: Path, tmp_path: Path) -> None:
    pair = ["--source", str(root / "source"), "--receiver", str(root / "receiver")]
    texts = ["--corpus", str(root / "texts.jsonl"), *MEASURE[2:]]
    said = refused(tmp_path, "measure", "--map", str(root / "fitted"), *texts, "--out", "z")
    assert "--source FOLDER" in said
    done = run(tmp_path, "measure", "--map", str(root / "fitted"), *pair, *texts, "--out", "z")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_maps_of_one_folder_name_go_by_the_folder_above(root: Path) -> None:
    for name in ("a", "b", "other/a"):
        shutil.copytree(root / "fitted", root / name / "m", dirs_exist_ok=True)
    done = run(root, "measure", *PAIR, "--map", "a/m", "--map", "b/m", *MEASURE, "--out", "y")
    assert done.returncode == 0, done.stderr
    assert set(json.loads((root / "y" / "summary.json").read_text("utf-8"))["maps"]) == {
        "a/m",
        "b/m",
    }
    two = ["--map", "a/m", "--map", "other/a/m"]
    assert "different names" in refused(root, "measure", *PAIR, *two, *MEASURE, "--out", "x")


def test_a_tail_of_the_whole_context_is_native_reading(root: Path) -> None:
    arguments = ["measure", *PAIR, "--map", "fitted", *MEASURE, "--tail-tokens", "100"]
    done = run(root, *arguments, "--out", "tail", "--json")
    assert done.returncode == 0, done.stderr
    nll = json.loads(done.stdout)["maps"]["fitted"]["nll"]
    assert nll["transfer"] == pytest.approx(nll["receiver_native"], abs=1e-4)
    assert nll["no_context"] != pytest.approx(nll["receiver_native"], abs=1e-4)


def test_a_tail_on_an_identity_map_is_native_reading(root: Path) -> None:
    one = load_model(str(root / "source"))
    identity_map(one).save_pretrained(root / "same")
    pair = ["--source", "./source", "--receiver", "./source"]
    arguments = ["measure", *pair, "--map", "same", *MEASURE, "--tail-tokens", "7"]
    done = run(root, *arguments, "--out", "tail7", "--json")
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)["maps"]["same"]
    assert entry["nll"]["transfer"] == pytest.approx(entry["nll"]["receiver_native"], abs=1e-4)
    assert entry["attention_cosine"]["transfer"] == pytest.approx(1.0, abs=1e-5)


def test_measuring_beyond_the_limit_is_refused(root: Path) -> None:
    arguments = ["measure", *PAIR, "--map", "fitted", "--corpus", "texts.jsonl", "-n", "3"]
    said = refused(
        root, *arguments, "--context-tokens", "300", "--target-tokens", "4000", "--out", "x"
    )
    assert "4096" in said or "documents of" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("capture.json", "{}"),
        ("capture.json", "[]"),
        ("identity.json", "[]"),
        ("moments.safetensors", None),
        ("moments.safetensors", "junk"),
    ],
)
def test_a_damaged_capture(root: Path, tmp_path: Path, name: str, content: str | None) -> None:
    folder = tmp_path / "capture"
    shutil.copytree(root / "capture", folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    again = refused(root, *CAPTURE, "--out", str(folder))
    assert "remove that folder" in " ".join(again.split())
    if name != "identity.json":
        refused(root, "fit", str(folder), "--out", str(tmp_path / "map"))
        refused(root, "merge", str(folder), str(folder), "--out", str(tmp_path / "merged"))


@pytest.mark.parametrize("content", [b"5\n", b"\xff\n", b"[1]\n", b'{"cut'])
def test_damaged_records_are_measured_again(root: Path, tmp_path: Path, content: bytes) -> None:
    arguments = ["measure", *PAIR, "--map", "fitted", *MEASURE, "--out", str(tmp_path), "--json"]
    one = run(root, *arguments)
    assert one.returncode == 0, one.stderr
    (tmp_path / "records.jsonl").write_bytes(content)
    two = run(root, *arguments)
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout) == json.loads(one.stdout)
    (tmp_path / "header.json").write_text("{}", encoding="utf-8")
    refused(root, *arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["layout"].update(instruction="Read " + d["layout"]["instruction"]),
        lambda d: d["layout"].update(foo="bar"),
        lambda d: d["layout"].update(cue=[1]),
        lambda d: d["layout"].update(instruction=5),
        lambda d: d.update(layout_identity="0" * 64),
        lambda d: d["layers"]["0.K"].reverse(),
        lambda d: d.update(stored="bfloat16"),
        lambda d: d.pop("config_sha256") and d["layout"].update(before_question=" "),
    ],
)
def test_a_changed_map_is_noticed(root: Path, tmp_path: Path, change: Any) -> None:
    shutil.copytree(root / "fitted", tmp_path / "map")
    path = tmp_path / "map" / "map.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    (tmp_path / "context.txt").write_text("The mill by the river.", encoding="utf-8")
    asked = ["--context", str(tmp_path / "context.txt"), "--question", "Where?"]
    refused(root, "ask", *PAIR, "--map", str(tmp_path / "map"), *asked)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "rope_theta"])
def test_a_config_with_bad_values(root: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(root / "source", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    value[key] = "x" if key == "rope_theta" else 0
    if key == "rope_theta":
        value.pop("rope_parameters", None)
    path.write_text(json.dumps(value), encoding="utf-8")
    command = [str(tmp_path / "model") if a == "./source" else a for a in CAPTURE]
    refused(root, *command, "--out", str(tmp_path / "out"))


def test_a_limit_on_file_sizes(root: Path, tmp_path: Path) -> None:
    refused(root, *CAPTURE, "--out", str(tmp_path / "c"), limit="-f 20")
    refused(root, "fit", "capture", "--out", str(tmp_path / "m"), limit="-f 20")
    assert not list(tmp_path.rglob("*.part"))


def test_rows_nested_too_deep(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text":' + "[" * 200_000 + "]" * 200_000 + "}", encoding="utf-8")
    command = [str(path) if a == "texts.jsonl" else a for a in CAPTURE]
    refused(root, *command, "--out", str(tmp_path / "out"))
