"""``kvferry compare``: maps of one direction side by side, task by task, with paired tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.models.precision import Precision
from kvferry.verbs.options import (
    AllowOtherPrecision,
    Device,
    Json,
    ReceiverAt,
    ReceiverCache,
    ReceiverPrecision,
    Ridge,
    SectionChars,
    SourceAt,
    SourceCache,
    SourcePrecision,
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare")(compare)


def compare(
    maps: Annotated[list[Path], typer.Argument(help="Map folders; tests are against the first.")],
    out: Annotated[Path, typer.Option(help="Folder for records.")],
    ridge: Ridge = False,
    n: Annotated[int, typer.Option("-n", help="Texts of facts a part.", min=2)] = 8,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Running text, for next-token losses.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Of running text.", min=2)] = 16,
    section_chars: SectionChars = None,
    seed: Annotated[int, typer.Option(help="Of the facts; not one that was tuned on.")] = 1000,
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
    """Invented facts in three parts, and running text if a corpus is given; a stopped run
    resumes."""
    from kvferry.fitting.corpus import read_corpus
    from kvferry.fitting.fidelity import FidelitySettings, measure, pick
    from kvferry.judging.choice_runs import run_facts
    from kvferry.judging.compare import compare_choices, compare_losses, require_comparable
    from kvferry.terminal import print_json
    from kvferry.verbs.handoffs import load_handoffs

    prose = read_corpus(corpus, section_chars=section_chars) if corpus else None
    ferries = load_handoffs(
        maps,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        ridge=ridge,
        keep=3 * documents,
    )
    require_comparable(ferries)
    texts, settings = [], FidelitySettings()
    if prose is not None:
        texts = pick(next(iter(ferries.values())), prose.documents, documents, settings)
    run_facts(ferries, out / "facts", texts=n, seed=seed)
    found: dict[str, Any] = {"facts": compare_choices(out / "facts")}
    if prose is not None:
        label = ", ".join(Path(spec).name for spec in corpus or [])
        arguments = {"n": documents, "section_chars": section_chars}
        measure(ferries, texts, settings, out / "prose", label=label, arguments=arguments)
        found["prose"] = compare_losses(out / "prose")
    if json:
        print_json(found)
        return
    show(found)
    print(f"records: {out}")


def show(found: dict[str, Any]) -> None:
    """A table a task."""
    from kvferry.terminal import print_table

    for part, entry in found["facts"].items():
        rows = [
            (
                name,
                f"{row['correct']}/{entry['n']}",
                f"+{row['fixed']} -{row['regressed']}",
                f"{row['p_two_sided']:.2g}",
            )
            for name, row in entry["maps"].items()
        ]
        print_table(f"facts, {part}", ("map", "correct", "against first", "p"), rows)
    if "prose" in found:
        losses = [
            (
                name,
                f"{row['nll']:.3f}",
                f"{row['recovered']:.3f}",
                f"{row['better']}/{found['prose']['n']}",
                f"{row['p_two_sided']:.2g}",
            )
            for name, row in found["prose"]["maps"].items()
        ]
        print_table("running text", ("map", "NLL", "recovered", "better", "p"), losses)
