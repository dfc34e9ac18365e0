"""``kvferry ask``: one context, one question, any arm; ``--compare`` shows them side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.errors import BadInput
from kvferry.models.precision import Precision
from kvferry.verbs.options import (
    AllowOtherPrecision,
    Device,
    Json,
    ReceiverAt,
    ReceiverCache,
    ReceiverPrecision,
    SourceAt,
    SourceCache,
    SourcePrecision,
    TailTokens,
)

if TYPE_CHECKING:
    from kvferry.running.handoff import Answer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("ask")(ask)


def ask(
    map: Annotated[str, typer.Option(help="Map folder or hub repository.")],
    context: Annotated[Path, typer.Option(help="Text file to read; - for standard input.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    arm: Annotated[str, typer.Option(help="source_native, transfer, receiver_native, ...")] = (
        "transfer"
    ),
    compare: Annotated[bool, typer.Option("--compare", help="All arms side by side.")] = False,
    other_context: Annotated[
        Path | None, typer.Option(help="Another text, for the wrong_document control.")
    ] = None,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    tail_tokens: TailTokens = 0,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    allow_other_precision: AllowOtherPrecision = False,
    device: Device = "cpu",
    allow_other_revision: Annotated[
        bool, typer.Option("--allow-other-revision", help="Use models the map was not made for.")
    ] = False,
    json: Json = False,
) -> None:
    """Let the source read and the receiver answer."""
    text = read_text(context)
    for value, name in ((text, "context"), (question, "question")):
        if not value.strip():  # before any model is loaded
            raise BadInput(
                expected=f"a {name} with some text",
                got=f"an empty {name}",
                next_step=f"give one with --{name}",
            )
    other = read_text(other_context) if other_context else None

    from kvferry.running.decode import Sampling
    from kvferry.running.handoff import ARMS, CONTROLS, Handoff
    from kvferry.terminal import out, print_json

    if arm not in ARMS + CONTROLS:
        raise BadInput(
            expected=f"an arm among {', '.join(ARMS + CONTROLS)}",
            got=repr(arm),
            next_step="choose one of them",
        )
    ferry = Handoff.from_pretrained(
        map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        tail_tokens=tail_tokens,
        allow_other_revision=allow_other_revision,
    )
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    arms: list[Any] = [arm]
    if compare:
        arms = [*ARMS, "no_context", *(["wrong_document"] if other else [])]
    answers = []
    for each in arms:
        answer = ferry(text, question, arm=each, sampling=sampling, other_context=other)
        answers.append(answer)
        if not json and not compare:
            out().print(answer.text, markup=False)
    if json:
        print_json(
            {
                "map": ferry.map.identity,
                "question": question,
                "answers": [record(answer) for answer in answers],
            }
        )
        return
    show(answers, names(ferry, arms))


def read_text(path: Path) -> str:
    """A UTF-8 text file, or standard input for ``-``.

    Raises:
        BadInput: no such file, or not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            expected=f"UTF-8 text in {path}",
            got=f"an invalid byte at offset {error.start}",
            next_step="convert the file, e.g. iconv -f latin1 -t utf-8",
        ) from error
    except OSError as error:
        raise BadInput(
            expected=f"a readable text file {path}",
            got=error.strerror or type(error).__name__,
            next_step="check the path",
        ) from error


def record(answer: Answer) -> dict[str, Any]:
    """An answer as plain values."""
    return {
        "arm": answer.arm,
        "text": answer.text,
        "ttft_ms": round(answer.ttft_ms, 2),
        "timings_ms": {k: round(v, 2) for k, v in answer.timings.items()},
        "decode_tokens_per_s": answer.decode_tokens_per_s,
        "peak_memory_bytes": answer.peak_memory_bytes,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.token_ids),
    }


def names(ferry: Any, arms: list[Any]) -> dict[str, str]:
    """Which model reads and which answers, for each arm."""
    source, receiver = ferry.map.config.source.spec, ferry.map.config.receiver.spec
    table = {
        "source_native": f"{source} reads and answers",
        "transfer": f"{source} reads, {receiver} answers",
        "receiver_native": f"{receiver} reads and answers",
        "no_context": f"{receiver} answers without the text",
        "wrong_document": f"{source} reads another text, {receiver} answers",
    }
    return {arm: table[arm] for arm in arms}


def show(answers: list[Answer], who: dict[str, str]) -> None:
    """Answers one under the other, then times by part."""
    from kvferry.running.timing import PARTS
    from kvferry.terminal import out, print_table

    if len(answers) > 1:
        for answer in answers:
            out().print(f"\n[bold]{answer.arm}[/bold]  ({who[answer.arm]})")
            out().print(answer.text or "(nothing)", markup=False)
        out().print()
    short = {"source_prefill": "src read", "prefill": "read", "first_token": "1st"}
    used = [part for part in PARTS if any(part in a.timings for a in answers)]
    rows = []
    for a in answers:
        parts = [f"{a.timings[p]:.0f}" if p in a.timings else "-" for p in used]
        rate = f"{a.decode_tokens_per_s:.1f}" if a.decode_tokens_per_s else "-"
        rows.append((a.arm, *parts, f"{a.ttft_ms:.0f}", rate))
    columns = ("ms", *[short.get(p, p) for p in used], "TTFT", "tok/s")
    print_table("", columns, rows)
    peak = max(a.peak_memory_bytes for a in answers)
    out().print(f"peak memory {peak / 1e9:.2f} GB; {answers[0].prompt_tokens} prompt tokens")
