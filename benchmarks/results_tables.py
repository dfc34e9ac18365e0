"""The tables of README.md and docs/results.md, made from the records in docs/results/ alone.

    python benchmarks/results_tables.py [--check]

Rewrites what stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; with --check writes
nothing and ends with 1 if a page differs from its records.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridge_ablation.table import table_lines

from kvferry.fitting.fidelity import summarise
from kvferry.judging.choice_runs import summarise_choices
from kvferry.provenance import read_records

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / "docs" / "results"


def load(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def fidelity(folder: str) -> list[str]:
    summary = summarise(ROOT / folder)
    asked = summary["settings"]
    lines = []
    for name, entry in summary["maps"].items():
        lines += [
            f"**{name}** on {summary['label']}, n = {entry['n']} documents, "
            f"{asked['context_tokens']} + {asked['target_tokens']} tokens",
            "",
            "| arm or control | NLL | recovered | 95 % | top-1 | cosine | KL |",
            "|---|---|---|---|---|---|---|",
        ]
        for variant, nll in entry["nll"].items():
            r = entry["recovered"].get(variant)
            cells = [
                variant,
                f"{nll:.3f}",
                f"{r['value']:.2f}" if r else "-",
                f"{r['low']:.2f} … {r['high']:.2f}" if r else "-",
                *(
                    f"{entry[key][variant]:.2f}" if variant in entry[key] else "-"
                    for key in ("top1_agreement", "attention_cosine", "kl_nats")
                ),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for test, value in entry["paired"].items():
            lines.append(
                f"- {test.replace('_', ' ')}: {value['better']} of {value['n']} documents, "
                f"Wilcoxon one-sided p = {value['wilcoxon_one_sided_p']:.2g}"
            )
        lines.append("")
    return lines


def bench(name: str) -> list[str]:
    record = load(name)
    lines = [
        f"**{record['source']} → {record['receiver']}**, medians of {record['repeats']} in ms",
        "",
        "| tokens | arm | TTFT | spread | source | prefill | map | inject | tail | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["lengths"]:
        for arm, spans in row["arms"].items():
            ttft = spans["ttft"]
            parts = [
                f"{spans[p]['median']:.0f}" if p in spans else "-"
                for p in ("source_prefill", "prefill", "map", "inject", "tail")
            ]
            lines.append(
                f"| {row['context_tokens']} | {arm} | {ttft['median']:.0f} | "
                f"{ttft['min']:.0f} … {ttft['max']:.0f} | {' | '.join(parts)} | "
                f"{spans['decode_tokens_per_s']['median']:.1f} |"
            )
    lines.append("")
    for row in record["lengths"]:
        arms = row["arms"]
        added = arms["transfer"]["map"]["median"] + arms["transfer"]["inject"]["median"]
        share = 100 * added / arms["receiver_native"]["prefill"]["median"]
        lines.append(
            f"- {row['context_tokens']} tokens: map + inject {added:.0f} ms = {share:.1f} % of "
            "the receiver's prefill"
        )
    ratio = record["map_over_products"]
    lines.append(
        f"- the map over its bare matrix products at {ratio['tokens']} tokens: "
        f"{ratio['ratio']:.2f} (median of {ratio['repeats']} pairs)"
    )
    return [*lines, ""]


def ttft(_: str) -> list[str]:
    lines = [
        "| source → receiver | context tokens | receiver_native | transfer | source_native | "
        "map + inject over the receiver's prefill |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("bench-0.5b-to-1.5b.json", "bench-1.5b-to-0.5b.json"):
        record = load(name)
        for row in record["lengths"]:
            arms = row["arms"]
            median = {arm: spans["ttft"]["median"] for arm, spans in arms.items()}
            added = arms["transfer"]["map"]["median"] + arms["transfer"]["inject"]["median"]
            share = 100 * added / arms["receiver_native"]["prefill"]["median"]
            lines.append(
                f"| {record['source']} → {record['receiver']} | {row['context_tokens']} | "
                f"{median['receiver_native']:.0f} | {median['transfer']:.0f} | "
                f"{median['source_native']:.0f} | {share:.1f} % |"
            )
    return lines


def demo(name: str) -> list[str]:
    lines = []
    for d in load(name)["directions"]:
        lines += [
            f"**{d['source']} reads, {d['receiver']} answers**, n = {d['rows'][0]['n']} questions",
            "",
            "| arm or control | options | 95 % | free text | TTFT ms | tokens/s |",
            "|---|---|---|---|---|---|",
        ]
        for row in d["rows"]:
            lines.append(
                f"| {row['arm']} | {row['correct_choice']}/{row['n']} | "
                f"{row['low']:.2f} … {row['high']:.2f} | {row['correct_text']}/{row['n']} | "
                f"{row['ttft_ms_median']:.0f} | {row['decode_tokens_per_s']:.1f} |"
            )
        lines.append("")
    return lines


def sweep(name: str) -> list[str]:
    lines = ["| direction | k | K fit | K test | V fit | V test |", "|---|---|---|---|---|---|"]
    for row in load(name)["rows"]:
        fit, test = row["r2_fit"], row["r2_test"]
        lines.append(
            f"| {row['direction']} | {row['k']} | {fit['K']:.3f} | {test['K']:.3f} | "
            f"{fit['V']:.3f} | {test['V']:.3f} |"
        )
    return [*lines, ""]


def brief(folder: str) -> list[str]:
    summary = summarise(ROOT / folder)
    lines = []
    for name, entry in summary["maps"].items():
        r = {k: v["value"] for k, v in entry["recovered"].items()}
        t = entry["recovered"]["transfer"]
        lines.append(
            f"| {name} | {summary['label']} | {entry['n']} | **{t['value']:.2f}** "
            f"({t['low']:.2f} … {t['high']:.2f}) | {r['wrong_document']:.2f} | "
            f"{r['receiver_native_wrong_document']:.2f} | {r['transfer_without_anchors']:.2f} | "
            f"{r['source_native']:.2f} |"
        )
    return lines


def recovered(_: str) -> list[str]:
    return _recovered("measure-anatomy", "measure-anatomy-generic", "measure-wikitext")


def more_rows(folder: str) -> list[str]:
    return _recovered(f"{folder}/measure-anatomy", f"{folder}/measure-wikitext")


def _recovered(*folders: str) -> list[str]:
    head = [
        "| map | text | n | transfer (95 %) | wrong document | the same, read natively | "
        "without anchors | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return [*head, *(line for folder in folders for line in brief(folder))]


def generic(folder: str) -> list[str]:
    """The corrected map's figures, and a paired test against the ridge alone on the same texts."""
    from scipy import stats

    ridge = {
        r["doc_id"]: r["nll"]
        for r in read_records(ROOT / "measure-anatomy" / "records.jsonl")
        if r["map"] == "qwen-0.5b-to-1.5b"
    }
    rows = read_records(ROOT / folder / "records.jsonl")
    gains = [ridge[r["doc_id"]]["transfer"] - r["nll"]["transfer"] for r in rows]
    test = stats.wilcoxon(gains, alternative="greater")
    return [
        *fidelity(folder),
        f"- against the ridge alone: loss lower on {sum(g > 0 for g in gains)} of {len(gains)} "
        f"documents, by {sum(gains) / len(gains):.3f} nats, Wilcoxon one-sided p = "
        f"{test.pvalue:.2g}",
    ]


