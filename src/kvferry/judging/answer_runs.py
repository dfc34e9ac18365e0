"""Free-form answers in every arm and control: one record a prompt and arm, resumable.

Owns the run and its plain counts; who answers better is for ``blind`` to say. A model's own answer
(native, or without a context) doesn't depend on the map, so it is generated once and copied to the
other maps of the run. One call: ``run_answers(ferries, prompts, folder, max_new_tokens=160)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput
from kvferry.judging.tasks.prompts import VERSION, Prompt
from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    read_json,
    read_records,
    sha256_text,
    sole_writer,
    start_records,
    write_json,
)
from kvferry.terminal import progress

if TYPE_CHECKING:
    from kvferry.running.handoff import Handoff

NAMED = ("map", "prompt_id", "arm")
"""What names a record."""
SAID = ("text", "token_ids", "cut", "ttft_ms")
ARMS = ("transfer", "receiver_native", "source_native", "no_context", "wrong_document")


def run_answers(
    ferries: dict[str, Handoff],
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    max_new_tokens: int,
    arms: Sequence[str] = ARMS,
) -> dict[str, Any]:
    """Generate greedy answers; resumes where it stopped, and takes up arms left out before.

    Args:
        ferries: name -> handoff; they may share ``Readings``.
        prompts: two or more; a wrong document is the context of the prompt before.
        folder: gets ``header.json``, ``records.jsonl`` and ``summary.json``.
        arms: of ``ARMS``.

    Raises:
        BadInput: fewer than two prompts, or a folder of another run.
    """
    if len(prompts) < 2:
        raise BadInput(
            expected="two or more prompts (one is another's wrong document)",
            got=str(len(prompts)),
            next_step="ask for more",
        )
    for ferry in ferries.values():  # before the first of many answers
        sizes = [int(ferry.layout.context(prompt.context).numel()) for prompt in prompts]
        for place, prompt in enumerate(prompts):
            tail = int(ferry.layout.tail(prompt.question).numel())
            ferry.require_room(max(sizes[place], sizes[place - 1]), tail + max_new_tokens)
    header = {
        "format": "kvferry-answers-1",
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
        "prompts": [prompt.record() for prompt in prompts],
        "arguments": {"task": VERSION, "max_new_tokens": max_new_tokens, "temperature": 0},
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "run"):
        path = start_records(folder, header, same=("maps", "prompts", "arguments"), once=NAMED)
        kept = read_records(path, keys=("own", *SAID), once=NAMED)
        done = {(r["map"], r["prompt_id"], r["arm"]) for r in kept}
        own = {r["own"]: r for r in kept if r["own"]}
        total = len(ferries) * len(prompts) * len(arms)
        asked = {(m, p.id, a) for m in ferries for p in prompts for a in arms}
        with progress("answers", total=total, unit="answers", done=len(done & asked)) as advance:
            for place, prompt in enumerate(prompts):
                for name, ferry in ferries.items():
                    for arm in arms:
                        if (name, prompt.id, arm) in done:
                            continue
                        key = _own(ferry, prompt, arm)
                        row = own.get(key) if key else None
                        copied = row is not None
                        if row is None:
                            other = prompts[place - 1].context
                            row = _answer(ferry, prompt, arm, other, max_new_tokens) | {"own": key}
                            if key:
                                own[key] = row
                        about = {"map": name, "prompt_id": prompt.id, "arm": arm, "copied": copied}
                        add_record(path, row | about)
                        done.add((name, prompt.id, arm))
                        advance(1)
        summary = summarise_answers(folder)
        write_json(folder / "summary.json", summary)
    return summary


def _own(ferry: Handoff, prompt: Prompt, arm: str) -> str | None:
    """Names an answer that no map had a part in."""
    if arm not in ("receiver_native", "source_native", "no_context"):
        return None
    model = ferry.source if arm == "source_native" else ferry.receiver
    served = "" if model.precision.plain else f" {model.precision}"
    read = "" if arm == "no_context" else prompt.id
    return sha256_text(
        f"{model.revision}{served} {ferry.layout.identity} {read} / {prompt.question}"
    )


def _answer(
    ferry: Handoff, prompt: Prompt, arm: str, other: str, max_new_tokens: int
) -> dict[str, Any]:
    from kvferry.running.decode import Sampling

    found = ferry(
        prompt.context,
        prompt.question,
        arm=arm,  # type: ignore[arg-type]
        sampling=Sampling(max_new_tokens),
        other_context=other,
    )
    return {
        "text": found.text,
        "token_ids": list(found.token_ids),
        "cut": len(found.token_ids) >= max_new_tokens,
        "prompt_tokens": found.prompt_tokens,
        "timings_ms": {part: round(value, 2) for part, value in found.timings.items()},
        "ttft_ms": round(found.ttft_ms, 2),
        "decode_tokens_per_s": found.decode_tokens_per_s,
    }


def summarise_answers(folder: Path) -> dict[str, Any]:
    """Counts by map and arm, from the records alone."""
    header = read_json(folder / "header.json")
    records = read_records(folder / "records.jsonl", keys=SAID, once=NAMED)
    table: dict[str, dict[str, Any]] = {}
    for name in header["maps"]:
        table[name] = {}
        for arm in ARMS:
            rows = [r for r in records if r["map"] == name and r["arm"] == arm]
            if rows:
                table[name][arm] = {
                    "n": len(rows),
                    "empty": sum(not row["text"].strip() for row in rows),
                    "cut": sum(row["cut"] for row in rows),
                    "mean_tokens": fmean(len(row["token_ids"]) for row in rows),
                    "median_ttft_ms": median(row["ttft_ms"] for row in rows),
                }
    return {"maps": table, "arguments": header["arguments"]}
