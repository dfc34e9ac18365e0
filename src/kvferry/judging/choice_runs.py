"""Questions with candidates, asked in every arm and control: records first, figures from them.

Owns the run over texts (one line a text and arm, resumable) and what is counted from it: right
answers with Wilson's interval, paired exact tests of the transfer against every other arm, and the
share of the way from no context, and from the weaker model, to native reading. The likeliest
option is the one with the highest mean log-likelihood a token (the headline, and what a corrector
is judged by); the highest sum is recorded and counted beside it. One call:
``run_choices(ferries, parts, folder, arguments=...)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput
from kvferry.judging.paired_stats import paired, wilson
from kvferry.judging.tasks.choice_text import ChoiceText
from kvferry.judging.tasks.facts import CUE, HELD_OUT_SEED, PARTS, VERSION, make_texts, seed_of
from kvferry.judging.tasks.words import holds_phrase, stems
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
    from torch import Tensor

    from kvferry.judging.tasks.openstax import QuestionSet
    from kvferry.running.choices import Asked
    from kvferry.running.handoff import Handoff

NAMED = ("map", "part", "text_id")
"""What names a record."""
ARMS = ("source_native", "transfer", "receiver_native", "no_context", "wrong_document")


def asked_of(ferry: Handoff, text: ChoiceText, cue: str = CUE) -> tuple[Asked, ...]:
    """A text's questions as token ids, each candidate with the blank that stands before it."""
    from kvferry.running.choices import Asked

    return tuple(
        Asked(
            ferry.layout.tail(question.text, cue=cue),
            tuple(ferry.layout.continuation(f" {word}") for word in question.candidates),
            question.answer,
        )
        for question in text.questions
    )


def run_choices(
    ferries: dict[str, Handoff],
    parts: dict[str, Sequence[ChoiceText]],
    folder: Path,
    *,
    arguments: dict[str, Any],
    cue: str = CUE,
) -> dict[str, Any]:
    """Ask every question in every arm; resumes where it stopped.

    Args:
        ferries: name -> handoff; they may share ``Readings``.
        parts: name -> texts; a wrong document is the text before, of the same part and (where
            texts have groups) of another group.
        folder: gets ``header.json``, ``records.jsonl`` and ``summary.json``.
        arguments: what the run is, for the header; a folder of other ones is refused.
        cue: first words of the answer, before an option.

    Returns:
        the summary.

    Raises:
        BadInput: fewer than two texts in a part, a text without a wrong document, or a folder of
            another run.
        ContextTooLong: a text with a question is beyond a model's limit.
    """
    if short := [name for name, texts in parts.items() if len(texts) < 2]:
        raise BadInput(
            expected="two or more texts in each part (one is another's wrong document)",
            got=f"fewer in {', '.join(short)}",
            next_step="ask for more texts",
        )
    others = {name: wrong_documents(texts) for name, texts in parts.items()}
    for ferry in ferries.values():
        for name, texts in parts.items():
            _require_room(ferry, texts, others[name], cue)
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
        "arguments": arguments if cue == CUE else arguments | {"cue": cue},
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "run"):
        path = start_records(folder, header, same=("maps", "texts", "arguments"), once=NAMED)
        done = {(r["map"], r["part"], r["text_id"]) for r in read_records(path)}
        total = len(ferries) * sum(map(len, parts.values()))
        with progress("questions", total=total, unit="texts", done=float(len(done))) as advance:
            for part, texts in parts.items():
                for place, text in enumerate(texts):
                    known: dict[Any, list[list[Tensor]]] = {}
                    for name, ferry in ferries.items():
                        if (name, part, text.text_id) in done:
                            continue
                        row = _one(ferry, text, texts[others[part][place]], cue, known)
                        row |= {"map": name, "part": part, "text_id": text.text_id}
                        add_record(path, row)
                        advance(1)
        summary = summarise_choices(folder)
        write_json(folder / "summary.json", summary)
    return summary


