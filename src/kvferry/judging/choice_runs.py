"""Questions with candidates, asked in every arm and control: records first, figures from them.

Owns the run over texts (one line a text and arm, resumable) and what is counted from it: right
answers with Wilson's interval, paired exact tests of the transfer against every other arm, and the
share of the way from no context, and from the weaker model, to native reading. One call:
``run_choices(ferries, parts, folder, arguments=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput
from kvferry.judging.paired_stats import paired, wilson
from kvferry.judging.tasks.facts import CUE, PARTS, VERSION, FactText, make_texts
from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    read_json,
    read_records,
    sole_writer,
    start_records,
    write_json,
)
from kvferry.terminal import progress

if TYPE_CHECKING:
    from kvferry.running.choices import Asked
    from kvferry.running.handoff import Handoff

ARMS = ("source_native", "transfer", "receiver_native", "no_context", "wrong_document")


def asked_of(ferry: Handoff, text: FactText) -> tuple[Asked, ...]:
    """A text's questions as token ids, each candidate with the blank that stands before it."""
    from kvferry.running.choices import Asked

    return tuple(
        Asked(
            ferry.layout.tail(question.text, cue=CUE),
            tuple(ferry.layout.continuation(f" {word}") for word in question.candidates),
            question.answer,
        )
        for question in text.questions
    )


def run_choices(
    ferries: dict[str, Handoff],
    parts: dict[str, Sequence[FactText]],
    folder: Path,
    *,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Ask every question in every arm; resumes where it stopped.

    Args:
        ferries: name -> handoff; they may share ``Readings``.
        parts: name -> texts; a wrong document is the text before, of the same part.
        folder: gets ``header.json``, ``records.jsonl`` and ``summary.json``.

    Returns:
        the summary.

    Raises:
        BadInput: fewer than two texts in a part, or a folder of another run.
    """
    if short := [name for name, texts in parts.items() if len(texts) < 2]:
        raise BadInput(
            expected="two or more texts in each part (one is another's wrong document)",
            got=f"fewer in {', '.join(short)}",
            next_step="ask for more texts",
        )
    header = {
        "format": "kvferry-choices-1",
        "maps": {
            name: {
                "identity": ferry.map.identity,
                "source": ferry.source.spec,
                "receiver": ferry.receiver.spec,
                "revisions": [ferry.source.revision, ferry.receiver.revision],
                **ferry.rounding,
            }
            for name, ferry in ferries.items()
        },
        "texts": {name: [text.text_id for text in texts] for name, texts in parts.items()},
        "arguments": arguments,
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "run"):
        path = start_records(folder, header, same=("maps", "texts", "arguments"))
        done = {(r["map"], r["part"], r["text_id"]) for r in read_records(path)}
        total = len(ferries) * sum(map(len, parts.values()))
        with progress("questions", total=total, unit="texts", done=float(len(done))) as advance:
            for part, texts in parts.items():
                for place, text in enumerate(texts):
                    for name, ferry in ferries.items():
                        if (name, part, text.text_id) in done:
                            continue
                        row = _one(ferry, text, texts[place - 1])
                        row |= {"map": name, "part": part, "text_id": text.text_id}
                        add_record(path, row)
                        advance(1)
        summary = summarise_choices(folder)
        write_json(folder / "summary.json", summary)
    return summary


def run_facts(
    ferries: dict[str, Handoff],
    folder: Path,
    *,
    texts: int,
    seed: int,
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """The invented facts as a choice run.

    Args:
        texts: of each part, 16 questions each.
        seed: of the texts; not one that was tuned on.
        parts: of ``PARTS``.
    """
    return run_choices(
        ferries,
        {part: make_texts(part, texts, seed=seed) for part in PARTS if part in parts},
        folder,
        arguments={"task": VERSION, "texts": texts, "seed": seed, "parts": list(parts)},
    )


def _one(ferry: Handoff, text: FactText, other: FactText) -> dict[str, Any]:
    from kvferry.running.choices import choices

    asked = asked_of(ferry, text)
    chosen = {}
    for arm in ARMS:
        held = ferry.hand_over(text.context, arm=arm, other_context=other.context)  # type: ignore[arg-type]
        chosen[arm] = choices(held.loaded, held.cache, asked)
    return {
        "chosen": chosen,
        "right": [question.answer for question in text.questions],
        "kinds": [question.kind for question in text.questions],
        "wrong_text_id": other.text_id,
    }


def summarise_choices(folder: Path) -> dict[str, Any]:
    """Every figure from the records alone."""
    header = read_json(folder / "header.json")
    records = read_records(folder / "records.jsonl")
    table: dict[str, dict[str, Any]] = {}
    for name in header["maps"]:
        table[name] = {}
        for part in header["texts"]:
            rows = [r for r in records if r["map"] == name and r["part"] == part]
            if rows:
                table[name][part] = _figures(rows)
    return {"maps": table, "arguments": header["arguments"]}


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hits = {
        arm: [c == a for row in rows for c, a in zip(row["chosen"][arm], row["right"], strict=True)]
        for arm in ARMS
    }
    n = len(hits["transfer"])
    right = {arm: sum(found) for arm, found in hits.items()}
    entry: dict[str, Any] = {"n": n, "texts": len(rows), "arms": {}, "paired": {}}
    for arm in ARMS:
        low, high = wilson(right[arm], n)
        entry["arms"][arm] = {"correct": right[arm], "low": low, "high": high}
        if arm == "transfer":
            continue
        test = paired(hits["transfer"], hits[arm])
        entry["paired"][f"transfer_against_{arm}"] = test._asdict()
    entry["recovered"] = _share(right, "no_context", "receiver_native")
    weaker, stronger = sorted(("source_native", "receiver_native"), key=right.__getitem__)
    entry["gap_recovered"] = _share(right, weaker, stronger)
    entry["weaker"] = weaker
    return entry


def _share(right: dict[str, int], low: str, high: str) -> float | None:
    span = right[high] - right[low]
    return (right["transfer"] - right[low]) / span if span > 0 else None
