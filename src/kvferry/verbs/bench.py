"""``kvferry bench``: time to first token by part, all arms, several context lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.errors import BadInput
from kvferry.models.precision import Precision
from kvferry.verbs.bench_tasks import prompts, questions
from kvferry.verbs.options import (
    AllowOtherPrecision,
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


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(invoke_without_command=True, no_args_is_help=True)
    group.callback()(bench)
    group.command("facts")(facts)
    group.command("questions")(questions)
    group.command("prompts")(prompts)
    app.add_typer(group, name="bench")


def bench(
    context_: typer.Context,
    map: Annotated[str | None, typer.Option(help="Map folder or hub repository.")] = None,
    context: Annotated[
        Path | None, typer.Option(help="Text file; default the shipped passages.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Context tokens, comma-separated.")] = (
        "128,256,512,1024,2048"
    ),
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    warmup: Annotated[int, typer.Option(min=0)] = 1,
    new_tokens: Annotated[int, typer.Option(min=2)] = 16,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    allow_other_precision: AllowOtherPrecision = False,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the record to this JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Only the JSON line on stdout.")] = False,
) -> None:
    """Time all arms in one run; medians with spread. The last line is JSON. With `facts`,
    `questions` or `prompts`, ask instead."""
    if context_.invoked_subcommand:
        return
    if map is None:
        raise BadInput(expected="--map FOLDER", got="none", next_step="name the map to time")
    sizes = parse_lengths(lengths)
    from kvferry.provenance import write_json
    from kvferry.running.bench import bench as run
    from kvferry.running.handoff import Handoff
    from kvferry.terminal import print_json
    from kvferry.verbs.ask import read_text

    if out and out.is_dir():
        raise BadInput(expected="--out FILE.json", got=f"a folder, {out}", next_step="name a file")
    ferry = Handoff.from_pretrained(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
    )
    ferry.require_room(max(sizes), new_tokens)  # before a text of that length is made
    text = read_text(context) if context else shipped_text(max(sizes))
    result = run(ferry, text, lengths=sizes, repeats=repeats, warmup=warmup, new_tokens=new_tokens)
    if out:
        write_json(out, result)
    if not json:
        show(result)
    print_json(result)


def facts(
    map: Annotated[list[Path], typer.Option(help="Map folder; repeat to compare.")],
    out: Annotated[Path, typer.Option(help="Folder for records and summary.")],
    n: Annotated[int, typer.Option("-n", help="Texts a part, 16 questions each.", min=2)] = 8,
    parts: Annotated[str, typer.Option(help="Of seen, unseen_phrasing, unseen_kinds.")] = (
        "seen,unseen_phrasing,unseen_kinds"
    ),
    seed: Annotated[int, typer.Option(help="Of the texts; not one that was tuned on.")] = 1000,
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
    """Ask about invented facts in all arms and controls: seen and unseen phrasings and kinds."""
    from kvferry.judging.choice_runs import run_facts
    from kvferry.judging.tasks.facts import PARTS
    from kvferry.terminal import print_json
    from kvferry.verbs.handoffs import load_handoffs

    chosen = [part.strip() for part in parts.split(",")]
    if unknown := [part for part in chosen if part not in PARTS]:
        raise BadInput(
            expected=f"parts among {', '.join(PARTS)}",
            got=", ".join(unknown),
            next_step="choose from these, separated by commas",
        )
    handoffs = load_handoffs(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        ridge=ridge,
        keep=4,
    )
    summary = run_facts(handoffs, out, texts=n, seed=seed, parts=chosen)
    if json:
        print_json(summary)
        return
    show_choices(summary)
    print(f"records: {out}")


def show_choices(summary: dict) -> None:  # type: ignore[type-arg]
    """A table for each map and part."""
    from kvferry.terminal import print_table

    for name, parts in summary["maps"].items():
        for part, entry in parts.items():
            rows = []
            for arm, value in entry["arms"].items():
                paired = entry["paired"].get(f"transfer_against_{arm}")
                rows.append(
                    (
                        arm,
                        f"{value['correct']}/{entry['n']}",
                        f"{value['low']:.2f}..{value['high']:.2f}",
                        f"+{paired['fixed']} -{paired['regressed']}" if paired else "-",
                        f"{paired['p_two_sided']:.2g}" if paired else "-",
                    )
                )
            columns = ("arm or control", "correct", "95 %", "transfer", "p")
            print_table(f"{name}, {part}, {entry['texts']} texts", columns, rows)
            for key in ("recovered", "gap_recovered"):
                if entry[key] is not None:
                    print(f"  {key}: {entry[key]:.2f}")


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
