"""What held-out runs say of a map, from their records alone, for the map's card.

Owns which figures of a run stand on a card, and whether what was asked is like what the map was
made from. One call: ``held_out_results(folder, CacheMap.from_pretrained(...))``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput, WrongPair
from kvferry.judging.tasks.facts import VERSION as FACTS
from kvferry.judging.tasks.facts import seed_of
from kvferry.provenance import read_json, sha256_file

if TYPE_CHECKING:
    from kvferry.maps.cache_map import CacheMap

CHOICES, LOSSES = "kvferry-choices-1", "kvferry-fidelity-1"


def held_out_results(folder: Path, cache_map: CacheMap) -> list[dict[str, Any]]:
    """One row for each part of a run, as ``quality["held_out"]`` of a map has them.

    Args:
        folder: of ``kvferry bench facts``, ``bench questions`` or ``measure``; one of
            ``kvferry compare`` holds two of them.
        cache_map: whose figures are wanted; found in the run by its identity.

    Returns:
        rows with ``task``, ``part``, ``n``, ``domain`` (``in`` or ``out`` of what the map was made
        from), figures of every arm and control, tests, and the records' sha256 and code.

    Raises:
        BadInput: no such run there.
        WrongPair: a run of other maps.
    """
    inner = [
        folder / name for name in ("facts", "prose") if (folder / name / "header.json").exists()
    ]
    if inner and not (folder / "header.json").exists():
        return [row for one in inner for row in held_out_results(one, cache_map)]
    if not (folder / "header.json").exists() or not (folder / "summary.json").exists():
        raise BadInput(
            expected="a finished run of bench facts, bench questions, measure or compare",
            got=f"no header.json and summary.json in {folder}",
            next_step="give the folder that was its --out",
        )
    header, summary = read_json(folder / "header.json"), read_json(folder / "summary.json")
    if header.get("format") not in (CHOICES, LOSSES):
        raise BadInput(
            expected=f"records of {CHOICES} or {LOSSES}",
            got=f"{header.get('format')} in {folder}",
            next_step="a card takes runs of bench facts, bench questions, measure and compare",
        )
    name = _name(header, cache_map, folder)
    shared = {
        "records_sha256": sha256_file(folder / "records.jsonl"),
        "code": header["code"],
        "matmul": header["machine"].get("matmul", "float32"),
    }
    entry = summary["maps"][name]
    if header["format"] == LOSSES:
        return [_losses(entry, summary["label"], cache_map) | shared]
    task = header["arguments"]["task"]
    return [_choices(found, task, part, cache_map) | shared for part, found in entry.items()]


def _name(header: dict[str, Any], cache_map: CacheMap, folder: Path) -> str:
    for name, entry in header["maps"].items():
        if entry["identity"] == cache_map.identity:
            return str(name)
    raise WrongPair(
        expected=f"a run with this map ({cache_map.identity[:16]}) in {folder}",
        got=", ".join(f"{n} {m['identity'][:16]}" for n, m in header["maps"].items()),
        next_step="measure this map, or give the card of the map that was measured",
    )


def _choices(entry: dict[str, Any], task: str, part: str, cache_map: CacheMap) -> dict[str, Any]:
    data = (cache_map.config.tuned or {}).get("data", {})
    if task == FACTS:
        known = part == "seen" and any(seed_of(name) is not None for name in data)
    else:
        known = any(name.startswith("rows:") for name in data)
    return {
        "task": task,
        "part": part,
        "n": entry["n"],
        "domain": "in" if known else "out",
        "right": {arm: found["correct"] for arm, found in entry["arms"].items()},
        "recovered": entry["recovered"],
        "gap_recovered": entry["gap_recovered"],
        "p_two_sided": {
            arm: entry["paired"][f"transfer_against_{arm}"]["p_two_sided"]
            for arm in ("no_context", "wrong_document")
        },
    }


def _losses(entry: dict[str, Any], label: str, cache_map: CacheMap) -> dict[str, Any]:
    read = set(cache_map.config.fitted.get("corpus", {}).get("sources", ()))
    read |= {name.partition(":")[2] for name in (cache_map.config.tuned or {}).get("data", {})}
    share = entry["recovered"]["transfer"]
    return {
        "task": "running text",
        "part": label,
        "n": entry["n"],
        "domain": "in" if read & set(label.split(", ")) else "out",
        "nll": entry["nll"],
        "recovered": share["value"],
        "interval": [share["low"], share["high"]],
        "wrong_document_recovered": entry["recovered"]["wrong_document"]["value"],
        "p_one_sided": {
            arm: entry["paired"][f"transfer_better_than_{arm}"]["wilcoxon_one_sided_p"]
            for arm in ("no_context", "wrong_document")
        },
    }
