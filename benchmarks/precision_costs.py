"""What each precision costs in quality: running text and invented facts, one row a precision.

    python benchmarks/precision_costs.py --map MAP --corpus TEXTS --out FOLDER

A row is WEIGHTS/CACHE for both models, or SOURCE:RECEIVER with one such pair each; @MAP behind it
takes a map that was made at that precision instead of serving --map at it. Rows are kept in
FOLDER/NAME (records, summaries, row.json); a stopped run resumes within a row, and finished rows
are not run again. The first row is what the others are compared with, text by text and question by
question. The table is printed and written to FOLDER/table.md, all figures to FOLDER/costs.json.
"""

from __future__ import annotations

import argparse
import gc
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import BadInput, KvferryError
from kvferry.fitting.corpus import Corpus, read_corpus
from kvferry.fitting.fidelity import FidelitySettings, measure, pick
from kvferry.judging.choice_runs import run_facts
from kvferry.judging.paired_stats import paired
from kvferry.judging.tasks.facts import PARTS
from kvferry.maps.cache_map import CacheMap
from kvferry.models.cache_precision import bytes_per_token
from kvferry.models.geometry import Geometry
from kvferry.models.load import LoadedModel
from kvferry.models.precision import Precision
from kvferry.models.quantise import weight_bytes
from kvferry.provenance import (
    code_version,
    machine,
    read_json,
    read_records,
    sole_writer,
    write_json,
    write_text,
)
from kvferry.running.handoff import Handoff, load_side
from kvferry.running.readings import Readings
from kvferry.terminal import say

