"""``kvferry bench``: time to first token by part, all arms, several context lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.errors import BadInput


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench")(bench)


def bench(
    map: Annotated[str, typer.Option(help="Map folder or hub repository.")],
    context: Annotated[
        Path | None, typer.Option(help="Text file; default the shipped passages.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Context tokens, comma-separated.")] = (
        "128,256,512,1024,2048"
    ),
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    warmup: Annotated[int, typer.Option(min=0)] = 1,
    new_tokens: Annotated[int, typer.Option(min=2)] = 16,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the record to this JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Only the JSON line on stdout.")] = False,
) -> None:
    """Time all arms in one run; medians with spread. The last line is JSON."""
    sizes = parse_lengths(lengths)
    from kvferry.provenance import write_json
    from kvferry.running.bench import bench as run
    from kvferry.running.handoff import Handoff
    from kvferry.terminal import print_json
    from kvferry.verbs.ask import read_text

    text = read_text(context) if context else shipped_text(max(sizes))
    ferry = Handoff.from_pretrained(map, device=device)
    result = run(ferry, text, lengths=sizes, repeats=repeats, warmup=warmup, new_tokens=new_tokens)
    if out:
        write_json(out, result)
    if not json:
        show(result)
    print_json(result)


def parse_lengths(text: str) -> list[int]:
    """``128,256`` -> [128, 256].

    Raises:
        BadInput: not a list of positive numbers.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
        if min(sizes) < 1:
            raise ValueError(text)
    except ValueError as error:
        raise BadInput(
            expected="lengths such as 128,256,512", got=text, next_step="write positive numbers"
        ) from error
    return sizes


def shipped_text(tokens: int) -> str:
    """The shipped passages one after another, repeated until long enough."""
    from kvferry.demo_data import passages

    text = "\n\n".join(str(row["passage"]) for row in passages())
    return "\n\n".join([text] * (1 + tokens * 8 // len(text)))


def show(result: dict) -> None:  # type: ignore[type-arg]
    """Print a bench record as a table."""
    from kvferry.running.timing import PARTS
    from kvferry.terminal import print_table

    rows = []
    for entry in result["lengths"]:
        for arm, spans in entry["arms"].items():
            parts = "+".join(f"{spans[p]['median']:.0f}" for p in PARTS if p in spans)
            ttft = spans["ttft"]
            rows.append(
                (
                    f"{entry['context_tokens']} {arm}",
                    f"{ttft['median']:.0f}",
                    f"{ttft['min']:.0f}..{ttft['max']:.0f}",
                    parts,
                    f"{spans['decode_tokens_per_s']['median']:.1f}",
                )
            )
    print_table(
        f"{result['source']} -> {result['receiver']}, medians of {result['repeats']}, ms",
        ("context tokens, arm", "TTFT", "spread", "parts", "tok/s"),
        rows,
    )
    print("parts: transfer = source prefill + map + inject + tail + first token;")
    print("       native = prefill + tail + first token")
    ratio = result["map_over_products"]
    print(
        f"map at {ratio['tokens']} tokens: {ratio['map_ms']['median']:.1f} ms, "
        f"{ratio['ratio']:.2f} x its bare matrix products"
    )
