"""From a fit to the artifact: config, weights and card in one value."""

from __future__ import annotations

from typing import Any

from kvferry.fitting.corpus import SPLITS
from kvferry.fitting.ridge import FitResult
from kvferry.maps.cache_map import FORMAT, UNSAVED, CacheMap, MapConfig, MapSide, Stored
from kvferry.provenance import code_version


def build_map(result: FitResult, *, stored: Stored = "float32") -> CacheMap:
    """A map from a fit's targets; figures from moments go into its config.

    Args:
        result: solved targets.
        stored: dtype of the weights on disk.
    """
    header = result.header
    swap = result.settings.direction == "backward"
    sides = [MapSide.model_validate(header[name]) for name in ("source", "receiver")]
    if swap:
        sides.reverse()
    keys = [len(t.layers) for name, t in result.targets.items() if name.endswith(".K")]
    values = [len(t.layers) for name, t in result.targets.items() if name.endswith(".V")]
    config = MapConfig(
        format=FORMAT,
        source=sides[0],
        receiver=sides[1],
        k_key=max(keys),
        k_value=max(values),
        stored=stored,
        layers={name: list(target.layers) for name, target in result.targets.items()},
        layout=header["layout"],
        layout_identity=header["layout_identity"],
        fitted=_fitted(result),
        quality=_quality(result),
        weights_sha256=UNSAVED,
    )
    return CacheMap(config, result.targets)


def _fitted(result: FitResult) -> dict[str, Any]:
    header = result.header
    chosen = sorted(set(result.lambdas.values()))
    return {
        "corpus": header["corpus"],
        "rows": header["rows"],
        "capture": header["identity"],
        "moments_sha256": header["moments_sha256"],
        "lambdas_chosen": {
            f"{value:g}": sum(v == value for v in result.lambdas.values()) for value in chosen
        },
        "chunk_tokens": header["settings"]["chunk_tokens"],
        "code": code_version(),
    }


def _quality(result: FitResult) -> dict[str, Any]:
    rows = result.header["rows"]
    return {
        f"r2_{split}": {
            "K": round(result.mean_r2(split, "K"), 4),
            "V": round(result.mean_r2(split, "V"), 4),
            "rows": rows[split],
        }
        for split in SPLITS
    }
