"""Sizes of maps and moments for each k, and what one capture and fit take with given settings.

Owns the figures that ``kvferry check`` prints; the formulas are in ``estimate.py``. Nothing is
measured here. One call: ``map_rows(source, receiver, CaptureSettings())``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kvferry.fitting import estimate
from kvferry.fitting.capture import CaptureSettings
from kvferry.fitting.estimate import Rates
from kvferry.models.geometry import Geometry
from kvferry.models.light import LightModel

TABLE_K = 8
CORRECTOR_RANK = 32
"""Of the corrector whose size and cost are shown; both are proportional to it."""


class MapRow(BaseModel):
    """Sizes for one k; moments are a bound, of all splits and directions asked for.

    Multiply-adds are for one token; the corrector is of rank 32, in bfloat16 on disk.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    k: int
    features: int
    float32_bytes: int
    bfloat16_bytes: int
    int8_bytes: int
    corrector_bytes: int
    multiply_adds: int
    corrector_multiply_adds: int
    moments_bytes: int
    fits_memory: bool


class CaptureEstimate(BaseModel):
    """What capture and fit take with the settings given.

    Attributes:
        k: source layers a target that ``--memory`` is sure to hold (1 if none is).
        rows: of all three splits.
        models_bytes: weights, in main memory on the CPU and on the device elsewhere.
        peak_bytes: the most that moments and probe hold at one time, in main memory.
        device_free_bytes: ``None`` on the CPU or where there is no such device.
        basis: where the rates come from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    k: int
    rows: int
    tokens_read: int
    models_bytes: int
    moments_bytes: int
    probe_bytes: int
    peak_bytes: int
    fit_bytes: int
    memory_free_bytes: int
    device_free_bytes: int | None
    tokens_per_s: float
    read_s: float
    moments_s: float
    choose_s: float
    capture_s: float
    fit_s: float
    basis: str


def moments_need(k: int, ours: Geometry, theirs: Geometry, settings: CaptureSettings) -> int:
    """Bound on the moments of all splits and directions asked for, in bytes."""
    need = estimate.moments_bound_bytes(k, ours, theirs)
    if settings.both_directions:
        need += estimate.moments_bound_bytes(k, theirs, ours)
    return need


def _peak(k: int, rows: int, ours: Geometry, theirs: Geometry, settings: CaptureSettings) -> int:
    """While layers are chosen nothing is summed; afterwards the probe's caches are still there."""
    caches = rows * (ours.bytes_per_token(4) + theirs.bytes_per_token(4))
    chosen = caches + moments_need(k, ours, theirs, settings)
    return max(estimate.probe_bytes(rows, ours, theirs), chosen)


def map_rows(ours: Geometry, theirs: Geometry, settings: CaptureSettings) -> list[MapRow]:
    """One row for each k up to 8 or ``k_max``."""
    rows = []
    for k in range(1, min(max(TABLE_K, settings.k_max), ours.depth) + 1):
        moments = moments_need(k, ours, theirs, settings)
        residual = estimate.corrector_parameters(k, CORRECTOR_RANK, ours, theirs)
        rows.append(
            MapRow(
                k=k,
                features=k * estimate.feature_width(ours),
                float32_bytes=estimate.map_bytes(k, ours, theirs, "float32"),
                bfloat16_bytes=estimate.map_bytes(k, ours, theirs, "bfloat16"),
                int8_bytes=estimate.map_bytes(k, ours, theirs, "int8"),
                corrector_bytes=2 * residual,
                multiply_adds=estimate.map_multiply_adds(k, ours, theirs),
                corrector_multiply_adds=residual,
                moments_bytes=moments,
                fits_memory=moments <= settings.memory_bytes,
            )
        )
    return rows


def estimate_capture(
    source: LightModel,
    receiver: LightModel,
    settings: CaptureSettings,
    prefix: int,
    rates: Rates,
    device: str,
) -> CaptureEstimate:
    """What capture and fit take; the free memory is left for ``check_pair`` to fill in.

    Args:
        prefix: tokens of the constant prefix, read anew before every text.
    """
    ours, theirs = source.geometry, receiver.geometry
    assert ours is not None
    assert theirs is not None
    ways = [(ours, theirs), (theirs, ours)] if settings.both_directions else [(ours, theirs)]
    k_max = min(settings.k_max, ours.depth)
    k = estimate.largest_k(
        settings.memory_bytes, k_max, lambda k: moments_need(k, ours, theirs, settings)
    )
    k = max(k, 1)
    rows = settings.tokens + 2 * (settings.tokens // 8)
    length = settings.chunk_tokens + prefix
    read = rows * length // settings.chunk_tokens
    flops = sum(
        estimate.read_flops(shape, model.body_parameters, length)
        for model, shape in ((source, ours), (receiver, theirs))
    )
    probe_rows = (settings.probe_texts + max(settings.probe_texts // 2, 1)) * settings.chunk_tokens
    probe_rows = min(probe_rows, rows)
    per_s, double = rates.model_gflops * 1e9, rates.float64_gflops * 1e9
    read_s = read * flops / per_s
    moments_s = sum(rows * estimate.moments_flops(k, a, b) for a, b in ways) / double
    choose_s = sum(estimate.choose_flops(k_max, probe_rows, a, b) for a, b in ways) / double
    weight_bytes = 4 if device == "cpu" else 2
    return CaptureEstimate(
        k=k,
        rows=rows,
        tokens_read=read,
        models_bytes=weight_bytes * (source.parameters + receiver.parameters),
        moments_bytes=moments_need(k, ours, theirs, settings),
        probe_bytes=estimate.probe_bytes(probe_rows, ours, theirs),
        peak_bytes=_peak(k, probe_rows, ours, theirs, settings),
        fit_bytes=estimate.moments_bound_bytes(k, ours, theirs)
        + estimate.fit_bytes(k, ours, theirs),
        memory_free_bytes=0,
        device_free_bytes=None,
        tokens_per_s=per_s / flops,
        read_s=read_s,
        moments_s=moments_s,
        choose_s=choose_s,
        capture_s=read_s + moments_s + choose_s,
        fit_s=estimate.fit_flops(k, ours, theirs) / (double * estimate.SOLVE_EFFICIENCY),
        basis=rates.basis,
    )
