"""A capture's folder: plan, checkpoint, final moments; every file written whole or not at all.

Files: ``identity.json`` (what the capture is of), ``plan.json`` (source layers for each target),
``checkpoint.safetensors`` (sums so far), and at the end ``moments.safetensors`` and
``capture.json``. Times and machine stand apart in ``timing.json``, so that equal captures are
equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.errors import BadInput, CorruptFile, WrongPair
from kvferry.fitting.corpus import SPLITS
from kvferry.fitting.moments import Candidates, Moments
from kvferry.provenance import atomic_path, read_object, sha256_file, write_json

_HEADER_KEYS = ("directions", "identity", "items", "moments_sha256", "plan", "rows", "settings")
MomentsTable = dict[tuple[str, str], Moments]
"""(direction, split) -> moments."""


class CaptureStore:
    """Reads and writes a capture's folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder
        self.items_done = 0
        path = folder / "identity.json"
        if path.exists():
            found = read_object(path, "identity")["identity"]
            if found != identity:
                raise WrongPair(
                    expected=f"an empty folder, or this capture ({identity[:16]}) in {folder}",
                    got=f"a capture with other models, texts or settings ({str(found)[:16]})",
                    next_step="choose another --out, or remove that folder",
                )
        else:
            write_json(path, {"identity": identity})

    @property
    def finished(self) -> bool:
        """Whether the final files are there, and whole.

        Raises:
            CorruptFile: they are there, and not what the header says.
        """
        if not (self.folder / "capture.json").exists():
            return False
        _require_whole(self.folder, self.header())
        return True

    def header(self) -> dict[str, Any]:
        """The final header."""
        return _header(self.folder)

    def load_plan(self) -> dict[str, Candidates] | None:
        """The plan of an earlier start of this capture."""
        path = self.folder / "plan.json"
        return dict(read_object(path, "plan")["plan"]) if path.exists() else None

    def save_plan(self, plan: dict[str, Candidates], report: dict[str, Any]) -> None:
        """Write the plan and how it was chosen."""
        write_json(self.folder / "plan.json", {"plan": plan, "report": report})

    @staticmethod
    def plan_of(folder: Path) -> dict[str, Candidates]:
        """Another capture's plan."""
        return dict(read_object(folder / "plan.json", "plan")["plan"])

    def load_moments(self, plan: dict[str, Candidates]) -> MomentsTable | None:
        """Sums of the last checkpoint, or ``None`` at the start."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        tensors, header = _load(path)
        if "items_done" not in header or header.get("sha256") != _digest(tensors):
            raise CorruptFile(
                expected=f"sums that match their hash in {path}",
                got="others; the file was changed or damaged",
                next_step="remove that file; the capture then starts from its first text",
            )
        self.items_done = int(header["items_done"])
        return _table(tensors, plan)

    def save_moments(self, moments: MomentsTable, items_done: int) -> None:
        """Write a checkpoint."""
        tensors = _tensors(moments)
        entry = {"items_done": str(items_done), "sha256": _digest(tensors)}
        _save(self.folder / "checkpoint.safetensors", tensors, entry)

    def finish(self, moments: MomentsTable, header: dict[str, Any]) -> None:
        """Write the final files; ``capture.json`` comes last and makes the capture complete."""
        path = self.folder / "moments.safetensors"
        _save(path, _tensors(moments), {"identity": header["identity"]})
        write_json(self.folder / "capture.json", {**header, "moments_sha256": sha256_file(path)})
        (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)


def load_capture(folder: Path, direction: str) -> tuple[dict[str, Any], dict[str, Moments]]:
    """A finished capture's header and one direction's moments by split.

    Raises:
        CorruptFile: damaged files, or moments that don't match the header's sha256.
        BadInput: the capture isn't finished, or lacks the direction.
    """
    if not (folder / "capture.json").exists():
        raise BadInput(
            expected=f"a finished capture in {folder}",
            got="an unfinished one" if (folder / "identity.json").exists() else "no capture",
            next_step="run `kvferry capture` with the same arguments to finish it",
        )
    header = _header(folder)
    if direction not in header["directions"]:
        raise BadInput(
            expected=f"a direction among {', '.join(header['directions'])}",
            got=direction,
            next_step="capture again with --both-directions",
        )
    path = _require_whole(folder, header)
    tensors, _ = _load(path, prefix=f"{direction}/")
    table = _table(tensors, {direction: header["plan"][direction]})
    return header, {split: table[direction, split] for split in SPLITS}


def merge_captures(folders: list[Path], out: Path) -> dict[str, Any]:
    """Add the moments of captures made apart, with the same plan and different texts.

    Raises:
        WrongPair: other models, layout or plan.
        BadInput: fewer than two folders, or a text that was read twice.
    """
    if len(folders) < 2:
        raise BadInput(
            expected="two or more captures to merge",
            got=str(len(folders)),
            next_step="give more folders",
        )
    headers: list[dict[str, Any]] = []
    merged: MomentsTable = {}
    for folder in folders:
        if not (folder / "capture.json").exists():
            load_capture(folder, "forward")
        header = _header(folder)
        if headers:
            _require_mergeable(headers[0], header, folder)
        for direction in header["directions"]:
            _, by_split = load_capture(folder, direction)
            for split, moments in by_split.items():
                if (direction, split) in merged:
                    merged[direction, split].merge(moments)
                else:
                    merged[direction, split] = moments
        headers.append(header)
    items = [item for header in headers for item in header["items"]]
    names = [(item["doc_id"], item["chunk"]) for item in items]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(
            expected="captures of different texts",
            got=f"document {twice[0][:16]}, chunk {twice[1]} in two of them",
            next_step="capture with --shard 0/2 and --shard 1/2",
        )
    rows = {split: sum(h["rows"][split] for h in headers) for split in SPLITS}
    identity = "+".join(h["identity"][:16] for h in headers)
    header = {**headers[0], "items": items, "rows": rows, "identity": identity}
    store = CaptureStore(out, identity)
    store.save_plan(header["plan"], {"merged_from": [h["identity"] for h in headers]})
    store.finish(merged, header)
    return store.header()


def _require_mergeable(first: dict[str, Any], other: dict[str, Any], folder: Path) -> None:
    first, other = ({**h, "chunk_tokens": h["settings"]["chunk_tokens"]} for h in (first, other))
    for side in ("source", "receiver"):  # where a file came from is no matter of what was read
        for header in (first, other):
            header[side] = {k: v for k, v in header[side].items() if k != "packed"}
    for key, name in (
        ("source", "source"),
        ("receiver", "receiver"),
        ("layout_identity", "prompt layout"),
        ("chunk_tokens", "chunk length"),
        ("plan", "choice of source layers"),
    ):
        if first[key] != other[key]:
            raise WrongPair(
                expected=f"the same {name} in every capture",
                got=f"another one in {folder}",
                next_step="capture the later runs with --plan-from the first",
            )


def _header(folder: Path) -> dict[str, Any]:
    return read_object(folder / "capture.json", *_HEADER_KEYS)


def _require_whole(folder: Path, header: dict[str, Any]) -> Path:
    """The moments' path, after comparing their hash with the header's."""
    want, path = header["moments_sha256"], folder / "moments.safetensors"
    found = sha256_file(path) if path.is_file() else "no such file"
    if found != want:
        raise CorruptFile(
            expected=f"sha256 {want} of {path}",
            got=found,
            next_step="restore the file, or remove that folder and capture again",
        )
    return path


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()


def _tensors(moments: MomentsTable) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for (direction, split), value in moments.items():
        tensors.update(value.tensors(f"{direction}/{split}"))
    return tensors


def _save(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, header)


def _load(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as stream:
            header = stream.metadata() or {}
            names = [name for name in stream.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name: stream.get_tensor(name).clone() for name in names}, header
    except (OSError, SafetensorError) as error:
        raise CorruptFile(
            expected=f"moments in {path}",
            got=f"{type(error).__name__}: {error}",
            next_step="remove that folder and capture again",
        ) from error


def _table(tensors: dict[str, Tensor], plan: dict[str, Candidates]) -> MomentsTable:
    try:
        return {
            (direction, split): Moments.from_tensors(tensors, f"{direction}/{split}", candidates)
            for direction, candidates in plan.items()
            for split in SPLITS
        }
    except KeyError as error:
        raise CorruptFile(
            expected="moments for every target of the plan",
            got=f"no tensor {json.dumps(str(error))}",
            next_step="remove that folder and capture again",
        ) from error