def choices(folder: str) -> list[str]:
    """Right choices in every arm, for each map and part of a choice run."""
    summary = summarise_choices(ROOT / folder)
    lines = []
    for part in next(iter(summary["maps"].values())):
        found = {name: parts[part] for name, parts in summary["maps"].items()}
        first = next(iter(found.values()))
        lines += [f"**{part.replace('_', ' ')}**, n = {first['n']}", ""]
        lines += [
            "| arm or control | right | 95 % | recovered | of the gap | transfer against it |"
        ]
        lines += ["|---|---|---|---|---|---|"]
        shared = ("source_native", "receiver_native", "no_context")
        for arm in shared:
            lines.append(_choice_row(arm, first, arm))
        for name, entry in found.items():
            lines += [
                _choice_row(f"{arm}, {name}", entry, arm) for arm in ("transfer", "wrong_document")
            ]
        lines.append("")
    return lines


def _choice_row(label: str, entry: dict[str, Any], arm: str) -> str:
    value = entry["arms"][arm]
    shares, test = ("-", "-"), "-"
    if arm == "transfer":
        shares = tuple(
            "-" if entry[key] is None else f"{100 * entry[key]:.0f} %"
            for key in ("recovered", "gap_recovered")
        )
    else:
        against = entry["paired"][f"transfer_against_{arm}"]
        test = f"+{against['fixed']} −{against['regressed']}, p = {against['p_two_sided']:.2g}"
    return (
        f"| {label} | {value['correct']} | {value['low']:.2f} … {value['high']:.2f} | "
        f"{shares[0]} | {shares[1]} | {test} |"
    )


