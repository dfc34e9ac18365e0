"""``kvferry check SOURCE RECEIVER``: will this pair work, and what will it take; no weights read.

Exit code 0 when ready, 3 when ready with limits or unsupported, 2 for bad input.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.errors import BadInput
from kvferry.verbs.options import Json

if TYPE_CHECKING:
    from kvferry.fitting.check import CheckReport
    from kvferry.fitting.check_costs import CaptureEstimate
    from kvferry.fitting.estimate import Rates

LIMITED = 3


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check")(check)


def check(
    source: Annotated[str, typer.Argument(help="Model that reads: name, folder, GGUF or hub id.")],
    receiver: Annotated[str, typer.Argument(help="Model that answers.")],
    tokens: Annotated[int, typer.Option(help="Rows for the fit.", min=64)] = 60_000,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens a text.", min=32)] = 512,
    k_max: Annotated[int, typer.Option(help="Source layers kept a target.", min=1)] = 6,
    memory: Annotated[str, typer.Option(help="Bound on moments, e.g. 8GB.")] = "8GB",
    both_directions: Annotated[
        bool, typer.Option("--both-directions", help="Keep receiver -> source moments as well.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda: where the models will run.")] = "cpu",
    rates: Annotated[
        str | None,
        typer.Option(help="GFLOP/s of models and of float64, e.g. 400000,1000; default: measured."),
    ] = None,
    json: Json = False,
) -> None:
    """Say whether a pair will work and what capture and fit will take. Reads no weights."""
    from kvferry.fitting.capture import CaptureSettings
    from kvferry.fitting.check import check_pair
    from kvferry.models.light import read_light
    from kvferry.terminal import print_json
    from kvferry.verbs.capture import parse_bytes

    settings = CaptureSettings(
        tokens=tokens,
        chunk_tokens=chunk_tokens,
        k_max=k_max,
        memory_bytes=parse_bytes(memory),
        both_directions=both_directions,
    )
    stated = parse_rates(rates) if rates else None
    report = check_pair(
        read_light(source), read_light(receiver), settings, device=device, rates=stated
    )
    if json:
        print_json(report.model_dump())
    else:
        show(report)
    if report.verdict != "ready":
        raise typer.Exit(LIMITED)


def parse_rates(text: str) -> Rates:
    """``400000,1000``: what models and float64 products reach on a machine, in GFLOP/s.

    Raises:
        BadInput: not two numbers above zero.
    """
    from math import isfinite

    from kvferry.fitting.estimate import Rates

    try:
        model, double = (float(part) for part in text.split(","))
    except ValueError:
        model = double = 0.0
    if not (isfinite(model) and isfinite(double) and min(model, double) > 0):
        raise BadInput(
            expected="--rates MODELS,FLOAT64 in GFLOP/s, both above zero",
            got=repr(text),
            next_step="e.g. --rates 400000,1000; leave it out to measure this CPU",
        )
    basis = f"at {model:g} GFLOP/s for the models and {double:g} in float64, as stated"
    return Rates(model, double, basis)


def show(report: CheckReport) -> None:
    """Print a report in 80 columns."""
    from kvferry.terminal import print_table

    for name, side in (("source", report.source), ("receiver", report.receiver)):
        _line(name, side.spec)
        _line(
            "",
            f"{side.model_type}, {side.parameters / 1e9:.2f} B parameters, "
            f"prompts up to {side.max_positions}, "
            f"cache {side.cache_bytes_per_token / 1e3:.1f} KB a token in float32",
        )
        for text in side.geometry:
            _line("", text)
    words = report.tokenizers
    _line("tokenizers", f"{'agree' if words.agree else 'disagree'}: {words.reason}")
    for token, ours, theirs in words.differing:
        _line("", f"{token!r}: id {_id(ours)} in the source, {_id(theirs)} in the receiver")
    if report.maps:
        memory = report.settings["memory_bytes"] / 1e9
        typer.echo("")
        print_table(
            "maps and moments (upper bounds) for each k",
            (
                "k",
                "features",
                "float32",
                "bfloat16",
                "int8",
                "corrector",
                "moments",
                f"in {memory:.3g} GB",
            ),
            [
                (
                    str(row.k),
                    str(row.features),
                    f"{row.float32_bytes / 1e6:.1f} MB",
                    f"{row.bfloat16_bytes / 1e6:.1f} MB",
                    f"{row.int8_bytes / 1e6:.1f} MB",
                    f"{row.corrector_bytes / 1e6:.1f} MB",
                    f"{row.moments_bytes / 1e9:.2f} GB",
                    "yes" if row.fits_memory else "no",
                )
                for row in report.maps
            ],
        )
        typer.echo("")
        shown = report.maps[min(report.settings["k_max"], len(report.maps)) - 1]
        _line(
            "map's work",
            f"{shown.multiply_adds / 1e6:.1f} M multiply-adds a token at k = {shown.k}, "
            f"{shown.corrector_multiply_adds / 1e6:.1f} M more with a corrector of rank 32; the "
            f"receiver's own reading takes {report.receiver.parameters / 1e6:.0f} M at most",
        )
    if report.capture is not None:
        _show_capture(report.capture, report.settings["device"])
    typer.echo("")
    _line("verdict", report.verdict)
    if report.verdict == "ready":
        _line("", "both geometries are run, the tokenizers agree, capture fits in memory")
    for reason in report.reasons:
        _line(f"  {reason.level}", reason.text)


def _show_capture(need: CaptureEstimate, device: str) -> None:
    where = f"free now {need.memory_free_bytes / 1e9:.1f} GB"
    if device != "cpu":
        free = need.device_free_bytes
        where += f"; on the device {'unknown' if free is None else f'{free / 1e9:.1f} GB'}"
    _line(
        "memory",
        f"models {need.models_bytes / 1e9:.1f} GB on {device}, moments at most "
        f"{need.moments_bytes / 1e9:.2f} GB (k = {need.k}), choice of layers "
        f"{need.probe_bytes / 1e9:.2f} GB; fit {need.fit_bytes / 1e9:.2f} GB; {where}",
    )
    _line(
        "capture",
        f"about {duration(need.capture_s)} for {need.rows} rows: reading "
        f"{duration(need.read_s)} ({need.tokens_per_s:.0f} tokens/s through both), moments "
        f"{duration(need.moments_s)}, choice of layers {duration(need.choose_s)}",
    )
    _line("fit", f"about {duration(need.fit_s)}")
    _line("basis", need.basis)


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.4 h``."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _id(number: int | None) -> str:
    return "none" if number is None else str(number)


def _line(label: str, text: str) -> None:
    """A label and its text, wrapped at 80 columns."""
    shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
    typer.echo(
        textwrap.fill(
            shown,
            width=80,
            initial_indent=f"{label:<13} ",
            subsequent_indent=" " * 14,
            break_on_hyphens=False,
        )
    )
