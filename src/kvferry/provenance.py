"""Where a figure comes from: hashes, versions, commit and dirty flag, and atomic files.

Owns every write that must not be left half done. Refuses nothing; raises ``OutOfSpace`` when the
disk fills. One call: ``write_json(path, value)``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from kvferry.errors import BadInput, CorruptFile, OutOfSpace

MATMUL_VARIABLE = "KVFERRY_MATMUL"
"""Holds how float32 products on the CPU are computed, for every process of a command."""
MATMULS = ("float32", "bfloat16")

_CHUNK_BYTES = 1 << 22


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """sha256 of a text's UTF-8 bytes, as 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def sorted_json(value: Any) -> str:
    """JSON with sorted keys and a final newline: the same value gives the same bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, renamed onto it when the block ends well.

    Raises:
        OutOfSpace: the disk is full; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in _NO_ROOM:
            raise disk_full(path) from error
        raise
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # safetensors wraps the system's error in its own.
        if any(os.strerror(number) in str(error) for number in _NO_ROOM):
            raise disk_full(path) from error
        raise


@contextmanager
def sole_writer(folder: Path, what: str) -> Iterator[None]:
    """Only one process at a time may write a folder; clears what a killed one left half-written.

    Args:
        folder: made if absent.
        what: the work, for the message.

    Raises:
        BadInput: another process is at work in it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise BadInput(
            expected=f"no other {what} at work in {folder}",
            got="another process that is writing there",
            next_step="wait for it, or choose another --out",
        ) from error
    try:
        for left in folder.glob(".*.part"):
            left.unlink(missing_ok=True)
        yield
    finally:
        held.release()


def disk_full(path: Path) -> OutOfSpace:
    """The error for a full disk at ``path``."""
    free = shutil.disk_usage(path.parent).free
    return OutOfSpace(
        expected=f"room to write {path}",
        got=f"a full disk or a limit on file sizes ({free / 1e9:.2f} GB free); nothing was left "
        "half-written",
        next_step="free some space or raise the limit, and run the same command again",
    )


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write sorted JSON atomically."""
    write_text(path, sorted_json(value))


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CorruptFile: the file is missing, not UTF-8 or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptFile(
            expected=f"a file {path}",
            got="no such file",
            next_step="check the path; an interrupted run may not have written it yet",
        ) from error
    except (OSError, ValueError) as error:
        raise CorruptFile(
            expected=f"JSON in {path}",
            got=f"{type(error).__name__}: {error}",
            next_step="restore the file or make it again",
        ) from error


def parse_json(text: str) -> Any:
    """JSON from people's files, which has to be text that can be written again.

    Raises:
        ValueError: not JSON, nested too deeply, or with half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is no text") from error
    return value


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object that has to have some keys.

    Raises:
        CorruptFile: as ``read_json``, or something else than such an object.
    """
    value = read_json(path)
    if not isinstance(value, dict) or not set(keys) <= set(value):
        raise CorruptFile(
            expected=f"an object with {', '.join(keys)} in {path}",
            got=type(value).__name__ if not isinstance(value, dict) else f"keys {list(value)[:8]}",
            next_step="restore the file or remove that folder and run again",
        )
    return value


def start_records(
    folder: Path, header: dict[str, Any], *, same: Sequence[str], once: Sequence[str] = ()
) -> Path:
    """Begin or go on with a folder of records: ``header.json`` and ``records.jsonl``.

    Args:
        same: keys of the header that an earlier start must agree on.
        once: keys that together name a record, as for ``read_records``.

    Returns:
        the records' path; a line cut by a kill is gone from it.

    Raises:
        BadInput: the folder holds a run with other such values.
        CorruptFile: records without a header, or that are none of such a run.
    """
    path, records = folder / "header.json", folder / "records.jsonl"
    kept = read_records(records, once=once)
    if not path.exists():
        if kept:
            raise CorruptFile(
                expected=f"{path} beside the records that it is the header of",
                got="records alone, so nobody can say which run they belong to",
                next_step="restore it, choose another --out, or remove that folder",
            )
        write_json(path, header)
    else:
        known = read_object(path, *same)
        plain = json.loads(json.dumps(header))
        if other := [key for key in same if known[key] != plain[key]]:
            raise BadInput(
                expected=f"an empty folder, or this run in {folder}",
                got=f"a run with other {', '.join(other)}",
                next_step="choose another --out, or remove that folder",
            )
    write_text(records, "".join(map(_line, kept)))
    return records


def add_record(path: Path, row: dict[str, Any]) -> None:
    """Append one record as a line of sorted JSON."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, allow_nan=False) + "\n"


def read_records(
    path: Path, *, keys: Sequence[str] = (), once: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Records written so far; a line cut by a kill is left out.

    Args:
        keys: that each record has to have.
        once: keys, likewise, that together name a record: no two agree in all of them.

    Raises:
        CorruptFile: a record without these keys, or one that is there twice.
    """
    if not path.exists():
        return []
    rows = []
    seen: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        absent = [key for key in (*once, *keys) if key not in row]
        name = json.dumps([row.get(key) for key in once])
        if absent or (once and name in seen):
            wanted = ", ".join((*once, *keys))
            raise CorruptFile(
                expected=f"a record with {wanted}, each once, at {path}:{number}",
                got=f"none of {', '.join(absent)}"
                if absent
                else f"that of line {seen[name]} again",
                next_step="restore the file, or remove that line and run again",
            )
        seen[name] = number
        rows.append(row)
    return rows


def code_version() -> dict[str, Any]:
    """Package version, commit and dirty flag of the code that runs, ``None`` outside git."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", str(here / "errors.py")) is not None
    status = git("status", "--porcelain", "--untracked-files=no") if tracked else None
    return {
        "kvferry": metadata.version("kvferry"),
        "commit": git("rev-parse", "HEAD") if tracked else None,
        "dirty": None if status is None else bool(status),
    }


def matmul() -> str:
    """What float32 products on the CPU round their factors to, as ``KVFERRY_MATMUL`` asks.

    Raises:
        BadInput: none of ``MATMULS``.
    """
    asked = os.environ.get(MATMUL_VARIABLE, MATMULS[0])
    if asked not in MATMULS:
        raise BadInput(
            expected=f"--matmul or {MATMUL_VARIABLE} to be one of {', '.join(MATMULS)}",
            got=asked,
            next_step="leave it out for float32",
        )
    return asked


def machine() -> dict[str, Any]:
    """Processor, cores, memory and library versions, for a record's header."""
    import psutil

    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers", "safetensors", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "matmul": matmul(),
        "versions": versions,
    }
