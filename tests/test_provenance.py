"""Files whole or not at all, sorted JSON, and spans of time."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch

from kvferry.errors import CorruptFile, KvferryError, OutOfSpace
from kvferry.provenance import (
    atomic_path,
    code_version,
    machine,
    read_json,
    sha256_file,
    sha256_text,
    sorted_json,
    write_json,
    write_text,
)
from kvferry.running.timing import PARTS, Spans, peak_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fill() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(OutOfSpace, match="full disk"):
        fill()
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, PermissionError])
def test_other_failures_leave_the_old_file_too(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 1


def test_sorted_json_is_the_same_for_the_same_value() -> None:
    assert sorted_json({"b": 1, "a": {"d": 2, "c": "é"}}) == sorted_json(
        {"a": {"c": "é", "d": 2}, "b": 1}
    )
    assert sorted_json({}).endswith("\n")
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            sorted_json({"x": value})


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"nonsense"])
def test_json_that_cannot_be_read(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(CorruptFile, match="no such file"):
        read_json(path)
    path.write_bytes(raw)
    with pytest.raises(CorruptFile, match=r"a\.json"):
        read_json(path)


def test_hashes(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * (5 << 20))
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256_text("é") == hashlib.sha256("é".encode()).hexdigest()
    assert len(sha256_text("\ud83d")) == 64


def test_versions_say_what_ran() -> None:
    assert code_version().keys() == {"kvferry", "commit", "dirty"}
    found = machine()
    assert found["cores"] >= 1
    assert found["versions"]["torch"]


def test_every_error_has_three_lines() -> None:
    for kind in KvferryError.__subclasses__():
        error = kind(expected="a", got="b", next_step="c")
        assert error.lines() == ["expected  a", "got       b", "next      c"]
        assert str(error) == "expected a; got b. Next: c"


def test_spans_add_up_and_copies_stand_apart() -> None:
    spans = Spans(CPU)
    for seconds in (0.25, 0.5):
        spans.add("map", seconds)
    spans.add("decode", 9.0)
    twin = spans.copy()
    twin.add("tail", 1.0)
    assert spans.ms == {"map": 750.0, "decode": 9000.0}
    assert spans.ttft_ms == 750.0
    assert twin.ttft_ms == 1750.0
    assert "decode" not in PARTS


def test_a_span_is_timed_also_when_it_fails() -> None:
    spans = Spans(CPU)

    def fail() -> None:
        with spans.measure("inject"):
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert spans.ms["inject"] >= 0.0
    assert peak_memory_bytes(CPU) > 1_000_000
