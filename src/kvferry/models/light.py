"""Config and tokenizer of a model without its weights: what ``kvferry check`` looks at.

Owns where those few files come from: a pulled model, a folder that may hold no weights, the header
of a GGUF file, or a hub repository of which nothing heavy is fetched. Refuses damaged files. One
call: ``read_light("qwen2.5-coder-0.5b")``.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import (
    BadInput,
    CorruptFile,
    KvferryError,
    Unreachable,
    UnsupportedGeometry,
)
from kvferry.models.catalog import cache_home, catalog, local_path, unknown_name
from kvferry.models.geometry import Geometry
from kvferry.models.load import load_config, load_tokenizer
from kvferry.models.locate import HUB_PATTERNS
from kvferry.provenance import read_json, sha256_text, write_json

LIGHT_PATTERNS = tuple(name for name in HUB_PATTERNS if "safetensors" not in name)
"""What is fetched from the hub: no weights."""


@dataclass(frozen=True)
class LightModel:
    """A model as far as its config and tokenizer tell.

    Attributes:
        spec: what the user asked for.
        path: folder with ``config.json`` and the tokenizer.
        geometry: ``None`` where the config is not that of a decoder with attention heads.
        body_parameters: parameters without the embedding matrices.
        parameters: all of them.
        tokenizer: a transformers tokenizer.
        refusal: why no model can be made of the config; ``None`` when one can.
        notes: what a user should know about the files.
        quantised: how the weights are quantised, as the config says; ``None`` when they are not.
    """

    spec: str
    path: Path
    geometry: Geometry | None
    body_parameters: int
    parameters: int
    tokenizer: Any
    refusal: str | None
    notes: tuple[str, ...]
    quantised: str | None


def locate_light(spec: str) -> Path:
    """A folder with config and tokenizer; weights may be absent and are never downloaded.

    Args:
        spec: catalog name, local folder, ``*.gguf`` file or hub id.

    Raises:
        BadInput: none of these, or a catalog model that is not on disk.
        CorruptFile: a file that is no GGUF, or a damaged one.
        Unreachable: the hub can't be asked.
    """
    if spec in catalog():
        row = catalog()[spec]
        if row.state == "ready":
            return row.folder
        if row.gguf_path.is_file():
            return _from_gguf(row.gguf_path)
        raise BadInput(
            expected=f"{spec} on this disk",
            got=f"not pulled yet (state {row.state}, {row.download_bytes / 1e6:.0f} MB to fetch)",
            next_step=f"run `kvferry models pull {spec}`",
        )
    path = local_path(spec)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
        return _from_hub(spec)
    raise unknown_name(spec)


def read_light(spec: str) -> LightModel:
    """Config and tokenizer of whatever names a model.

    Raises:
        BadInput, CorruptFile, Unreachable: as ``locate_light``, and for damaged files.
    """
    path = locate_light(spec)
    config, refusal = _config(path, spec)
    geometry = None
    body = total = 0
    if config is not None:
        geometry, why = _geometry(config, path)
        refusal = refusal or why
    if geometry is not None:
        text = config.get_text_config()
        embeddings = geometry.vocab_size * geometry.hidden_size
        total = geometry.parameters
        body = total - embeddings * (1 if text.tie_word_embeddings else 2)
    return LightModel(
        spec=spec,
        path=path,
        geometry=geometry,
        body_parameters=body,
        parameters=total,
        tokenizer=_tokenizer(path),
        refusal=refusal,
        notes=tuple(_notes(path)),
        quantised=_quantised(config),
    )


def _config(path: Path, spec: str) -> tuple[Any, str | None]:
    """The config, and why no text model can be made of it."""
    file = path / "config.json"
    if file.is_file():
        value = read_json(file)
        if not isinstance(value, dict) or not isinstance(value.get("model_type"), str):
            raise CorruptFile(
                expected=f"a model's config with model_type in {file}",
                got=f"keys {', '.join(sorted(value)[:4])}" if isinstance(value, dict) else "no map",
                next_step="copy or download the folder again",
            )
    try:
        config = load_config(path)
    except UnsupportedGeometry as error:
        return None, error.got.replace(f"{file}: ", "")
    except KvferryError:
        raise
    except Exception as error:  # transformers validates configs with exceptions of many kinds
        raise CorruptFile(
            expected=f"a valid config in {file}",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            next_step="copy or download the folder again",
        ) from error
    from kvferry.models.load import require_causal

    try:
        require_causal(config, spec)
    except UnsupportedGeometry as error:
        return config, f"not a text-only causal language model: {error.got}"
    return config, None


def _geometry(config: Any, path: Path) -> tuple[Geometry | None, str | None]:
    try:
        geometry = Geometry.from_config(config)
    except UnsupportedGeometry as error:
        return None, f"expected {error.expected}; got {error.got}"
    except Exception as error:  # an attribute that another kind of model doesn't have
        return None, f"no decoder config: {type(error).__name__}: {str(error)[:120]}"
    if min(geometry.depth, geometry.hidden_size, geometry.vocab_size) < 1:
        raise CorruptFile(
            expected=f"positive sizes in {path / 'config.json'}",
            got=f"{geometry.depth} layers, hidden size {geometry.hidden_size}, "
            f"vocabulary {geometry.vocab_size}",
            next_step="copy or download the folder again",
        )
    return geometry, None


def _tokenizer(path: Path) -> Any:
    # Without this, transformers may make an empty tokenizer from the config's class alone.
    if not any((path / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CorruptFile(
            expected=f"a tokenizer in {path}",
            got="no tokenizer.json, tokenizer.model or vocab.json",
            next_step="copy the tokenizer's files beside config.json",
        )
    tokenizer = load_tokenizer(path)
    if not tokenizer.get_vocab():
        raise CorruptFile(
            expected=f"a tokenizer with entries in {path}",
            got="an empty one",
            next_step="copy or download the tokenizer's files again",
        )
    return tokenizer


def _notes(path: Path) -> list[str]:
    notes = []
    made = read_json(path / "kvferry.json") if (path / "kvferry.json").is_file() else {}
    gguf = made.get("gguf") if isinstance(made, dict) else None
    if gguf:
        notes.append(
            f"weights as in {gguf}; a map belongs to these, quantised if that file is, "
            "and not to the publisher's full ones"
        )
    if not gguf and not any(path.glob("*.safetensors")):
        notes.append("looked at config and tokenizer alone; capture will need the weights")
    return notes


def _quantised(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    if isinstance(settings, dict):
        return str(settings.get("quant_method", "unknown"))
    return str(getattr(settings, "quant_method", "unknown"))


def _from_gguf(gguf: Path) -> Path:
    """Config and tokenizer out of a GGUF's header, kept in the cache folder."""
    from transformers import AutoConfig, AutoTokenizer

    from kvferry.models.convert import check_gguf

    if not gguf.is_file():
        raise BadInput(expected=f"a file {gguf}", got="no such file", next_step="check the path")
    check_gguf(gguf)
    stat = gguf.stat()
    stamp = sha256_text(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    folder = cache_home() / "light" / f"gguf-{stamp[:24]}"
    if folder.is_dir():
        return folder
    making = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.making"
    making.mkdir(parents=True)
    try:
        where, name = str(gguf.parent), gguf.name
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(str(making))
        AutoConfig.from_pretrained(where, gguf_file=name).save_pretrained(str(making))
        write_json(making / "kvferry.json", {"format_version": 1, "gguf": name})
        making.replace(folder)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        if folder.is_dir():  # another process was faster
            return folder
        raise _damaged_gguf(gguf, error) from error
    except Exception as error:  # the GGUF parsers raise many kinds on damaged files
        shutil.rmtree(making, ignore_errors=True)
        raise _damaged_gguf(gguf, error) from error
    return folder


def _damaged_gguf(gguf: Path, error: Exception) -> CorruptFile:
    return CorruptFile(
        expected=f"a GGUF file with a config and tokenizer that transformers reads in {gguf}",
        got=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}",
        next_step="download it again, or use the model's safetensors folder",
    )


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(LIGHT_PATTERNS)))
    except HFValidationError as error:
        raise unknown_name(repo) from error
    except LocalEntryNotFoundError as error:
        raise Unreachable(
            expected=f"the hub, for config and tokenizer of {repo}",
            got="no connection (or HF_HUB_OFFLINE) and no copy in the hub's cache",
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
            expected=f"the hub, for config and tokenizer of {repo}",
            got=f"{type(error).__name__}: {str(error)[:160]}",
            next_step="check the network, or give a local folder",
        ) from error
