"""The ablation's table, from its records alone; needs no torch.

One call: ``table_lines(folder)`` gives Markdown, the best recovered share first; variants that
weren't measured through the receiver come last, by the R^2 of K and V.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.errors import BadInput
from kvferry.provenance import read_object, read_records

COLUMNS = (
    "variant",
    "recovered (95 %)",
    "wrong document",
    "cosine",
    "R² K",
    "R² V",
    "rows",
    "M numbers",
    "int8 MB",
    "M multiply-adds a token",
)


def table_rows(folder: Path) -> list[dict[str, Any]]:
    """A row a variant, sorted.

    Raises:
        BadInput: no records.
    """
    records = read_records(folder / "records.jsonl")
    if not records:
        raise BadInput(
            expected=f"records in {folder}", got="none", next_step="run `fit` with that --out"
        )
    measured = _measured(folder / "losses")
    rows = [record | {"losses": measured.get(record["variant"])} for record in records]
    return sorted(rows, key=_rank)


def table_lines(folder: Path) -> list[str]:
    """Markdown, with n in the line above it."""
    header = read_object(folder / "header.json", "direction", "rows", "models", "books")
    rows = table_rows(folder)
    names = [header["models"][side] for side in ("source", "receiver")]
    if header["direction"] == "backward":
        names.reverse()
    texts = sorted({row["losses"]["n"] for row in rows if row["losses"]})
    told = f"; losses on n = {' or '.join(map(str, texts))} texts" if texts else "; no losses yet"
    lines = [
        f"**{names[0]} → {names[1]}**: {header['rows']['fit']} rows for the fit, "
        f"{header['rows']['test']} test rows{told} ({'; '.join(header['books'])})",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for row in rows:
        cells = [row["variant"], *_losses(row["losses"])]
        cells += [f"{row['r2_test'][kind]:.3f}" for kind in ("K", "V")]
        cells += [str(row["rows"]), f"{row['numbers'] / 1e6:.2f}"]
        cells += [f"{row['int8_bytes'] / 1e6:.1f}", f"{row['multiply_adds'] / 1e6:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _measured(folder: Path) -> dict[str, Any]:
    """Variant -> its entry of ``kvferry.fitting.fidelity``'s summary."""
    if not read_records(folder / "records.jsonl"):
        return {}
    from kvferry.fitting.fidelity import summarise

    entries: dict[str, Any] = summarise(folder)["maps"]
    return entries


def _losses(entry: dict[str, Any] | None) -> list[str]:
    if entry is None:
        return ["-", "-", "-"]
    share = entry["recovered"]["transfer"]
    return [
        f"{share['value']:.3f} ({share['low']:.2f} … {share['high']:.2f})",
        f"{entry['recovered']['wrong_document']['value']:.2f}",
        f"{entry['attention_cosine']['transfer']:.3f}",
    ]


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
    entry = row["losses"]
    if entry is None:
        return True, -sum(row["r2_test"].values())
    return False, -entry["recovered"]["transfer"]["value"]
