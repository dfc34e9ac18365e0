"""Weight-only quantisation of a loaded model by torchao (extra ``quant``).

Owns what ``int8`` and ``int4`` mean here: every linear layer of the decoder, symmetric; the
embedding, the output head, norms and biases stay in the compute dtype. ``int8`` has a scale for
each output, ``int4`` for each output and group of 32 inputs. Computation is in the compute dtype,
and gradients reach the activations, so that a corrector can be tuned through such a receiver.
On the CPU torchao keeps int4 numbers a byte each: quality is that of int4, memory that of int8.
Its packed CPU layout is a prototype without gradients. One call: ``quantise(model, "int8")``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.errors import BadInput, UnsupportedGeometry

GROUP = 32
QUANTISED = ("int8", "int4")


def quantise(model: Any, precision: str) -> None:
    """Replace the decoder's linear weights, in place.

    Args:
        model: a causal language model on its device.
        precision: ``int8`` or ``int4``.

    Raises:
        BadInput: torchao is absent.
        UnsupportedGeometry: a layer whose inputs are no multiple of a group (int4).
    """
    require_library(precision)
    with _quiet():
        from torchao.quantization import (
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
            quantize_,
        )
    decoder = model.get_decoder()
    config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
    if precision == "int4":
        for name, module in decoder.named_modules():
            if isinstance(module, nn.Linear) and module.in_features % GROUP:
                raise UnsupportedGeometry(
                    expected=f"linear layers with a multiple of {GROUP} inputs, for int4",
                    got=f"{module.in_features} in {name}",
                    next_step="load the weights in int8",
                )
        int4: Any = getattr(torch, "int4")  # noqa: B009, torch's own stubs don't name it
        config = IntxWeightOnlyConfig(int4, PerGroup(GROUP))
    quantize_(decoder, config)


def require_library(precision: str | None) -> None:
    """Stop before anything heavy where the library is missing that a precision needs.

    Raises:
        BadInput: with the command that installs it.
    """
    if precision not in QUANTISED:
        return
    try:
        with _quiet():
            import torchao  # noqa: F401
    except ImportError as error:
        raise BadInput(
            expected=f"torchao, for weights in {precision}",
            got="it is not installed",
            next_step='pip install "kvferry[quant]"',
        ) from error


def import_quietly() -> None:
    """transformers imports torchao by itself where it is installed; this keeps that silent."""
    with suppress(ImportError), _quiet():
        import torchao  # noqa: F401


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao speaks of CUDA parts on every import; what it raises is still seen."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def weight_bytes(model: Any) -> int:
    """Bytes that a model's parameters take in memory, scales of quantised ones included."""
    return sum(_nbytes(parameter.data) for parameter in model.parameters())


def _nbytes(tensor: Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(_nbytes(getattr(tensor, name)) for name in flatten()[0])
