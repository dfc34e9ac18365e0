"""``kvferry bench questions`` and ``kvferry bench prompts``: real questions, free-form answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.errors import BadInput
from kvferry.models.precision import Precision
from kvferry.verbs.options import (
    AllowOtherPrecision,
    Data,
    Device,
    Json,
    ReceiverAt,
    ReceiverCache,
    ReceiverPrecision,
    Ridge,
    SourceAt,
    SourceCache,
    SourcePrecision,
)

Maps = Annotated[list[Path], typer.Option(help="Map folder; repeat for several.")]
KEPT_READINGS = 8
"""Native readings kept: this text's and the wrong document's, of both models."""


def questions(
    map: Maps,
    out: Annotated[Path, typer.Option(help="Folder for records and summary.")],
    data: Data = Path("../shared/data"),
    split: Annotated[str, typer.Option(help="test or tune.")] = "test",
    n: Annotated[int | None, typer.Option("-n", help="At most so many questions.", min=2)] = None,
    seed: Annotated[int, typer.Option(help="Of the sample and of the order.")] = 0,
    tokens: Annotated[int, typer.Option(help="Of an excerpt, at most.", min=32)] = 600,
    cue: Annotated[str, typer.Option(help="First words of the answer.")] = "The answer is",
    ridge: Ridge = False,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    allow_other_precision: AllowOtherPrecision = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Textbook review questions over the excerpt that states the answer, in all arms and
    controls; a stopped run resumes."""
    from kvferry.judging.choice_runs import run_questions
    from kvferry.judging.tasks.openstax import read_split, token_count
    from kvferry.terminal import print_json, say
    from kvferry.verbs.bench import show_choices
    from kvferry.verbs.handoffs import load_handoffs

    chosen = known_split(split)
    read_split(data, chosen, tokens=tokens)  # missing data is refused before models are loaded
    ferries = load_handoffs(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        ridge=ridge,
        keep=KEPT_READINGS,
    )
    count = token_count(next(iter(ferries.values())).receiver.tokenizer)
    found = read_split(data, chosen, count=count, tokens=tokens)
    say(describe(found.counts()))
    summary = run_questions(ferries, out, found, n=n, seed=seed, cue=cue)
    if json:
        print_json(summary)
        return
    show_choices(summary)
    show_more(summary)
    print(f"records: {out}")


def prompts(
    map: Maps,
    out: Annotated[Path, typer.Option(help="Folder for the answers.")],
    data: Data = Path("../shared/data"),
    n: Annotated[int, typer.Option("-n", help="Prompts, spread over the categories.", min=2)] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 160,
    arms: Annotated[str, typer.Option(help="Comma-separated; more can be added later.")] = (
        "transfer,receiver_native,source_native,no_context,wrong_document"
    ),
    ridge: Ridge = False,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    allow_other_precision: AllowOtherPrecision = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Greedy answers to MT-Bench's and Vicuna's first turns, for `kvferry judge`; a stopped run
    resumes."""
    from kvferry.judging.answer_runs import ARMS, run_answers
    from kvferry.judging.tasks.prompts import read_prompts
    from kvferry.terminal import print_json
    from kvferry.verbs.handoffs import load_handoffs

    chosen = list(dict.fromkeys(arm.strip() for arm in arms.split(",")))
    if unknown := [arm for arm in chosen if arm not in ARMS]:
        raise BadInput(
            expected=f"arms among {', '.join(ARMS)}",
            got=", ".join(unknown),
            next_step="choose from these, separated by commas",
        )
    asked = read_prompts(data, n)
    ferries = load_handoffs(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        ridge=ridge,
        keep=KEPT_READINGS,
    )
    summary = run_answers(ferries, asked, out, max_new_tokens=max_new_tokens, arms=chosen)
    if json:
        print_json(summary)
        return
    show_answers(summary)
    print(f"answers: {out}; compare two arms with: kvferry judge {out}")


def known_split(split: str) -> Any:
    """A split's name.

    Raises:
        BadInput: another one.
    """
    from kvferry.judging.tasks.openstax import SPLITS

    if split not in SPLITS:
        raise BadInput(
            expected=f"a split among {', '.join(SPLITS)}",
            got=split,
            next_step="choose one of them",
        )
    return split


def describe(counts: dict[str, Any]) -> str:
    """What was kept and left out, in a line."""
    left = ", ".join(f"{number} {reason}" for reason, number in counts["left_out"].items())
    return (
        f"{counts['split']}: {counts['kept']} of {counts['asked']} questions on "
        f"{counts['excerpts']} excerpts, {counts['contested']} contested; left out: {left}"
    )


def show_more(summary: dict[str, Any]) -> None:
    """The other way to choose, and the kinds of question, beside the headline."""
    from kvferry.terminal import print_table

    for name, parts in summary["maps"].items():
        for part, entry in parts.items():
            columns = [("by sum", entry["by_sum"]["n"], entry["by_sum"]["arms"])]
            for kind, row in entry["by_kind"].items():
                arms = {arm: {"correct": row[arm]} for arm in entry["arms"]}
                columns.append((kind, row["n"], arms))
            rows = [
                (arm, *(f"{arms[arm]['correct']}/{n}" for _, n, arms in columns))
                for arm in entry["arms"]
            ]
            names = ("arm or control", *(label for label, _, _ in columns))
            print_table(f"{name}, {part}: other counts", names, rows)


def show_answers(summary: dict[str, Any]) -> None:
    """Answers by arm: how many, how long, how quick."""
    from kvferry.terminal import print_table

    for name, arms in summary["maps"].items():
        rows = [
            (
                arm,
                str(entry["n"]),
                str(entry["empty"]),
                str(entry["cut"]),
                f"{entry['mean_tokens']:.0f}",
                f"{entry['median_ttft_ms']:.0f}",
            )
            for arm, entry in arms.items()
        ]
        columns = ("arm or control", "answers", "empty", "cut", "mean tokens", "TTFT ms")
        print_table(name, columns, rows)
