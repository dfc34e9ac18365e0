"""Solve for the map from moments: source layers and lambda chosen on select documents.

For each receiver layer and kind (K or V) a ridge on standardised features with centred targets
(Hoerl and Kennard 1970), in float64: with Gram G, cross C (both over rows) and feature deviations
s, the weights are ``S (S G S + lambda I)^-1 S C`` where ``S = diag(1/s)``. R^2 on other documents
follows from their moments alone, exactly. Seconds for any k and lambda.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import BadInput, NotFinite
from kvferry.fitting.capture_store import load_capture
from kvferry.fitting.moments import KINDS, Moments, target_key
from kvferry.maps.linear import LinearTarget, fold
from kvferry.terminal import progress

LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class FitSettings:
    """What is solved for.

    Attributes:
        k_key: source layers for a key target; ``None`` for all captured.
        k_value: source layers for a value target.
        lambdas: candidates, relative to features of unit variance.
        direction: ``forward`` (source to receiver) or ``backward``.
    """

    k_key: int | None = None
    k_value: int | None = None
    lambdas: Sequence[float] = LAMBDAS
    direction: str = "forward"


@dataclass
class FitResult:
    """Targets and how well each does, by split.

    Attributes:
        targets: target name -> its map, float32.
        r2: split -> target name -> R^2 over the target's dims together.
        lambdas: target name -> the one chosen.
        header: the capture's header.
    """

    targets: dict[str, LinearTarget]
    r2: dict[str, dict[str, float]]
    lambdas: dict[str, float]
    header: dict[str, Any]
    settings: FitSettings = field(default_factory=FitSettings)

    def mean_r2(self, split: str, kind: str) -> float:
        """Mean over receiver layers."""
        values = [v for name, v in self.r2[split].items() if name.endswith(f".{kind}")]
        return sum(values) / len(values)


def fit(folder: Path, settings: FitSettings) -> FitResult:
    """Solve every target of a finished capture.

    Raises:
        BadInput: k beyond what was captured, or no lambda.
        CorruptFile: a damaged capture.
        NotFinite: moments with NaN.
    """
    header, by_split = load_capture(folder, settings.direction)
    if not settings.lambdas or not all(0 < value < math.inf for value in settings.lambdas):
        raise BadInput(
            expected="finite lambdas above zero",
            got=str(list(settings.lambdas)),
            next_step="give e.g. --lambda 0.01",
        )
    if empty := [split for split, moments in by_split.items() if not moments.rows]:
        raise BadInput(
            expected="rows for each of fit, select and test",
            got=f"none for {', '.join(empty)} in {folder}",
            next_step="merge it with the other shards first",
        )
    moments = by_split["fit"]
    depth = len(moments.candidates) // len(KINDS)
    result = FitResult({}, {s: {} for s in by_split}, {}, header, settings)
    with progress("fit", total=depth, unit="layers") as advance:
        for layer in range(depth):
            for kind in KINDS:
                name = target_key(layer, kind)
                k = settings.k_key if kind == "K" else settings.k_value
                _solve_target(result, name, _first(moments, name, k), by_split)
            advance(1)
    return result


def _first(moments: Moments, name: str, k: int | None) -> list[int]:
    layers = moments.candidates[name]
    if k is not None and not 1 <= k <= len(layers):
        raise BadInput(
            expected=f"k between 1 and {len(layers)}, the layers captured",
            got=str(k),
            next_step="choose a smaller k, or capture again with a larger --k-max",
        )
    return layers[:k]


def _solve_target(
    result: FitResult, name: str, layers: list[int], by_split: dict[str, Moments]
) -> None:
    gram, cross, x_mean, y_mean = by_split["fit"].problem(name, layers)
    if not bool(torch.isfinite(gram).all() and torch.isfinite(cross).all()):
        raise NotFinite(
            expected="finite moments",
            got=f"NaN or infinity for receiver layer {name}",
            next_step="capture again in float32",
        )
    scale = gram.diagonal().clamp_min(1e-12).sqrt()
    scale = torch.where(gram.diagonal() > 1e-10, scale, torch.full_like(scale, torch.inf))
    standard = gram / torch.outer(scale, scale)
    right = cross / scale[:, None]
    best: tuple[float, float, Tensor] | None = None
    for value in result.settings.lambdas:
        left = standard + value * torch.eye(len(standard), dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(left)
        if int(failed):
            continue  # too small for these moments: not positive definite any more
        weight = torch.cholesky_solve(right, factor) / scale[:, None]
        score = r_squared(by_split["select"], name, layers, weight, x_mean, y_mean)
        if best is None or score > best[0]:
            best = (score, value, weight)
    if best is None:
        raise BadInput(
            expected=f"a lambda large enough for target {name}",
            got=str(list(result.settings.lambdas)),
            next_step="give e.g. --lambda 0.001",
        )
    _, result.lambdas[name], weight = best
    for split, moments in by_split.items():
        result.r2[split][name] = r_squared(moments, name, layers, weight, x_mean, y_mean)
    result.targets[name] = LinearTarget(
        tuple(layers), weight.float(), fold(weight, x_mean, y_mean).float(), x_mean.float()
    )


def r_squared(
    moments: Moments,
    name: str,
    layers: list[int],
    weight: Tensor,
    x_mean: Tensor,
    y_mean: Tensor,
) -> float:
    """R^2 of ``(x - x_mean) W + y_mean`` on the rows of some moments, all dims together.

    Args:
        weight: ``[kF, W]`` float64.
        x_mean: ``[kF]``, the fit's own.
        y_mean: ``[W]``, the fit's own.
    """
    gram, cross, x_here, y_here = moments.problem(name, layers)
    variance = moments.target_variance(name).sum()
    error = variance - 2 * (weight * cross).sum() + (weight * (gram @ weight)).sum()
    offset = (y_here - y_mean) - (x_here - x_mean) @ weight
    # A target that never changes has a variance of zero, or just below by rounding.
    return float(1.0 - (error + offset.square().sum()) / variance.clamp_min(1e-12))
