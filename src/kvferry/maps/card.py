"""A map's card: what was fitted, on what, and how well; written from the config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.maps.cache_map import MapConfig, MapSide


def card_text(config: MapConfig, weights_bytes: int) -> str:
    """Markdown with hub metadata on top."""
    fitted, quality = config.fitted, config.quality
    lines = [
        "---",
        "library_name: kvferry",
        "tags: [kv-cache, kvferry]",
        "---",
        "",
        f"# {config.source.spec} reads, {config.receiver.spec} answers",
        "",
        "A kvferry cache map: it turns the key/value cache that the source built while reading",
        "into one that the receiver can answer from.",
        "",
        "| | source | receiver |",
        "|---|---|---|",
        f"| model | {config.source.spec} | {config.receiver.spec} |",
        f"| revision | `{config.source.revision[:16]}` | `{config.receiver.revision[:16]}` |",
        f"| precision | {_precision(config.source)} | {_precision(config.receiver)} |",
        f"| layers | {len(config.source.geometry['layers'])} "
        f"| {len(config.receiver.geometry['layers'])} |",
        "",
        f"Ridge on un-rotated keys and values, k = {config.k_key} source layers for keys and "
        f"{config.k_value} for values, stored as {config.stored} ({weights_bytes / 1e6:.1f} MB).",
        "",
        "## Fitted on",
        "",
        *(f"- {name}: {_value(value)}" for name, value in sorted(fitted.items())),
        "",
        *_tuned_lines(config),
        "## How well",
        "",
        "R^2 is a within-pair diagnostic and no evidence that facts come through.",
        "",
        *_quality_lines(quality),
        "",
        "## Use",
        "",
        "```python",
        "from kvferry import Handoff",
        "",
        'ferry = Handoff.from_pretrained("THIS FOLDER")',
        'print(ferry(context, question, arm="transfer").text)',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _precision(side: MapSide) -> str:
    unpacked = f" (weights unpacked from {side.packed})" if side.packed else ""
    return f"{side.precision}{unpacked}"


def _tuned_lines(config: MapConfig) -> list[str]:
    if config.corrector is None:
        return []
    made = config.corrector
    placed = " and ".join(n for n, on in (("keys", made.keys), ("values", made.values)) if on)
    tuned = config.tuned or {}
    return [
        "## Corrector",
        "",
        f"A residual trained through the frozen receiver beside the ridge: {made.kind}, rank "
        f"{made.rank}, on {placed}. Scope: {tuned.get('scope', 'not said')}.",
        "",
        *(f"- {name}: {_value(value)}" for name, value in sorted(tuned.items())),
        "",
    ]


def _quality_lines(quality: dict[str, Any]) -> list[str]:
    if not quality:
        return ["not measured"]
    return [f"- {name}: {_value(value)}" for name, value in sorted(quality.items())]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_value(v)}" for k, v in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return str(value)
