"""A model folder becomes a model and its tokenizer, ready to be read and never to be trained.

Owns the rules for dtype, precision and device and for what counts as a model here: a causal
language model, from safetensors, without code of its own (``trust_remote_code`` is never on).
Weights come frozen and in eval mode. One call: ``load_model("qwen2.5-coder-0.5b")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import BadInput, CorruptFile, KvferryError, UnsupportedGeometry
from kvferry.models.locate import ModelFolder as ModelFolder
from kvferry.models.locate import folder_path
from kvferry.models.locate import locate as locate
from kvferry.models.precision import FLOATS, Precision
from kvferry.models.quantise import import_quietly, quantise, require_library
from kvferry.provenance import matmul

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FOREIGN_PARTS = ("vision_config", "audio_config", "text_config", "thinker_config")


@dataclass
class LoadedModel:
    """A frozen model in eval mode with its tokenizer and the folder it came from.

    Attributes:
        dtype: it computes in.
        weights: ``int8`` or ``int4``; ``None`` for the dtype.
        cache: how its cache rounds entries (``cache_precision.KINDS``); ``None`` for the dtype.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: ModelFolder
    dtype: torch.dtype
    device: torch.device
    weights: str | None = None
    cache: str | None = None

    @property
    def precision(self) -> Precision:
        """Of weights and cache, nothing left open."""
        computed = str(self.dtype).removeprefix("torch.")
        return Precision(self.weights, self.cache).or_else(Precision(computed, computed))

    @property
    def revision(self) -> str:
        """64 hex digits over the files that decide answers."""
        return self.folder.revision

    @property
    def spec(self) -> str:
        """What the user asked for."""
        return self.folder.spec


