"""Maps side by side on the same questions and texts, with paired tests, from kept records.

Owns what is compared: right answers after the handoff (exact McNemar) and next-token losses
(Wilcoxon), each map against the first. One call: ``compare_choices(folder)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput
from kvferry.judging.paired_stats import paired
from kvferry.provenance import read_json, read_records

if TYPE_CHECKING:
    from kvferry.running.handoff import Handoff


def compare_choices(folder: Path) -> dict[str, Any]:
    """Each map's transfer against the first map's, a part of a choice run each.

    Args:
        folder: of ``run_choices`` with two maps or more.

    Returns:
        part -> ``{n, maps: {name: {correct, fixed, regressed, p_two_sided}}}``; the tests are
        against the first map.

    Raises:
        BadInput: fewer than two maps.
    """
    header, records = read_json(folder / "header.json"), read_records(folder / "records.jsonl")
    names = _names(header["maps"], folder)
    found: dict[str, Any] = {}
    for part in header["texts"]:
        hits: dict[str, dict[tuple[str, int], bool]] = {name: {} for name in names}
        for row in records:
            if row["part"] == part:
                pairs = zip(row["chosen"]["transfer"], row["right"], strict=True)
                for place, (chosen, right) in enumerate(pairs):
                    hits[row["map"]][row["text_id"], place] = chosen == right
        shared = sorted(set.intersection(*(set(each) for each in hits.values())))
        first = [hits[names[0]][key] for key in shared]
        rows = {}
        for name in names:
            mine = [hits[name][key] for key in shared]
            test = paired(mine, first)
            rows[name] = {
                "correct": sum(mine),
                "fixed": test.fixed,
                "regressed": test.regressed,
                "p_two_sided": test.p_two_sided,
            }
        found[part] = {"n": len(shared), "maps": rows}
    return found


def compare_losses(folder: Path) -> dict[str, Any]:
    """Each map's next-token loss after the handoff against the first map's.

    Args:
        folder: of ``kvferry measure`` with two maps or more.

    Returns:
        ``{n, maps: {name: {nll, recovered, better, p_two_sided}}}``; better counts texts.

    Raises:
        BadInput: fewer than two maps.
    """
    from scipy import stats

    header, summary = read_json(folder / "header.json"), read_json(folder / "summary.json")
    names = _names(header["maps"], folder)
    losses: dict[str, dict[str, float]] = {name: {} for name in names}
    for row in read_records(folder / "records.jsonl"):
        losses[row["map"]][row["doc_id"]] = row["nll"]["transfer"]
    shared = sorted(set.intersection(*(set(each) for each in losses.values())))
    rows = {}
    for name in names:
        gain = [losses[names[0]][key] - losses[name][key] for key in shared]
        tested = any(gain)
        rows[name] = {
            "nll": sum(losses[name][key] for key in shared) / len(shared),
            "recovered": summary["maps"][name]["recovered"]["transfer"]["value"],
            "better": sum(value > 0 for value in gain),
            "p_two_sided": float(stats.wilcoxon(gain).pvalue) if tested else 1.0,
        }
    return {"n": len(shared), "maps": rows}


def require_comparable(ferries: dict[str, Handoff]) -> None:
    """Refuse what can't be compared, before anything is asked.

    Raises:
        BadInput: fewer than two maps, or maps of several pairs.
    """
    pairs = [(ferry.source.revision, ferry.receiver.revision) for ferry in ferries.values()]
    _require_two(list(ferries), pairs, "the command")


def _names(maps: dict[str, Any], folder: Path) -> list[str]:
    _require_two(list(maps), [(m["source"], m["receiver"]) for m in maps.values()], str(folder))
    return list(maps)


def _require_two(names: list[str], pairs: list[tuple[str, str]], where: str) -> None:
    if len(names) < 2:
        raise BadInput(
            expected=f"two maps or more in {where}",
            got=", ".join(names) or "none",
            next_step="give several maps, or --ridge to add each without its corrector",
        )
    if len(set(pairs)) > 1:
        raise BadInput(
            expected="maps of one source and receiver",
            got=f"{len(set(pairs))} pairs",
            next_step="compare maps of one direction at a time",
        )
