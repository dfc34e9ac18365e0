"""``kvferry judge``: two arms' free-form answers compared blind, by a model or on a sheet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.errors import BadInput
from kvferry.verbs.options import Device, Json


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("judge")(judge)


def judge(
    run: Annotated[Path, typer.Argument(help="Folder of kvferry bench prompts.")],
    a: Annotated[str, typer.Option(help="An arm.")] = "transfer",
    b: Annotated[str, typer.Option(help="The arm it is compared with.")] = "receiver_native",
    map: Annotated[str | None, typer.Option(help="Whose answers, if the run has several.")] = None,
    judge: Annotated[str | None, typer.Option(help="Model that judges, in both orders.")] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Write a sheet for people to this .md file.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Read the .answers.jsonl that a person filled in.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order, and of who is shown first.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for verdicts; default inside the run's.")
    ] = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Which arm answers better? Wins, ties and losses with an exact sign test; names are hidden
    from whoever judges."""
    from kvferry.judging.blind import figures, judge_pairs, read_pairs, read_sheet, write_sheet
    from kvferry.provenance import sha256_file, write_json
    from kvferry.terminal import print_json

    if judge is None and sheet is None and answers is None:
        raise BadInput(
            expected="somebody to judge",
            got="neither --judge, --sheet nor --answers",
            next_step="say --judge MODEL, or --sheet FILE.md and later --answers FILE",
        )
    if sheet is not None and sheet.suffix != ".md":
        raise BadInput(expected="--sheet FILE.md", got=str(sheet), next_step="name a Markdown file")
    found = read_pairs(run, a, b, seed=seed, map=map)
    folder = out or run / "judged" / _plain(f"{found.map}-{a}-{b}-{seed}")
    reports: dict[str, Any] = {}
    if sheet is not None:
        made = write_sheet(found, sheet)
        reports["sheet"] = {name: str(path) for name, path in made.items()}
    if answers is not None:
        read = figures(found, read_sheet(found, answers))
        read["judge"] = {"kind": "people", "file": answers.name, "sha256": sha256_file(answers)}
        write_json(folder / f"people-{_plain(answers.stem)}.json", read)
        reports["people"] = read
    if judge is not None:
        from kvferry.judging.local_judge import LocalJudge
        from kvferry.models.load import load_model

        judging = LocalJudge(load_model(judge, device=device))
        reports["model"] = judge_pairs(judging, found, folder / _plain(Path(judge).name))
    if json:
        print_json({"out": str(folder), **reports})
        return
    for who in ("people", "model"):
        if who in reports:
            show(reports[who])
    if sheet is not None:
        print(f"sheet: {sheet}; fill in {reports['sheet']['answers']}, keep the key to yourself")
    if answers is not None or judge is not None:
        print(f"records: {folder}")


def _plain(name: str) -> str:
    """A name for a folder or file."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def show(report: dict[str, Any]) -> None:
    """Verdicts in words, then what the answers are like."""
    from kvferry.terminal import out, print_table

    about, by = report["compared"], report["judge"]
    who = by.get("model") or by["file"]
    out().print(
        f"{about['map']}: {about['a']} against {about['b']}, judged by {who}, n = {report['n']}"
        f" ({report['unanswered']} unanswered, {about['missing']} without both answers)\n"
        f"  {report['wins']} wins, {report['ties']} ties, {report['losses']} losses; exact sign "
        f"test p = {report['p_two_sided']:.2g}; {report['same_answer']} answers are the same",
        markup=False,
    )
    if "askings" in report:
        lean = report["lean"]
        out().print(
            f"  said the first is better {report['said_first']} of {report['askings']} times; "
            f"changed with the order in {report['disagreed']} pairs; both orders together lean "
            f"{lean['a']} to {lean['b']}, p = {lean['p_two_sided']:.2g}",
            markup=False,
        )
    rows = [
        (arm, str(row["empty"]), str(row["refusals"]), f"{row['mean_words']:.0f}")
        for arm, row in report["answers"].items()
    ]
    print_table("", ("arm or control", "empty", "refusals", "mean words"), rows)
