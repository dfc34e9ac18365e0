"""``kvferry rows``: questions of a benchmark as rows for ``kvferry tune --data rows:FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.verbs.options import Data, Json


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(no_args_is_help=True, help="Benchmark questions as rows to tune on.")
    group.callback()(rows)
    group.command("openstax")(openstax)
    app.add_typer(group, name="rows")


def rows() -> None:
    """Benchmark questions as rows to tune on."""


def openstax(
    out: Annotated[Path, typer.Option(help="File to write, .jsonl.")],
    data: Data = Path("../shared/data"),
    split: Annotated[str, typer.Option(help="tune or test.")] = "tune",
    tokens: Annotated[int, typer.Option(help="Of an excerpt, at most.", min=32)] = 600,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model whose tokens are counted; without one, 3 characters a token."),
    ] = None,
    json: Json = False,
) -> None:
    """Textbook review questions, each with the excerpt that states its answer."""
    from json import dumps

    from kvferry.judging.tasks.openstax import (
        VERSION,
        Count,
        characters,
        read_split,
        token_count,
    )
    from kvferry.provenance import sha256_file, write_text
    from kvferry.terminal import print_json
    from kvferry.verbs.bench_tasks import describe, known_split

    chosen = known_split(split)
    count: Count = characters
    if tokenizer is not None:
        from kvferry.models.load import load_tokenizer

        count = token_count(load_tokenizer(tokenizer))
    found = read_split(data, chosen, count=count, tokens=tokens)
    lines = (dumps(row.row(), sort_keys=True, ensure_ascii=False) + "\n" for row in found.rows)
    write_text(out, "".join(lines))
    counts = found.counts()
    if json:
        print_json({"out": str(out), "task": VERSION, "sha256": sha256_file(out), **counts})
        return
    print(describe(counts))
    for name in counts["shared_with_test"]:
        print(f"  {name}: shares text with the test sections, not written")
    print(f"{out}: {counts['kept']} rows; tune on them with --data rows:{out}")