def tuning(name: str) -> list[str]:
    """How a corrector did on held-out texts while it was trained."""
    record = load(name)
    lines = [
        "| step | chosen right | after the wrong document | held-out loss |",
        "|---|---|---|---|",
    ]
    for row in record["log"]:
        best = " (kept)" if row["step"] == record.get("best", {}).get("step") else ""
        lines.append(
            f"| {row['step']}{best} | {row['correct']}/{row['n']} | "
            f"{row['wrong_document_correct']}/{row['n']} | {row['held_out_loss']:.3f} |"
        )
    return lines


def speed(name: str) -> list[str]:
    r = load(name)
    return [
        f"Capture ran at {100 * r['ratio']:.1f} % of the plain forward speed "
        f"({100 * r['ratio_min']:.1f} … {100 * r['ratio_max']:.1f} % over {r['n']} texts of "
        f"512 tokens, k up to {r['k_max']}, one direction)."
    ]


def ridge(folder: str) -> list[str]:
    return table_lines(ROOT / folder)


TABLES: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "recovered": (recovered, ""),
    "ttft": (ttft, ""),
    "anatomy": (fidelity, "measure-anatomy"),
    "anatomy-generic": (generic, "measure-anatomy-generic"),
    "tuning-generic": (tuning, "tuned/qwen-0.5b-to-1.5b-generic/tune.json"),
    "tuning-facts-backward": (tuning, "tuned/qwen-1.5b-to-0.5b-facts/tune.json"),
    "tuning-facts-raw-units": (tuning, "tuned/qwen-1.5b-to-0.5b-facts-raw-units.json"),
    "wikitext": (fidelity, "measure-wikitext"),
    "demo": (demo, "demo/demo.json"),
    "bench-forward": (bench, "bench-0.5b-to-1.5b.json"),
    "bench-backward": (bench, "bench-1.5b-to-0.5b.json"),
    "capture-speed": (speed, "capture_speed.json"),
    "k-sweep": (sweep, "k_sweep.json"),
    "rows-160k": (more_rows, "rows-160k"),
    "ridge-forward": (ridge, "ridge-ablation/forward"),
    "ridge-backward": (ridge, "ridge-ablation/backward"),
}
BLOCK = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def render(match: re.Match[str]) -> str:
    make, name = TABLES[match[1]]
    body = "\n".join(make(name)).strip()
    return f"<!-- table: {match[1]} -->\n\n{body}\n\n<!-- end -->"


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    docs = REPOSITORY / "docs"
    for page in (REPOSITORY / "README.md", docs / "results.md", docs / "ridge-ablation.md"):
        text = page.read_text(encoding="utf-8")
        made = BLOCK.sub(render, text)
        if made != text:
            stale.append(page.name)
            if not check:
                page.write_text(made, encoding="utf-8")
    print(f"{'differ' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
