"""What capture and fit will take, from two geometries: bytes, arithmetic, seconds.

Owns the formulas. Bounds hold for whatever layers capture chooses, since nothing is chosen yet.
The only figures that are not exact arithmetic are ``READ_EFFICIENCY`` and ``SOLVE_EFFICIENCY``;
how they were measured stands beside them. One call: ``map_bytes(4, source, receiver, "int8")``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.fitting.corpus import SPLITS
from kvferry.fitting.selection import COMPONENTS, SHORTLIST
from kvferry.maps.cache_map import Stored
from kvferry.models.geometry import Geometry

STORED_BYTES: dict[Stored, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

READ_EFFICIENCY = 1.06
"""A model's prefill rate over the rate of a 512 x 2048 x 2048 float32 product, both FLOP/s.

Measured on two cores at 160 GFLOP/s for the product: Qwen2.5-Coder-0.5B and 1.5B together read 50
tokens/s in texts of 512 (3.40 GFLOP a token: 170 GFLOP/s). The 0.5B alone read 240 tokens/s, which
this constant puts at 230. Above one, since the models' products are wider than the yardstick.
"""

SOLVE_EFFICIENCY = 0.5
"""Cholesky and solves over the rate of a float64 product; the fit is seconds, so this is rough."""

_YARDSTICK = (512, 2048, 2048)


@dataclass(frozen=True)
class Rates:
    """How fast a machine multiplies.

    Attributes:
        model_gflops: what the models reach while they read, 1e9 FLOP a second.
        float64_gflops: in float64, where the moments are summed.
        basis: how the two were got, for the printed line.
    """

    model_gflops: float
    float64_gflops: float
    basis: str


def measure_rates(*, seconds: float = 0.5) -> Rates:
    """Time float32 and float64 products on this machine's CPU, ``seconds`` each.

    The models' rate is the float32 product's times ``READ_EFFICIENCY``.
    """
    import torch

    def rate(dtype: torch.dtype) -> float:
        rows, inner, columns = _YARDSTICK
        a = torch.ones(rows, inner, dtype=dtype)
        b = torch.ones(inner, columns, dtype=dtype)
        return _best_rate(lambda: torch.matmul(a, b), 2.0 * rows * inner * columns, seconds)

    single, double = rate(torch.float32), rate(torch.float64)
    threads = torch.get_num_threads()
    basis = (
        f"at {single:.0f} GFLOP/s float32 and {double:.0f} float64, measured now on "
        f"{threads} thread{'s' if threads > 1 else ''}"
    )
    return Rates(single * READ_EFFICIENCY, double, basis)


def _best_rate(product: Callable[[], object], flops: float, seconds: float) -> float:
    product()
    started = time.perf_counter()
    calls = 0
    while calls < 2 or time.perf_counter() - started < seconds:
        product()
        calls += 1
    return flops * calls / (time.perf_counter() - started) / 1e9


def feature_width(source: Geometry) -> int:
    """Floats one source layer gives a token: keys and values of its widest layer."""
    return 2 * max(layer.width for layer in source.layers)


def target_width(receiver: Geometry) -> int:
    """Floats a target has a token."""
    return max(layer.width for layer in receiver.layers)


def target_count(receiver: Geometry) -> int:
    """Targets of a map: K and V of every receiver layer."""
    return 2 * receiver.depth


def map_bytes(k: int, source: Geometry, receiver: Geometry, stored: Stored) -> int:
    """Bytes of a map's weights on disk (the file's header of a few KB left out).

    Args:
        k: source layers a target.
        stored: dtype; biases stay float32, and int8 adds a float32 scale a row and a column.
    """
    rows = min(k, source.depth) * feature_width(source)
    total = 0
    for layer in receiver.layers:
        one = rows * layer.width * STORED_BYTES[stored] + 4 * layer.width
        if stored == "int8":
            one += 4 * (rows + layer.width)
        total += 2 * one
    return total


def map_multiply_adds(k: int, source: Geometry, receiver: Geometry) -> int:
    """Multiply-adds that a ridge map takes for one token."""
    rows = min(k, source.depth) * feature_width(source)
    return sum(2 * rows * layer.width for layer in receiver.layers)


def corrector_parameters(k: int, rank: int, source: Geometry, receiver: Geometry) -> int:
    """Trained numbers of a corrector of kind ``features`` on keys and values of all layers.

    Its multiply-adds for one token are as many; on disk it takes two bytes each (bfloat16).
    """
    rows = min(k, source.depth) * feature_width(source)
    return sum(2 * rank * (rows + layer.width) for layer in receiver.layers)


def pairs_bound(k: int, source: Geometry, receiver: Geometry) -> int:
    """Most Gram blocks between source layers that lists of ``k`` can ask for."""
    depth, k = source.depth, min(k, source.depth)
    targets = target_count(receiver)
    diagonal = min(depth, targets * k)
    return diagonal + min(depth * (depth - 1) // 2, targets * k * (k - 1) // 2)


def moments_bound_bytes(
    k: int, source: Geometry, receiver: Geometry, *, splits: int = len(SPLITS)
) -> int:
    """Most bytes that float64 moments can take, whatever layers are chosen.

    Args:
        k: source layers kept a target.
        splits: fit, select and test each have their own.
    """
    f, w = feature_width(source), target_width(receiver)
    cross = target_count(receiver) * min(k, source.depth)
    return 8 * splits * (pairs_bound(k, source, receiver) * f * f + cross * f * w)


def largest_k(limit_bytes: int, k_max: int, bytes_of: Callable[[int], int]) -> int:
    """The largest k up to ``k_max`` whose ``bytes_of`` is within the limit; 0 if none."""
    return max((k for k in range(1, k_max + 1) if bytes_of(k) <= limit_bytes), default=0)


def probe_bytes(rows: int, source: Geometry, receiver: Geometry) -> int:
    """Bytes held while source layers are chosen, float32.

    At the peak the caches and the stacked rows of both models, each text's source features, and the
    whitened components of every source layer in float64. On 3072 rows of random caches with the
    sizes of Qwen2.5-Coder-0.5B and 1.5B the process grew by 533 MB, where this says 617.
    """
    per_row = 3 * source.bytes_per_token(4) + 2 * receiver.bytes_per_token(4)
    return rows * (per_row + 8 * COMPONENTS * source.depth)


def read_flops(geometry: Geometry, body_parameters: int, text_tokens: int) -> float:
    """Arithmetic of one token's prefill in a text, FLOP: 2 a parameter, and attention.

    Args:
        body_parameters: without the embedding matrices (logits are not computed).
        text_tokens: length of the text; a token sees half of it on average.
    """
    head_dim = geometry.layers[0].head_dim
    seen = text_tokens / 2
    attention = 4.0 * geometry.depth * geometry.num_attention_heads * head_dim * seen
    return 2.0 * body_parameters + attention


def moments_flops(k: int, source: Geometry, receiver: Geometry) -> float:
    """Arithmetic that adding one row to the moments takes at most, FLOP in float64."""
    f, w = feature_width(source), target_width(receiver)
    gram = 2.0 * f * f * pairs_bound(k, source, receiver)
    return gram + 2.0 * min(k, source.depth) * f * w * target_count(receiver)


def choose_flops(k: int, rows: int, source: Geometry, receiver: Geometry) -> float:
    """Arithmetic of choosing source layers on the probe's rows, FLOP in float64."""
    f, w = feature_width(source), target_width(receiver)
    depth, targets = source.depth, target_count(receiver)
    c = min(COMPONENTS, f)
    reduce = depth * (2.0 * rows * f * f + 10.0 * f**3 + 2.0 * rows * f * c)
    products = 2.0 * rows * (c * depth) ** 2 + targets * 2.0 * rows * c * depth * w
    tried = depth * _solve_flops(c, w)
    tried += sum(max(SHORTLIST, k) * _solve_flops(c * s, w) for s in range(1, min(k, depth) + 1))
    return reduce + products + targets * tried


def _solve_flops(n: int, w: int) -> float:
    return 2.0 / 3.0 * n**3 + 4.0 * n * n * w


def fit_flops(k: int, source: Geometry, receiver: Geometry, *, lambdas: int = 4) -> float:
    """Arithmetic of solving every target, FLOP in float64.

    A Cholesky factor, a solve and a score for each lambda, then a score a split.
    """
    n, w = min(k, source.depth) * feature_width(source), target_width(receiver)
    one = lambdas * (n**3 / 3.0 + 4.0 * n * n * w) + len(SPLITS) * 2.0 * n * n * w
    return target_count(receiver) * one


def fit_bytes(k: int, source: Geometry, receiver: Geometry) -> int:
    """Bytes beside the moments while one target is solved: five matrices of its features."""
    n = min(k, source.depth) * feature_width(source)
    return 8 * 5 * n * n + map_bytes(k, source, receiver, "float32")
