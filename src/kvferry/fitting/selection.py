"""Which source layers feed which receiver layer: chosen on a subsample, before the long capture.

Moments across all pairs of source layers don't fit for large models. So each source layer's
features are reduced to their leading principal components on a few thousand rows, and layers are
added greedily, each time the one that raises R^2 on the select documents most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvferry.fitting.moments import Candidates

COMPONENTS = 64
SHORTLIST = 12
_RIDGE = 1e-2


def choose_layers(
    fit: tuple[list[Tensor], dict[str, Tensor]],
    select: tuple[list[Tensor], dict[str, Tensor]],
    *,
    k_max: int,
) -> tuple[Candidates, dict[str, Any]]:
    """Order source layers for every target.

    Args:
        fit: per source layer features ``[N, F]`` and per target values ``[N, W]``.
        select: the same on select documents.
        k_max: how many layers to keep for a target.

    Returns:
        the candidates, best first, and per target the select R^2 after each layer and the single
        layers' R^2.
    """
    z_fit, z_select = _reduce(fit[0], select[0])
    depth, width = len(fit[0]), z_fit.shape[1] // len(fit[0])
    gram = z_fit.T @ z_fit / z_fit.shape[0]
    gram_select = z_select.T @ z_select / z_select.shape[0]
    candidates: Candidates = {}
    report: dict[str, Any] = {}
    for name, target in fit[1].items():
        mean = target.double().mean(0)
        y_fit = target.double() - mean
        y_select = select[1][name].double() - mean
        cross = z_fit.T @ y_fit / y_fit.shape[0]
        cross_select = z_select.T @ y_select / y_select.shape[0]
        # The select rows' own mean counts as unexplained, as it does for the map in use.
        total = max(float((y_select - y_select.mean(0)).square().mean(0).sum()), 1e-12)
        raw = float(y_select.square().mean(0).sum())

        def r_squared(
            layers: list[int],
            width: int = width,
            cross: Tensor = cross,
            cross_select: Tensor = cross_select,
            raw: float = raw,
            total: float = total,
        ) -> float:
            index = torch.cat([torch.arange(i * width, (i + 1) * width) for i in layers])
            left = gram[index][:, index] + _RIDGE * torch.eye(len(index), dtype=torch.float64)
            weight = torch.linalg.solve(left, cross[index])
            error = raw - 2 * float((weight * cross_select[index]).sum())
            error += float((weight * (gram_select[index][:, index] @ weight)).sum())
            return 1.0 - error / total

        single = [r_squared([i]) for i in range(depth)]
        shortlist = sorted(range(depth), key=lambda i: -single[i])[: max(SHORTLIST, k_max)]
        chosen: list[int] = []
        steps: list[float] = []
        while len(chosen) < min(k_max, depth):
            scores = {i: r_squared([*chosen, i]) for i in shortlist if i not in chosen}
            best = max(scores, key=lambda i: (scores[i], -i))
            chosen.append(best)
            steps.append(round(scores[best], 6))
        candidates[name] = chosen
        report[name] = {"select_r2": steps, "single_r2": [round(s, 4) for s in single]}
    return candidates, report


def _reduce(fit: list[Tensor], select: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Leading principal components of every layer, whitened by the fit rows' variance."""
    reduced_fit, reduced_select = [], []
    for x_fit, x_select in zip(fit, select, strict=True):
        x = x_fit.double()
        mean = x.mean(0)
        scale = (x - mean).square().mean(0).sqrt().clamp_min(1e-9)
        x = (x - mean) / scale
        values, vectors = torch.linalg.eigh(x.T @ x / x.shape[0])
        keep = min(COMPONENTS, x.shape[1])
        basis = vectors[:, -keep:] / values[-keep:].clamp_min(1e-9).sqrt()
        reduced_fit.append(x @ basis)
        reduced_select.append(((x_select.double() - mean) / scale) @ basis)
    return torch.cat(reduced_fit, dim=1), torch.cat(reduced_select, dim=1)
