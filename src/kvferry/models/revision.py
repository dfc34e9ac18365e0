"""What identifies a model folder: one hash over the files that decide its answers.

Owns ``revision(folder)`` and its memory. Refuses a folder without config or weights. Hashes are
remembered by size and modification time under the cache folder, never in the model's own folder,
which may be read-only. One call: ``revision(Path("models/x"))``.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from kvferry.errors import CorruptFile, KvferryError
from kvferry.models.catalog import cache_home
from kvferry.provenance import read_json, sha256_file, sha256_text, write_json

OLDER_TOKENIZERS = ("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def hashed_files(folder: Path) -> list[Path]:
    """The files that the revision covers, sorted by name.

    ``config.json``, ``tokenizer.json`` (or the older files it replaced), the chat template and
    every ``*.safetensors``. Where no file of its own holds the chat template it sits in
    ``tokenizer_config.json``, which then counts.

    Raises:
        CorruptFile: no ``config.json`` or no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        missing = "model.safetensors" if (folder / "config.json").is_file() else "config.json"
        raise CorruptFile(
            expected=f"a model folder with config.json and *.safetensors in {folder}",
            got=f"no {missing}",
            next_step="give the folder that save_pretrained wrote, a *.gguf file or a catalog name",
        )
    templates = [folder / name for name in TEMPLATE_FILES if (folder / name).is_file()]
    others = [folder / "config.json", folder / "tokenizer.json", *templates]
    if not (folder / "tokenizer.json").is_file():
        others += [folder / name for name in OLDER_TOKENIZERS]
    if not templates:
        others.append(folder / "tokenizer_config.json")
    return sorted([*weights, *(path for path in others if path.is_file())])


def revision(folder: Path) -> str:
    """What names a model in maps and records, 64 hex digits.

    The sha256 of the GGUF file a folder was converted from, as long as the folder is unchanged
    since: the conversion's bytes may follow library versions, the GGUF's don't. Else the hash of
    the folder's own content.

    Raises:
        CorruptFile: no ``config.json`` or no weights.
    """
    content = content_hash(folder)
    note = _json_object(folder / "kvferry.json")
    if note is not None and note.get("content_sha256") == content:
        return str(note["gguf_sha256"])
    return content


def content_hash(folder: Path) -> str:
    """Hash of the files that decide a folder's answers, 64 hex digits.

    Raises:
        CorruptFile: no ``config.json`` or no weights.
    """
    return hash_of({path.name: remembered_sha256(path) for path in hashed_files(folder)})


def hash_of(hashes: dict[str, str]) -> str:
    """One hash of file names and their sha256."""
    return sha256_text(json.dumps(sorted(hashes.items())))


def remembered_sha256(path: Path) -> str:
    """sha256 of a file, read again only when its size or modification time has changed."""
    note, stamp = _note_of(path)
    known = _read_note(note)
    if known is not None and {key: known.get(key) for key in stamp} == stamp:
        return str(known["sha256"])
    digest = sha256_file(path)
    remember_sha256(path, digest)
    return digest


def remember_sha256(path: Path, digest: str) -> None:
    """Note a hash that the caller has just computed."""
    note, stamp = _note_of(path)
    # The memory only saves time: a full or read-only cache must not stop a model from loading.
    with contextlib.suppress(OSError, KvferryError):
        write_json(note, {**stamp, "sha256": digest})


def _note_of(path: Path) -> tuple[Path, dict[str, Any]]:
    stat = path.stat()
    where = str(path.resolve())
    stamp = {"path": where, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return cache_home() / "hashes" / f"{sha256_text(where)[:32]}.json", stamp


def _read_note(note: Path) -> dict[str, Any] | None:
    known = _json_object(note)
    return known if known is not None and isinstance(known.get("sha256"), str) else None


def _json_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or ``None`` where there is none to be read."""
    if not path.is_file():
        return None
    with contextlib.suppress(KvferryError):
        value = read_json(path)
        return value if isinstance(value, dict) else None
    return None
