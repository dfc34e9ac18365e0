"""``kvferry models list | pull | show``: the named models, their sources and their state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.verbs.options import Json

if TYPE_CHECKING:
    from kvferry.models.catalog import Entry

_Name = Annotated[str, typer.Argument(help="A name from `kvferry models list`.")]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    group = typer.Typer(no_args_is_help=True, help="Named models: list, pull, show.")
    group.command("list")(list_models)
    group.command("pull")(pull_model)
    group.command("show")(show_model)
    app.add_typer(group, name="models")


def list_models(json: Json = False) -> None:
    """Every named model with its size, licence and state: absent, partial or ready."""
    from kvferry.models.catalog import catalog
    from kvferry.terminal import print_json, print_table

    rows = catalog().values()
    if json:
        print_json({"models": [_summary(row) for row in rows]})
        return
    print_table(
        "",
        ("name", "parameters", "licence", "size", "state"),
        [
            (row.name, _count(row.parameters), row.licence, _size(row.gguf_bytes), row.state)
            for row in rows
        ],
    )


def pull_model(name: _Name, json: Json = False) -> None:
    """Download, verify and convert a model. Resumes where it stopped; nothing to do when ready."""
    from kvferry.models.catalog import entry
    from kvferry.models.download import pull
    from kvferry.models.revision import revision
    from kvferry.terminal import print_json, say

    row = entry(name)
    say(f"{row.title}, {row.licence} ({row.licence_note})")
    done = pull(row)
    identity = revision(done.folder)
    if json:
        print_json(
            {
                **_summary(row),
                "fetched_from": done.fetched_from,
                "download_s": round(done.download_s, 2),
                "convert_s": round(done.convert_s, 2),
                "folder": str(done.folder),
                "revision": identity,
            }
        )
        return
    if done.fetched_from == "ready":
        say("already here, nothing to do")
    else:
        say(
            f"from the {done.fetched_from} in {done.download_s:.0f} s, "
            f"converted in {done.convert_s:.0f} s, sha256 as on record"
        )
    say(f"revision {identity[:16]}…")
    typer.echo(str(done.folder))


def show_model(name: _Name, json: Json = False) -> None:
    """Licence, sources, every file with its sha256, and what is on this disk."""
    from kvferry.models.catalog import entry
    from kvferry.terminal import print_json

    row = entry(name)
    identity = _revision(row)
    if json:
        print_json(
            {
                **_summary(row),
                "origin": row.origin,
                "hub": row.hub.model_dump(),
                "parts": [part.model_dump() for part in row.parts],
                "gguf_path": str(row.gguf_path) if row.gguf_path.is_file() else None,
                "folder": str(row.folder),
                "revision": identity,
            }
        )
        return
    for line in _lines(row, identity):
        typer.echo(line)


def _lines(row: Entry, identity: str | None) -> list[str]:
    lines = [
        f"{row.name}: {row.title}",
        f"licence     {row.licence} ({row.licence_note})",
        f"parameters  {_count(row.parameters)}",
        f"template    {'chat' if row.chat else 'none: a base model'}",
        f"GGUF file   {row.gguf_bytes} bytes",
        f"  sha256    {row.gguf_sha256}",
        f"hub         {row.hub.repo}",
        f"            {row.hub.filename}",
        f"index       {len(row.parts)} wheels, {row.download_bytes} bytes, joined in this order",
    ]
    for part in row.parts:
        lines += [
            f"  {part.package} {part.version}: {part.wheel}",
            f"    sha256  {part.wheel_sha256}",
            f"    {part.member}",
            f"    sha256  {part.member_sha256}",
        ]
    lines += [f"origin      {row.origin}", f"state       {row.state}"]
    if row.gguf_path.is_file():
        lines.append(f"GGUF kept   {row.gguf_path} (may be deleted once the state is ready)")
    if identity is not None:
        lines += [f"folder      {row.folder}", f"revision    {identity}"]
        lines += [f"  {name} {digest}" for name, digest in _files(row.folder).items()]
    return lines


def _summary(row: Entry) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "licence": row.licence,
        "licence_note": row.licence_note,
        "parameters": row.parameters,
        "gguf_bytes": row.gguf_bytes,
        "gguf_sha256": row.gguf_sha256,
        "download_bytes": row.download_bytes,
        "chat": row.chat,
        "state": row.state,
    }


def _revision(row: Entry) -> str | None:
    from kvferry.models.revision import revision

    return revision(row.folder) if row.state == "ready" else None


def _files(folder: Path) -> dict[str, str]:
    from kvferry.models.revision import hashed_files, remembered_sha256

    return {path.name: remembered_sha256(path) for path in hashed_files(folder)}


def _count(parameters: int) -> str:
    if parameters >= 1_000_000_000:
        return f"{parameters / 1e9:.2f} B"
    return f"{parameters / 1e6:.0f} M"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
