"""``kvferry capture`` and ``kvferry merge``: documents through both models, moments out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvferry.errors import BadInput
from kvferry.verbs.options import (
    Device,
    Json,
    ReceiverCache,
    ReceiverPrecision,
    SectionChars,
    SourceCache,
    SourcePrecision,
)


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("capture")(capture)
    app.command("merge")(merge)


def capture(
    source: Annotated[str, typer.Argument(help="Model that reads: name, folder, GGUF or hub id.")],
    receiver: Annotated[str, typer.Argument(help="Model that answers.")],
    corpus: Annotated[list[str], typer.Option(help=".txt, .jsonl, folder or hf:NAME; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder for the capture.")],
    tokens: Annotated[int, typer.Option(help="Rows for the fit.", min=64)] = 60_000,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens a text.", min=32)] = 512,
    per_document: Annotated[int, typer.Option(help="Texts taken from a document.", min=1)] = 2,
    k_max: Annotated[int, typer.Option(help="Source layers kept a target.", min=1)] = 6,
    memory: Annotated[str, typer.Option(help="Bound on moments, e.g. 8GB.")] = "8GB",
    section_chars: SectionChars = None,
    column: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    both_directions: Annotated[
        bool, typer.Option("--both-directions", help="Keep receiver -> source moments as well.")
    ] = False,
    shard: Annotated[str, typer.Option(help="i/n: every n-th text, to be merged later.")] = "0/1",
    plan_from: Annotated[
        Path | None, typer.Option(help="Take the choice of layers from this capture.")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Between checkpoints.", min=0.0)
    ] = 240.0,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Run documents through both models and keep float64 moments. Resumes where it stopped."""
    from kvferry.fitting.capture import CaptureSettings
    from kvferry.fitting.capture import capture as run
    from kvferry.fitting.corpus import read_corpus
    from kvferry.models.load import load_model
    from kvferry.terminal import print_json, say

    settings = CaptureSettings(
        tokens=tokens,
        chunk_tokens=chunk_tokens,
        per_document=per_document,
        k_max=k_max,
        memory_bytes=parse_bytes(memory),
        shard=parse_shard(shard),
        both_directions=both_directions,
    )
    texts = read_corpus(corpus, section_chars=section_chars, column=column)
    say(texts.summary())
    header = run(
        load_model(source, precision=source_precision, cache=source_cache, device=device),
        load_model(receiver, precision=receiver_precision, cache=receiver_cache, device=device),
        texts,
        settings,
        out,
        plan_from=plan_from,
        checkpoint_s=checkpoint_seconds,
    )
    _print(header, out, json, print_json)


def merge(
    captures: Annotated[list[Path], typer.Argument(help="Folders of finished captures.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged capture.")],
    json: Json = False,
) -> None:
    """Add up captures of different texts that share one choice of source layers."""
    from kvferry.fitting.capture_store import merge_captures
    from kvferry.terminal import print_json

    _print(merge_captures(captures, out), out, json, print_json)


def parse_bytes(text: str) -> int:
    """``8GB``, ``500MB`` or a plain number of bytes.

    Raises:
        BadInput: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)?i?b?\s*", text.lower())
    if not match:
        raise BadInput(
            expected="a size such as 8GB or 500MB",
            got=text,
            next_step="write a number and a unit",
        )
    return int(float(match[1]) * 10 ** (3 * " kmgt".index(match[2] or " ")))


def parse_shard(text: str) -> tuple[int, int]:
    """``0/2`` -> (0, 2).

    Raises:
        BadInput: not i/n with 0 <= i < n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise BadInput(
            expected="a shard such as 0/2 (the first of two)",
            got=text,
            next_step="count from 0",
        )
    return int(match[1]), int(match[2])


def _print(header: dict, out: Path, json: bool, print_json) -> None:  # type: ignore[type-arg, no-untyped-def]
    summary = {
        "out": str(out),
        "rows": header["rows"],
        "texts": len(header["items"]),
        "directions": header["directions"],
        "moments_sha256": header["moments_sha256"],
    }
    if json:
        print_json(summary)
        return
    rows = ", ".join(f"{count} {split}" for split, count in header["rows"].items())
    print(f"{out}: {len(header['items'])} texts, rows: {rows}")
    print(f"moments sha256 {header['moments_sha256'][:16]}…")
    print(f"next: kvferry fit {out} --out maps/NAME")