def load_config(folder: ModelFolder | Path | str) -> PretrainedConfig:
    """The config alone, without weights.

    Raises:
        CorruptFile: no ``config.json``, or one that does not parse.
        UnsupportedGeometry: a class that transformers does not know by itself.
    """
    from transformers import AutoConfig

    path = folder_path(folder)
    if not (path / "config.json").is_file():
        raise CorruptFile(
            expected=f"a model folder with config.json in {path}",
            got="no config.json" if path.is_dir() else "no such folder",
            next_step="give the folder that save_pretrained wrote",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except (OSError, TypeError) as error:
        raise _unreadable(path / "config.json", error) from error
    except ValueError as error:
        raise UnsupportedGeometry(
            expected="a model type that transformers knows without code from the folder",
            got=f"{path / 'config.json'}: {str(error)[:200]}",
            next_step="upgrade transformers, or use another model",
        ) from error
    except Exception as error:  # config classes raise kinds of their own on fields of a wrong type
        raise _unreadable(path / "config.json", error) from error
    return config


def load_tokenizer(spec: ModelFolder | Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of anything that ``locate`` takes.

    Raises:
        CorruptFile: no tokenizer in the folder, or a damaged one.
    """
    from transformers import AutoTokenizer

    path = folder_path(spec)
    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except KvferryError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception on damaged files
        raise _unreadable(path / "tokenizer.json", error) from error


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    precision: str | None = None,
    cache: str | None = None,
    device: str = "cpu",
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Load a model, frozen and in eval mode.

    Args:
        spec: catalog name, local folder, ``*.gguf`` file or hub id.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on the CPU, where bf16
            is several times slower, and bfloat16 elsewhere.
        precision: of the weights: a dtype (then also the one it computes in), ``int8`` or ``int4``
            (weight-only, needs the extra ``quant``); ``None`` for the dtype.
        cache: how the model's cache is rounded, as it will be served; ``None``: as computed.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        attn_implementation: as transformers names it.

    Raises:
        BadInput: unknown name, dtype, precision or device; torchao is missing.
        CorruptFile: truncated or missing weights.
        UnsupportedGeometry: not a plain causal language model.
    """
    place = _device(device)
    asked = Precision(precision, cache)
    kind = _dtype(_compute_dtype(dtype, asked.weights), place)
    weights = asked.weights if asked.weights not in FLOATS else None
    require_library(weights)  # before a long download
    held = _cache_kind(asked.cache, kind)
    folder = locate(spec)
    config = load_config(folder)
    require_causal(config, spec)
    tokenizer = load_tokenizer(folder)
    model = _read_weights(folder.path, kind, attn_implementation).to(place)
    model.eval()
    model.requires_grad_(False)
    if place.type == "cpu":
        _set_matmul()
    if weights is not None:
        quantise(model, weights)
    return LoadedModel(model, tokenizer, folder, kind, place, weights, held)


def _set_matmul() -> None:
    """Round factors of float32 products as the command line or the environment asks."""
    torch.set_float32_matmul_precision("medium" if matmul() == "bfloat16" else "highest")


def _compute_dtype(dtype: str, weights: str | None) -> str:
    if weights not in FLOATS:
        return dtype
    if dtype not in ("auto", weights):
        raise BadInput(
            expected="one of dtype and a floating-point precision, or both the same",
            got=f"dtype {dtype}, precision {weights}",
            next_step="leave one of them out",
        )
    return weights


def _cache_kind(cache: str | None, dtype: torch.dtype) -> str | None:
    """``None`` where the cache is as computed.

    Raises:
        BadInput: a cache that is finer than what the model computes.
    """
    computed = str(dtype).removeprefix("torch.")
    if cache is None or cache == computed:
        return None
    if cache in FLOATS and computed != "float32":
        raise BadInput(
            expected=f"a cache no finer than {computed}, which the model computes in",
            got=cache,
            next_step=f"leave the cache's precision out, or load the weights in {cache}",
        )
    return cache


def _read_weights(path: Path, dtype: torch.dtype, attn_implementation: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import_quietly()
    loader: Any = AutoModelForCausalLM
    try:
        with _quiet_loading():
            model, report = loader.from_pretrained(
                str(path),
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        LookupError,
        ArithmeticError,  # a config with no heads
        TypeError,
        AttributeError,
    ) as error:
        raise _unreadable(path, error) from error
    except (ValueError, ImportError) as error:
        raise UnsupportedGeometry(
            expected=f"a model that loads with attn_implementation={attn_implementation!r}",
            got=f"{path}: {str(error)[:200]}",
            next_step="choose another attention, or another model",
        ) from error
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise CorruptFile(
            expected=f"every weight of a {type(model).__name__} in {path}",
            got=f"{len(names)} missing, such as {names[0]}",
            next_step="copy or download the folder again; some shards may be absent",
        )
    return model


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar for seconds of reading; put back as it was."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def require_causal(config: PretrainedConfig, spec: str) -> None:
    """Refuse models of more than text, encoder-decoders and classes without a causal head.

    Raises:
        UnsupportedGeometry: with what it is.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    foreign = [name for name in _FOREIGN_PARTS if getattr(config, name, None) is not None]
    got = None
    if foreign:
        got = f"{config.model_type} with {', '.join(foreign)}: more than text"
    elif getattr(config, "is_encoder_decoder", False):
        got = f"{config.model_type}, an encoder-decoder"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        got = f"{config.model_type}, which has no causal language model class"
    if got is not None:
        raise UnsupportedGeometry(
            expected=f"a text-only causal language model for {spec!r}",
            got=got,
            next_step="use the text-only checkpoint of the family",
        )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise BadInput(
            expected=f"a dtype: auto, {', '.join(DTYPES)}",
            got=repr(name),
            next_step="leave it out for float32 on the CPU and bfloat16 elsewhere",
        )
    return DTYPES[name]


def _device(name: str) -> torch.device:
    wrong = BadInput(
        expected="a device: cpu, cuda or cuda:N", got=repr(name), next_step="choose one of them"
    )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong from error
    if device.type not in ("cpu", "cuda"):
        raise wrong
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            expected=f"the device {name}",
            got=f"{torch.cuda.device_count()} CUDA devices on this machine",
            next_step="use --device cpu, or a torch build with CUDA",
        )
    return device


def _unreadable(path: Path, error: BaseException) -> CorruptFile:
    return CorruptFile(
        expected=f"readable model files in {path}",
        got=f"{type(error).__name__}: {str(error).strip()[:200]}",
        next_step="the file may be truncated: copy or download the folder again",
    )
