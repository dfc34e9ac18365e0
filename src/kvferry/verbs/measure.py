"""``kvferry measure``: how much of a context's benefit a map carries, on running text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    TailTokens,
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("measure")(measure)


def measure(
    map: Annotated[list[Path], typer.Option(help="Map folder; repeat for both directions.")],
    corpus: Annotated[list[str], typer.Option(help="Texts never fitted on.")],
    out: Annotated[Path, typer.Option(help="Folder for records and summary.")],
    n: Annotated[int, typer.Option("-n", help="Documents.", min=2)] = 32,
    context_tokens: Annotated[int, typer.Option(min=8)] = 447,
    target_tokens: Annotated[int, typer.Option(min=1)] = 64,
    tail_tokens: TailTokens = 0,
    section_chars: SectionChars = None,
    column: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    seed: Annotated[int, typer.Option(min=0)] = 0,
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
    """Compare next-token losses after a handoff with native reading, no context and the wrong
    document. Records are kept for each document; a stopped run resumes."""
    from kvferry.fitting.corpus import read_corpus
    from kvferry.fitting.fidelity import FidelitySettings, pick
    from kvferry.fitting.fidelity import measure as run
    from kvferry.terminal import print_json, say
    from kvferry.verbs.handoffs import load_handoffs

    documents = read_corpus(corpus, section_chars=section_chars, column=column)
    say(documents.summary())
    # A text is read once, also as another's wrong document.
    handoffs = load_handoffs(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        keep=3 * n,
        ridge=ridge,
        tail_tokens=tail_tokens,
    )
    settings = FidelitySettings(context_tokens, target_tokens, seed)
    texts = pick(next(iter(handoffs.values())), documents.documents, n, settings)
    summary = run(
        handoffs,
        texts,
        settings,
        out,
        label=", ".join(Path(c).name for c in corpus),
        arguments={
            "n": n,
            "context_tokens": context_tokens,
            "target_tokens": target_tokens,
            "tail_tokens": tail_tokens,
            "section_chars": section_chars,
            "seed": seed,
        },
    )
    if json:
        print_json(summary)
        return
    show(summary)
    print(f"records: {out}")


def show(summary: dict) -> None:  # type: ignore[type-arg]
    """Print a summary as tables."""
    from kvferry.terminal import print_table

    for name, entry in summary["maps"].items():
        rows = []
        for variant, nll in entry["nll"].items():
            recovered = entry["recovered"].get(variant)
            rows.append(
                (
                    variant,
                    f"{nll:.3f}",
                    f"{recovered['value']:.3f}" if recovered else "-",
                    f"{recovered['low']:.2f}..{recovered['high']:.2f}" if recovered else "-",
                    _cell(entry["top1_agreement"].get(variant)),
                    _cell(entry["attention_cosine"].get(variant)),
                )
            )
        print_table(
            f"{name} on {summary['label']}, n = {entry['n']}",
            ("arm or control", "NLL", "recovered", "95 %", "top-1", "cosine"),
            rows,
        )
        for test, value in entry["paired"].items():
            print(
                f"  {test}: {value['better']}/{value['n']}, "
                f"Wilcoxon p = {value['wilcoxon_one_sided_p']:.2g}"
            )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
