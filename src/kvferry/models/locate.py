"""A name, folder, GGUF file or hub id becomes a folder on disk with a revision.

Owns the order in which a spec is read: catalog name, folder, ``*.gguf``, hub id. Refuses anything
else, with the close names listed. Imports no torch unless a GGUF file has to be converted. One
call: ``locate("qwen2.5-coder-0.5b")``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import BadInput, Unreachable
from kvferry.models.catalog import cache_home, catalog, local_path, unknown_name
from kvferry.models.revision import remembered_sha256, revision
from kvferry.provenance import read_json
from kvferry.terminal import say

# What loading needs; never *.bin or *.pt (pickles) and never *.py (code).
HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        path: folder with config, tokenizer and safetensors.
        spec: what the user asked for.
        revision: 64 hex digits over the files that decide answers.
    """

    path: Path
    spec: str
    revision: str


def locate(spec: str, *, pull: bool = True) -> ModelFolder:
    """Find a model, downloading and converting it where needed.

    A catalog name wins over a folder of the same name; write ``./name`` for the folder.

    Args:
        spec: catalog name, local folder, ``*.gguf`` file or hub id.
        pull: whether anything may be downloaded.

    Raises:
        BadInput: none of these, or absent while ``pull`` is off.
        CorruptFile: a folder without config or weights, or a damaged file.
        Unreachable: nothing could be downloaded.
    """
    if spec in catalog():
        row = catalog()[spec]
        if row.state != "ready":
            if not pull:
                raise BadInput(
                    expected=f"{spec} on disk in {row.folder}",
                    got=f"state {row.state}",
                    next_step=f"run `kvferry models pull {spec}`",
                )
            from kvferry.models.download import pull as pull_model

            pull_model(row)
        return ModelFolder(row.folder, spec, revision(row.folder))
    path = local_path(spec)
    if path.is_dir():
        return ModelFolder(path, spec, revision(path))
    if path.suffix == ".gguf":
        folder = _converted(path)
        return ModelFolder(folder, spec, revision(folder))
    if _HUB_ID.fullmatch(spec):
        folder = _snapshot(spec, pull=pull)
        return ModelFolder(folder, spec, revision(folder))
    raise unknown_name(spec)


def packed_as(folder: ModelFolder) -> str | None:
    """What the file a folder was unpacked from was packed as, such as ``q4_k_m``.

    ``None`` where the folder's weights are as they were published.
    """
    note = folder.path / "kvferry.json"
    if not note.is_file():
        return None
    known = read_json(note)
    if isinstance(known, dict) and isinstance(known.get("file_type"), str):
        return str(known["file_type"])
    row = catalog().get(folder.spec)  # folders made before the note said so
    names = re.findall(r"q\d\w*", row.hub.filename.lower()) if row and row.hub else []
    return names[-1] if names else None


def folder_path(spec: ModelFolder | Path | str) -> Path:
    """The folder on disk of whatever names a model."""
    if isinstance(spec, ModelFolder):
        return spec.path
    if isinstance(spec, Path):
        return spec
    return locate(spec).path


def _converted(gguf: Path) -> Path:
    """The folder made from a user's own GGUF file, by content, so that a moved file is known."""
    from kvferry.models.convert import check_gguf, convert_gguf
    from kvferry.models.download import lock

    if not gguf.is_file():
        raise BadInput(expected=f"a file {gguf}", got="no such file", next_step="check the path")
    check_gguf(gguf)
    name = f"gguf-{remembered_sha256(gguf)[:24]}"
    folder = cache_home() / "models" / name
    with lock(name):
        if not (folder / "kvferry.json").is_file():
            say(f"converting {gguf} once to {folder}")
            convert_gguf(gguf, folder, source=gguf.name)
    return folder


def _snapshot(repo: str, *, pull: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repo, allow_patterns=list(HUB_PATTERNS), local_files_only=not pull)
        )
    except LocalEntryNotFoundError as error:
        raise Unreachable(
            expected=f"the hub, for {repo}",
            got="no such folder here; no connection (or HF_HUB_OFFLINE) and no copy in its cache",
            next_step="connect, give a local folder, or use a name from `kvferry models list`",
        ) from error
    except HfHubHTTPError as error:
        raise BadInput(
            expected=f"a public model {repo} on the hub",
            got=str(error).strip().splitlines()[0],
            next_step="check the id; for a gated model accept its terms and log in to the hub",
        ) from error
    except OSError as error:
        raise Unreachable(
            expected=f"the hub, for {repo}",
            got=f"{type(error).__name__}: {str(error)[:160]}",
            next_step="check the network, or give a local folder",
        ) from error
