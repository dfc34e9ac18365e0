"""A GGUF file becomes a plain model folder: config, tokenizer, chat template, bf16 safetensors.

Owns the conversion, done once and renamed into place when whole. Refuses truncated and damaged
files, unknown architectures, and files whose tensors do not fill the model exactly. Weights are
unpacked, so the folder loads like any other. One call:
``convert_gguf(Path("x.gguf"), Path("models/x"), source="x")``.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from kvferry.errors import CorruptFile, KvferryError, OutOfSpace, UnsupportedGeometry
from kvferry.models.revision import (
    hash_of,
    hashed_files,
    remember_sha256,
    remembered_sha256,
)
from kvferry.provenance import disk_full, sha256_file, write_json
from kvferry.terminal import progress

# These say which program wrote the file, not what the model is: with them in, the same GGUF would
# get another revision after every upgrade.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "_model_name_or_path")


def convert_gguf(gguf: Path, folder: Path, *, source: str) -> Path:
    """Write ``folder`` from ``gguf`` and return it; an existing folder is replaced.

    Args:
        gguf: the file.
        folder: where the model goes; written under a temporary name beside it, then renamed.
        source: what to record as the file's origin.

    Raises:
        CorruptFile: truncated, damaged, or tensors missing.
        UnsupportedGeometry: an architecture that can't be read as a causal language model.
        OutOfSpace: the disk fills.
    """
    digest = remembered_sha256(gguf)
    check_gguf(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{folder.name}.*.making"):
        shutil.rmtree(stale, ignore_errors=True)
    making = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.making"
    making.mkdir()
    try:
        with _full_disk_named(folder):
            chat_template, packed = _write_model(gguf, making)
            hashes = {path.name: sha256_file(path) for path in hashed_files(making)}
            note = {
                "format_version": 1,
                "source": source,
                "gguf": gguf.name,
                "gguf_sha256": digest,
                "file_type": packed,
                "dtype": "bfloat16",
                "chat_template": chat_template,
                "versions": {
                    name: metadata.version(name)
                    for name in ("kvferry", "transformers", "gguf", "torch", "safetensors")
                },
                "content_sha256": hash_of(hashes),
            }
            write_json(making / "kvferry.json", note)
        if folder.exists():
            shutil.rmtree(folder)
        making.rename(folder)
        for name, known in hashes.items():
            remember_sha256(folder / name, known)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return folder


def check_gguf(path: Path) -> None:
    """Stop early on a file that is no GGUF.

    Raises:
        CorruptFile: empty, or other first bytes than ``GGUF``.
    """
    with path.open("rb") as stream:
        first = stream.read(4)
    if first != b"GGUF":
        raise CorruptFile(
            expected=f"a GGUF file (first bytes GGUF) in {path}",
            got=f"{path.stat().st_size} bytes that start with {first!r}",
            next_step="download it again; a saved web page or a pointer file is not the model",
        )


def _write_model(gguf: Path, making: Path) -> tuple[bool, str | None]:
    """Config, tokenizer and weights into ``making``.

    Returns:
        whether there is a chat template, and what the weights were packed as (``q4_k_m``).
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    with _damage_named(gguf):
        config, skeleton = _empty_model(gguf)
        reader = GGUFReader(str(gguf))
        tensors = _read_tensors(gguf, reader, config, skeleton)
        packed = _file_type(reader)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    _require_all_filled(gguf, skeleton, tensors)
    save_file(tensors, str(making / "model.safetensors"), metadata={"format": "pt"})
    (making / "model.safetensors").chmod(0o644)  # safetensors writes it for the owner only
    tokenizer.save_pretrained(str(making))
    config.save_pretrained(str(making))
    settings = json.loads((making / "config.json").read_text(encoding="utf-8"))
    write_json(
        making / "config.json",
        {key: value for key, value in settings.items() if key not in _NOT_THE_MODEL},
    )
    return tokenizer.chat_template is not None, packed