def _require_room(
    ferry: Handoff, texts: Sequence[ChoiceText], others: Sequence[int], cue: str
) -> None:
    """Every text, and its wrong document, with its questions, before any is read."""
    sizes = [int(ferry.layout.context(text.context).numel()) for text in texts]
    for place, text in enumerate(texts):
        held = max(sizes[place], sizes[others[place]])
        ferry.require_asked(held, asked_of(ferry, text, cue))


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

    Raises:
        BadInput: seen facts of a seed that a map was tuned or judged on while tuning.
    """
    for name, ferry in ferries.items():
        used = seeds_used((ferry.map.config.tuned or {}).get("data", {}))
        if "seen" in parts and seed in used:
            raise BadInput(
                expected="facts of a seed that was not tuned on",
                got=f"seed {seed}, on which {name} was tuned or judged while tuning",
                next_step="choose another --seed",
            )
    return run_choices(
        ferries,
        {part: make_texts(part, texts, seed=seed) for part in PARTS if part in parts},
        folder,
        arguments={"task": VERSION, "texts": texts, "seed": seed, "parts": list(parts)},
    )


def seeds_used(data: Iterable[str]) -> set[int]:
    """Seeds of seen facts that a tuning read.

    Args:
        data: names of its data, as a map's card has them.
    """
    trained = {seed for name in data if (seed := seed_of(name)) is not None}
    return trained | {seed + HELD_OUT_SEED for seed in trained}


def run_questions(
    ferries: dict[str, Handoff],
    folder: Path,
    questions: QuestionSet,
    *,
    n: int | None = None,
    seed: int = 0,
    cue: str = CUE,
) -> dict[str, Any]:
    """Review questions as a choice run of one part, named as the split.

    Args:
        n: at most this many questions; ``None`` for all.
        seed: of the sample and of the excerpts' order.
    """
    from kvferry.judging.tasks import openstax

    texts = openstax.choice_texts(questions.rows, n=n, seed=seed)
    arguments = {
        "task": openstax.VERSION,
        "questions": questions.counts(),
        "excerpts": sha256_text("\x00".join(text.context for text in texts)),
        "n": n,
        "seed": seed,
        "headline": "mean log-likelihood a token",
    }
    return run_choices(ferries, {questions.split: texts}, folder, arguments=arguments, cue=cue)


def wrong_documents(texts: Sequence[ChoiceText]) -> list[int]:
    """For each text the number of another one: the nearest before it (in a circle) that may be.

    Raises:
        BadInput: all others are of its own group or state one of its answers.
    """
    read = [stems(text.context) if text.group else [] for text in texts]
    found = []
    for place, text in enumerate(texts):
        answers = [stems(q.candidates[q.answer]) for q in text.questions]
        for step in range(1, len(texts)):
            other = (place - step) % len(texts)
            if not text.group or (
                texts[other].group != text.group
                and not any(holds_phrase(read[other], answer) for answer in answers)
            ):
                found.append(other)
                break
        else:
            raise BadInput(
                expected=f"a wrong document for {text.text_id}",
                got="only texts of its own group, or that state one of its answers",
                next_step="ask about more texts",
            )
    return found


def _one(
    ferry: Handoff,
    text: ChoiceText,
    other: ChoiceText,
    cue: str,
    known: dict[Any, list[list[Tensor]]],
) -> dict[str, Any]:
    """One text in every arm; ``known`` keeps scores that maps of one pair share."""
    from kvferry.running.choices import likeliest, option_scores

    asked = asked_of(ferry, text, cue)
    chosen, chosen_sum, sums = {}, {}, {}
    for arm in ARMS:
        mapped = ferry.map.identity if arm in ("transfer", "wrong_document") else ""
        loaded = ferry.source if arm == "source_native" else ferry.receiver
        key = (arm, mapped, id(loaded), ferry.layout.identity)
        if key not in known:
            held = ferry.hand_over(text.context, arm=arm, other_context=other.context)  # type: ignore[arg-type]
            known[key] = option_scores(held.loaded, held.cache, asked)
        scores = known[key]
        chosen[arm] = [likeliest(each) for each in scores]
        sums[arm] = [[round(float(option.sum()), 4) for option in each] for each in scores]
        chosen_sum[arm] = [max(range(len(each)), key=each.__getitem__) for each in sums[arm]]
    return {
        "chosen": chosen,
        "chosen_sum": chosen_sum,
        "sums": sums,
        "option_tokens": [[int(option.numel()) for option in one.options] for one in asked],
        "right": [question.answer for question in text.questions],
        "kinds": [question.kind for question in text.questions],
        "wrong_text_id": other.text_id,
    }


def summarise_choices(folder: Path) -> dict[str, Any]:
    """Every figure from the records alone."""
    header = read_json(folder / "header.json")
    records = read_records(folder / "records.jsonl", keys=("chosen", "right", "kinds"), once=NAMED)
    table: dict[str, dict[str, Any]] = {}
    for name in header["maps"]:
        table[name] = {}
        for part in header["texts"]:
            rows = [r for r in records if r["map"] == name and r["part"] == part]
            if rows:
                table[name][part] = _figures(rows)
    return {"maps": table, "arguments": header["arguments"]}


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"texts": len(rows), **_counted(rows, "chosen")}
    if all("chosen_sum" in row for row in rows):
        entry["by_sum"] = _counted(rows, "chosen_sum")
    entry["by_kind"] = _by_kind(rows)
    return entry


def _hits(rows: list[dict[str, Any]], arm: str, chosen: str) -> list[bool]:
    return [c == a for row in rows for c, a in zip(row[chosen][arm], row["right"], strict=True)]


def _counted(rows: list[dict[str, Any]], chosen: str) -> dict[str, Any]:
    """Right answers, tests and shares by one way to choose: ``chosen`` or ``chosen_sum``."""
    hits = {arm: _hits(rows, arm, chosen) for arm in ARMS}
    n = len(hits["transfer"])
    right = {arm: sum(found) for arm, found in hits.items()}
    entry: dict[str, Any] = {"n": n, "arms": {}, "paired": {}}
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


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    kinds = [kind for row in rows for kind in row["kinds"]]
    table = {kind: {"n": kinds.count(kind), **dict.fromkeys(ARMS, 0)} for kind in sorted({*kinds})}
    for arm in ARMS:
        for kind, hit in zip(kinds, _hits(rows, arm, "chosen"), strict=True):
            table[kind][arm] += hit
    return table


def _share(right: dict[str, int], low: str, high: str) -> float | None:
    span = right[high] - right[low]
    return (right["transfer"] - right[low]) / span if span > 0 else None
