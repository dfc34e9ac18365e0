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
    within = {name: value for name, value in quality.items() if name != "held_out"}
    lines = [f"- {name}: {_value(value)}" for name, value in sorted(within.items())]
    if "held_out" in quality:
        lines += ["", "## On held-out texts", "", *held_out_lines(quality["held_out"])]
    return lines


def held_out_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of ``quality["held_out"]``: right answers, and losses on running text.

    Domain ``in``: the task, or a file of that name, is among what the map was made from (other
    texts of it); ``out``: it is not.
    """
    asked, read = ([r for r in rows if ("right" in r) == kind] for kind in (True, False))
    lines = []
    if asked:
        lines += [
            "Right answers. Recovered: from no context (0) to the receiver's own reading (1); p: "
            "transfer against no context and against the wrong document, exact McNemar.",
            "",
            "| task | domain | n | transfer | receiver | source | no context | wrong document | "
            "recovered | p |",
            "|" + "---|" * 10,
            *map(_asked_line, asked),
            "",
        ]
    if read:
        lines += [
            "Next-token losses in nats; p: Wilcoxon, one-sided.",
            "",
            "| text | domain | n | transfer | receiver | source | no context | wrong document | "
            "recovered (95 %) | p |",
            "|" + "---|" * 10,
            *map(_read_line, read),
            "",
        ]
    return lines[:-1]


_ORDER = ("transfer", "receiver_native", "source_native", "no_context", "wrong_document")


def _asked_line(row: dict[str, Any]) -> str:
    right = " | ".join(str(row["right"][arm]) for arm in _ORDER)
    share = "-" if row["recovered"] is None else f"{row['recovered']:.2f}"
    p = ", ".join(f"{row['p_two_sided'][arm]:.2g}" for arm in ("no_context", "wrong_document"))
    name = f"{row['task']}, {row['part'].replace('_', ' ')}"
    return f"| {name} | {row['domain']} | {row['n']} | {right} | {share} | {p} |"


def _read_line(row: dict[str, Any]) -> str:
    losses = " | ".join(f"{row['nll'][arm]:.3f}" for arm in _ORDER)
    low, high = row["interval"]
    share = f"{row['recovered']:.2f} ({low:.2f} … {high:.2f})"
    p = ", ".join(f"{row['p_one_sided'][arm]:.2g}" for arm in ("no_context", "wrong_document"))
    return f"| {row['part']} | {row['domain']} | {row['n']} | {losses} | {share} | {p} |"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_value(v)}" for k, v in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return str(value)