ROWS = (
    "float32/float32",
    "float32/bfloat16",
    "float32/fp8",
    "float32/fp8_per_token_head",
    "float32/int8",
    "int8/float32",
    "int8/fp8_per_token_head",
    "int4/float32",
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    text: str
    source: Precision
    receiver: Precision
    map: Path | None

    @property
    def name(self) -> str:
        """A folder's name."""
        return re.sub(r"[^\w.-]+", "+", self.text.partition("@")[0]) + (
            f"@{self.map.name}" if self.map else ""
        )


def parse_row(text: str) -> Row:
    """``int8/fp8``, ``int8/fp8:float32/int8``, ``float32/fp8@maps/fp8``."""
    named, _, folder = text.partition("@")
    parts = [part.split("/") for part in named.split(":")]
    if len(parts) not in (1, 2) or any(len(part) != 2 for part in parts):
        raise BadInput(
            expected="WEIGHTS/CACHE, or SOURCE:RECEIVER with one such pair each; @MAP behind it",
            got=text,
            next_step="e.g. int8/fp8 or float32/int8:int8/fp8@maps/mine",
        )
    sides = [Precision(*part) for part in parts]
    return Row(text, sides[0], sides[-1], Path(folder) if folder else None)


class Models:
    """The two models, loaded again only when their weights' precision changes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.held: dict[str, LoadedModel] = {}

    def side(self, cache_map: CacheMap, side: Any, precision: Precision) -> LoadedModel:
        """One model with its cache as the row says."""
        held = self.held.get(side)
        if held is None or held.precision.weights != precision.weights:
            held = None
            self.held.pop(side, None)
            gc.collect()  # its memory goes before the next one comes
            where, wanted = getattr(self.given, side), Precision(precision.weights)
            held = load_side(cache_map, side, where, device=self.given.device, precision=wanted)
            self.held[side] = held
        computed = str(held.dtype).removeprefix("torch.")
        return replace(held, cache=None if precision.cache == computed else precision.cache)


def run_row(row: Row, corpus: Corpus, models: Models, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one precision; resumes."""
    folder = given.out / row.name
    cache_map = CacheMap.from_pretrained(row.map or given.map)
    source = models.side(cache_map, "source", row.source)
    receiver = models.side(cache_map, "receiver", row.receiver)
    ferry = Handoff(
        source,
        receiver,
        cache_map,
        readings=Readings(3 * given.n),
        allow_other_precision=row.map is None,
    )
    settings = FidelitySettings(given.context_tokens, given.target_tokens)
    texts = pick(ferry, corpus.documents, given.n, settings)
    arguments = {"n": given.n, "section_chars": given.section_chars}
    label = ", ".join(Path(c).name for c in given.corpus)
    prose = measure(
        {"map": ferry}, texts, settings, folder / "prose", label=label, arguments=arguments
    )
    facts = run_facts(
        {"map": ferry}, folder / "facts", texts=given.facts, seed=given.seed, parts=given.parts
    )
    return {
        "row": row.text,
        "asked": _asked(given, cache_map),
        "prose": prose["maps"]["map"],
        "facts": facts["maps"]["map"],
        "size": {
            name: _size(loaded) for name, loaded in (("source", source), ("receiver", receiver))
        },
        "code": code_version(),
        "machine": machine(),
    }


def _asked(given: argparse.Namespace, cache_map: CacheMap) -> dict[str, Any]:
    names = ("n", "facts", "seed", "parts", "context_tokens", "target_tokens", "section_chars")
    asked = {name: getattr(given, name) for name in names}
    corpus = [Path(c).name for c in given.corpus]
    return {**asked, "map": cache_map.identity, "device": given.device, "corpus": corpus}


def _size(loaded: LoadedModel) -> dict[str, Any]:
    """What was in memory for the weights, and what an engine would keep of a token."""
    layers = Geometry.from_config(loaded.model.config).layers
    kind = loaded.precision.cache or "float32"
    return {
        "weight_bytes": weight_bytes(loaded.model),
        "cache_bytes_per_token": sum(
            bytes_per_token(layer.num_kv_heads, layer.head_dim, 1, kind) for layer in layers
        ),
    }


def costs(rows: list[Row], out: Path) -> list[dict[str, Any]]:
    """Every finished row beside the first, from the records alone."""
    table = []
    for row in rows:
        kept = read_json(out / row.name / "row.json")
        first = out / rows[0].name
        kept["cost"] = {
            "nats": _nats(first, out / row.name),
            "facts": _facts(first, out / row.name),
        }
        table.append(kept)
    return table


def _nats(first: Path, other: Path) -> dict[str, Any]:
    """Loss after the handoff minus the first row's, by text; bootstrap over texts."""
    one, two = (
        {r["doc_id"]: r["nll"] for r in read_records(f / "prose" / "records.jsonl")}
        for f in (first, other)
    )
    shared = sorted(set(one) & set(two))
    found: dict[str, Any] = {"n": len(shared)}
    for arm in ("transfer", "receiver_native"):
        more = np.array([two[key][arm] - one[key][arm] for key in shared])
        picks = np.random.default_rng(0).integers(0, len(more), (10_000, len(more)))
        low, high = np.quantile(more[picks].mean(1), [0.025, 0.975])
        found[arm] = {"mean": float(more.mean()), "low": float(low), "high": float(high)}
    return found


def _facts(first: Path, other: Path) -> dict[str, Any]:
    one, two = (_hits(folder / "facts" / "records.jsonl") for folder in (first, other))
    shared = sorted(set(one) & set(two))
    test = paired([two[key] for key in shared], [one[key] for key in shared])
    return {"n": len(shared), **test._asdict()}


def _hits(path: Path) -> dict[tuple[str, str, int], bool]:
    return {
        (row["part"], row["text_id"], place): chosen == right
        for row in read_records(path)
        for place, (chosen, right) in enumerate(
            zip(row["chosen"]["transfer"], row["right"], strict=True)
        )
    }


def table_text(table: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "weights/cache",
        "n texts",
        "NLL native",
        "NLL transfer",
        "recovered (95 %)",
        "transfer against first, nats (95 %)",
        "top-1",
        "cosine",
        "n facts",
        "native",
        "transfer",
        "no context",
        "against first",
        "weights MB",
        "cache kB a token",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for index, kept in enumerate(table):
        prose, cost = kept["prose"], kept["cost"]
        back, more = prose["recovered"]["transfer"], cost["nats"]["transfer"]
        right = {
            arm: sum(part["arms"][arm]["correct"] for part in kept["facts"].values())
            for arm in ("receiver_native", "transfer", "no_context")
        }
        sizes = kept["size"].values()
        against = (
            ("-", "-")
            if index == 0
            else (
                f"{more['mean']:+.3f} ({more['low']:+.3f} … {more['high']:+.3f})",
                f"+{cost['facts']['fixed']} -{cost['facts']['regressed']}, "
                f"p = {cost['facts']['p_two_sided']:.2g}",
            )
        )
        cells = (
            kept["row"].partition("@")[0] + (" (own map)" if "@" in kept["row"] else ""),
            str(prose["n"]),
            f"{prose['nll']['receiver_native']:.3f}",
            f"{prose['nll']['transfer']:.3f}",
            f"{back['value']:.2f} ({back['low']:.2f} … {back['high']:.2f})",
            against[0],
            f"{prose['top1_agreement']['transfer']:.3f}",
            f"{prose['attention_cosine']['transfer']:.3f}",
            str(sum(part["n"] for part in kept["facts"].values())),
            *(str(right[arm]) for arm in ("receiver_native", "transfer", "no_context")),
            against[1],
            " + ".join(f"{size['weight_bytes'] / 1e6:.0f}" for size in sizes),
            " + ".join(f"{size['cache_bytes_per_token'] / 1e3:.1f}" for size in sizes),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--map", required=True)
    parser.add_argument("--corpus", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--row", action="append", help="repeat; default: " + " ".join(ROWS))
    parser.add_argument("-n", type=int, default=12, help="documents")
    parser.add_argument("--facts", type=int, default=4, help="texts a part, 16 questions each")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["seen", "unseen_kinds"])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--context-tokens", type=int, default=447)
    parser.add_argument("--target-tokens", type=int, default=64)
    parser.add_argument("--section-chars", type=int)
    parser.add_argument("--source")
    parser.add_argument("--receiver")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    try:
        _run(given)
    except KvferryError as error:
        for line in error.lines():
            say(line)
        raise SystemExit(2) from error


def _run(given: argparse.Namespace) -> None:
    rows = [parse_row(text) for text in given.row or ROWS]
    corpus = read_corpus(given.corpus, section_chars=given.section_chars)
    models = Models(given)
    with sole_writer(given.out, "table"):
        for place, row in enumerate(rows, start=1):
            path = given.out / row.name / "row.json"
            if path.exists():
                asked = _asked(given, CacheMap.from_pretrained(row.map or given.map))
                if read_json(path)["asked"] == asked:
                    say(f"row {place} of {len(rows)}, {row.text}: done before")
                    continue
            say(f"row {place} of {len(rows)}: {row.text}")
            write_json(path, run_row(row, corpus, models, given))
        table = costs(rows, given.out)
        write_json(given.out / "costs.json", {"rows": table})
        write_text(given.out / "table.md", table_text(table))
    print(table_text(table))


if __name__ == "__main__":
    main()
