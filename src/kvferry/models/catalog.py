"""Named models: where each comes from, its licence, sizes and the sha256 of every file.

Owns the table ``catalog.json`` and the places in the cache folder. Refuses unknown names, with the
close ones listed. Imports no torch. One call: ``entry("qwen2.5-coder-0.5b")``.
"""

from __future__ import annotations

import difflib
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvferry.errors import BadInput

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(gt=0)]
State = Literal["absent", "partial", "ready"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Row):
    """One piece of the GGUF file: a member of a wheel on the package index."""

    package: str
    version: str
    wheel: str
    wheel_bytes: Bytes
    wheel_sha256: Sha256
    member: str
    member_bytes: Bytes
    member_sha256: Sha256


class HubFile(_Row):
    """The same file on the model hub."""

    repo: str
    filename: str


class Entry(_Row):
    """One named model.

    ``parts`` are in the order in which they are joined. ``parameters`` counts tied embeddings once.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: str
    licence: str
    licence_note: str
    parameters: Annotated[int, Field(gt=0)]
    chat: bool
    gguf_bytes: Bytes
    gguf_sha256: Sha256
    hub: HubFile
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    origin: str

    @model_validator(mode="after")
    def _parts_add_up(self) -> Entry:
        total = sum(part.member_bytes for part in self.parts)
        if total != self.gguf_bytes:
            raise ValueError(f"{self.name}: parts have {total} bytes, the file {self.gguf_bytes}")
        return self

    @property
    def download_bytes(self) -> int:
        """Bytes of all wheels together."""
        return sum(part.wheel_bytes for part in self.parts)

    @property
    def folder_bytes(self) -> int:
        """An upper bound on the converted folder: two bytes a parameter, embeddings untied."""
        return int(self.parameters * 2 * 1.35) + 32_000_000

    @property
    def gguf_path(self) -> Path:
        """Where the joined file is kept."""
        return cache_home() / "gguf" / f"{self.name}.gguf"

    @property
    def folder(self) -> Path:
        """Where the converted model is kept."""
        return cache_home() / "models" / self.name

    @property
    def downloads(self) -> Path:
        """Where wheels and partial downloads are kept until the joined file is verified."""
        return cache_home() / "downloads" / self.name

    @property
    def state(self) -> State:
        """``ready`` once converted, ``partial`` with anything downloaded, else ``absent``."""
        if (self.folder / "kvferry.json").is_file():
            return "ready"
        begun = self.gguf_path.is_file() or (
            self.downloads.is_dir() and any(self.downloads.iterdir())
        )
        return "partial" if begun else "absent"


class _Table(_Row):
    format_version: Literal[1]
    models: tuple[Entry, ...]


def local_path(spec: str) -> Path:
    """What is named, as a path on this disk.

    Raises:
        BadInput: it can't be one.
    """
    try:
        path = Path(spec).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:  # no such user, too long, a zero byte
        raise unknown_name(spec) from error
    return path


def cache_home() -> Path:
    """``$KVFERRY_HOME`` or ``~/.cache/kvferry``."""
    named = os.environ.get("KVFERRY_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvferry"


@cache
def catalog() -> dict[str, Entry]:
    """Every entry by name, in the table's order."""
    text = resources.files("kvferry.models").joinpath("catalog.json").read_text(encoding="utf-8")
    return {row.name: row for row in _Table.model_validate_json(text).models}


def entry(name: str) -> Entry:
    """The entry of a name.

    Raises:
        BadInput: no such name; the close ones and all names are listed.
    """
    known = catalog()
    if name in known:
        return known[name]
    raise unknown_name(name)


def unknown_name(name: str) -> BadInput:
    """The error for a name that is not in the catalog."""
    known = catalog()
    close = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return BadInput(
        expected=f"one of {', '.join(known)}; or a model folder, a *.gguf file, a hub id",
        got=repr(name),
        next_step=f"{hint}`kvferry models list` shows the names",
    )
