"""One file over HTTP, resumable, verified before it gets its name.

Owns the ``.partial`` file, which survives kills and cut connections, and the wording of network
errors. Refuses a file of another size or sha256: it is removed and nothing else is touched. One
call: ``transfer(session, url, path, size_bytes=n, sha256=digest, advance=advance)``.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import requests

from kvferry.errors import HashMismatch, Unreachable
from kvferry.provenance import disk_full, sha256_file

ATTEMPTS = 4
PAUSE_S = 1.0
_CHUNK_BYTES = 1 << 14  # a cut connection loses the batch that was being read
_PARTIAL_CONTENT, _RANGE_REFUSED = 206, 416

Advance = Callable[[float], None]


def partial_path(path: Path) -> Path:
    """Where the bytes that have arrived so far are kept."""
    return path.with_name(path.name + ".partial")


def bytes_present(path: Path) -> int:
    """Bytes of the file, or of its partial file, that are already here."""
    for candidate in (path, partial_path(path)):
        if candidate.is_file():
            return candidate.stat().st_size
    return 0


def transfer(
    session: requests.Session,
    url: str,
    path: Path,
    *,
    size_bytes: int,
    sha256: str,
    advance: Advance,
    timeout_s: tuple[float, float] = (10.0, 60.0),
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Fetch ``url`` into ``path``, going on where an earlier attempt stopped.

    Args:
        session: carries certificates and proxies.
        url: where the file is.
        path: its final name, given only to verified bytes.
        size_bytes: the size on record.
        sha256: the hash on record.
        advance: told of every batch of bytes; negative where a server makes us start over.
        timeout_s: seconds to connect, and between two batches of bytes.
        headers: sent along.

    Raises:
        HashMismatch: other bytes than on record; the download is removed.
        Unreachable: no connection, an HTTP error, or another size than on record.
        OutOfSpace: the disk fills; the partial file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    for attempt in range(1, ATTEMPTS + 1):
        before = bytes_present(path)
        try:
            _fetch_rest(session, url, partial, size_bytes, advance, timeout_s, headers)
            break
        except requests.RequestException as error:
            moved = bytes_present(path) > before
            if attempt == ATTEMPTS or not (moved or _may_pass(error)):
                raise unreachable(path.name, reason(error)) from error
            time.sleep(PAUSE_S * attempt)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(partial) from error
            raise
    verify(partial, sha256)
    partial.replace(path)
    return path


def verify(path: Path, sha256: str) -> None:
    """Compare a file's hash with the one on record, and remove a file that differs.

    Raises:
        HashMismatch: with both hashes.
    """
    got = sha256_file(path)
    if got != sha256:
        path.unlink()
        raise HashMismatch(
            expected=f"sha256 {sha256} for {path.name}",
            got=f"sha256 {got}; that file was removed, nothing else",
            next_step="run the same command again; if it repeats, the file at its source changed",
        )


def reason(error: BaseException) -> str:
    """A network error in a few words, without URLs, which may hold credentials."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code}"
    kinds: tuple[tuple[type[requests.RequestException], str], ...] = (
        (requests.exceptions.ProxyError, "the proxy refused or is down"),
        (requests.exceptions.SSLError, "its TLS certificate is not trusted here"),
        (requests.exceptions.ConnectTimeout, "no answer to the connection"),
        (requests.exceptions.ReadTimeout, "it stopped sending"),
        (requests.exceptions.ChunkedEncodingError, "the connection was cut"),
        (requests.exceptions.ConnectionError, "no connection"),
    )
    for kind, words in kinds:
        if isinstance(error, kind):
            return words
    return type(error).__name__


def unreachable(what: str, why: str) -> Unreachable:
    """The error for one file from one source."""
    return Unreachable(
        expected=f"{what} from its source",
        got=why,
        next_step="run the same command again: what has arrived is kept",
    )


def _may_pass(error: requests.RequestException) -> bool:
    """Whether a second attempt has a chance although no byte arrived."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in (408, 429, 500, 502, 503, 504)
    return isinstance(
        error, (requests.exceptions.ReadTimeout, requests.exceptions.ChunkedEncodingError)
    )


def _fetch_rest(
    session: requests.Session,
    url: str,
    partial: Path,
    size_bytes: int,
    advance: Advance,
    timeout_s: tuple[float, float],
    headers: Mapping[str, str] | None,
) -> None:
    """One request for what is missing, appended to the partial file."""
    have = partial.stat().st_size if partial.is_file() else 0
    if have > size_bytes:
        advance(-have)
        partial.unlink()
        have = 0
    if have == size_bytes:
        return
    # Packed transfer would make byte offsets mean something else.
    asked = {**(headers or {}), "Accept-Encoding": "identity"}
    if have:
        asked["Range"] = f"bytes={have}-"
    with session.get(url, headers=asked, stream=True, timeout=timeout_s) as answer:
        if answer.status_code == _RANGE_REFUSED:
            partial.unlink()
            advance(-have)
            raise requests.exceptions.ChunkedEncodingError("the range was refused")
        answer.raise_for_status()
        goes_on = answer.status_code == _PARTIAL_CONTENT and answer.headers.get(
            "Content-Range", ""
        ).startswith(f"bytes {have}-")
        if have and not goes_on:
            advance(-have)
            have = 0
        announced = answer.headers.get("Content-Length")
        if announced is not None and int(announced) + have != size_bytes:
            raise unreachable(
                partial.name.removesuffix(".partial"),
                f"a file of {int(announced) + have} bytes instead of the {size_bytes} on record",
            )
        with partial.open("ab" if have else "wb") as stream:
            for block in answer.iter_content(_CHUNK_BYTES):
                stream.write(block)
                advance(len(block))
    if partial.stat().st_size < size_bytes:
        raise requests.exceptions.ChunkedEncodingError("fewer bytes than announced")