def _file_type(reader: Any) -> str | None:
    """By the file's own header, such as ``q4_k_m``; ``None`` where it doesn't say."""
    from gguf import LlamaFileType

    field = reader.fields.get("general.file_type")
    names = {int(kind): kind.name for kind in LlamaFileType}
    name = names.get(int(field.contents())) if field is not None else None
    return name and name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def _empty_model(gguf: Path) -> tuple[Any, Any]:
    """The config and its causal language model without storage."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        builder: Any = AutoModelForCausalLM
        with torch.device("meta"):
            skeleton = builder.from_config(config, trust_remote_code=False)
    except ValueError as error:
        if "not supported" not in str(error) and "Unrecognized" not in str(error):
            raise
        raise UnsupportedGeometry(
            expected="a GGUF architecture that transformers reads as a causal language model",
            got=f"{gguf.name}: {error}",
            next_step="use the model's safetensors folder instead",
        ) from error
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.bfloat16
    return config, skeleton


def _read_tensors(gguf: Path, reader: Any, config: Any, skeleton: Any) -> dict[str, Any]:
    """Every tensor under the model's own name, unpacked to bf16.

    Goes tensor by tensor instead of through ``load_gguf_checkpoint`` so that a minute of work shows
    how far it is.
    """
    import torch
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = reader.fields["general.architecture"].contents()
    table: Any = TENSOR_PROCESSORS
    processor = table.get(architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(skeleton, processor)
    gathered: dict[str, dict[str, Any]] = {"tensors": {}}
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    with progress(f"convert {gguf.stem}", total=total, unit="bytes") as advance:
        for tensor in reader.tensors:
            # Processors of expert models put merged tensors into ``gathered`` themselves.
            done = processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters=gathered,
            )
            if done.name in names:
                unpacked = torch.from_numpy(done.weights.copy()).to(torch.bfloat16)
                gathered["tensors"][names[done.name]] = unpacked
            advance(int(tensor.n_bytes))
    return {name: value.to(torch.bfloat16) for name, value in gathered["tensors"].items()}


def _require_all_filled(gguf: Path, skeleton: Any, tensors: dict[str, Any]) -> None:
    """Names and shapes must be the model's own, tied ones aside; never a random weight."""
    tied = set(getattr(skeleton, "_tied_weights_keys", None) or ())
    if not skeleton.config.tie_word_embeddings:
        tied = set()
    wanted = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    missing = sorted(name for name in wanted if name not in tensors and name not in tied)
    wrong = sorted(
        name for name, value in tensors.items() if wanted.get(name) != tuple(value.shape)
    )
    if missing or wrong:
        raise CorruptFile(
            expected=f"{len(wanted)} tensors of a {type(skeleton).__name__} in {gguf.name}",
            got=f"missing {missing[:3]}, of another shape {wrong[:3]}"
            f" ({len(missing)} and {len(wrong)} in all)",
            next_step="download the file again, or use the model's safetensors folder",
        )
    broken = sorted(name for name, value in tensors.items() if not bool(value.isfinite().all()))
    if broken:
        raise CorruptFile(
            expected=f"finite weights in {gguf.name}",
            got=f"NaN or infinity in {broken[:3]}",
            next_step="download the file again",
        )


@contextmanager
def _damage_named(gguf: Path) -> Iterator[None]:
    """Turn what parsers raise on a damaged file into ``CorruptFile``."""
    try:
        yield
    except (KvferryError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged file makes the parsers trip over
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own trouble, not the file's
        raise CorruptFile(
            expected=f"a whole GGUF file in {gguf}",
            got=f"{gguf.stat().st_size} bytes that break off or do not parse "
            f"({type(error).__name__}: {str(error)[:160]})",
            next_step="download it again; compare its size and sha256 with the publisher's",
        ) from error


@contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Turn a full disk into ``OutOfSpace``, also when safetensors wraps the system's error."""
    try:
        yield
    except OutOfSpace:
        raise
    except Exception as error:
        if "No space left" in str(error):
            raise disk_full(folder) from error
        raise
