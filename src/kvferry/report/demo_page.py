"""The demo's page: one HTML file that needs no network and no script.

Owns the sentences and the bars; the figures come from ``DemoResult`` unchanged. A figure that is
missing is shown as "not measured". One call: ``demo_page(result)``.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvferry.report.demo_result import ArmRow, DemoResult, Direction

NOT_MEASURED = "not measured"

ARM_LABELS: dict[str, str] = {
    "source_native": "Source reads and answers",
    "transfer": "Transfer: source reads, receiver answers",
    "receiver_native": "Receiver reads and answers",
    "no_context": "No context",
    "wrong_document": "Wrong document",
}

PART_LABELS: dict[str, str] = {
    "source_prefill": "source prefill",
    "prefill": "prefill",
    "map": "map",
    "inject": "inject",
    "tail": "tail",
    "first_token": "first token",
}

_CHART_ARMS = ("source_native", "transfer", "receiver_native")
_PROSE_ARMS: dict[str, str] = {
    "transfer": "transfer",
    "receiver_native": "receiver’s own reading",
    "source_native": "source’s own reading",
    "no_context": "no context",
    "wrong_document": "wrong document",
}


def demo_page(result: DemoResult) -> str:
    """The page as HTML text."""
    environment = Environment(
        loader=PackageLoader("kvferry.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"ms": milliseconds, "known": known, "size": size, "share": share}
    return environment.get_template("demo_page.html.j2").render(
        result=result,
        arm_labels=ARM_LABELS,
        part_labels=PART_LABELS,
        headline=headline,
        accuracy_bars=accuracy_bars,
        ttft_bars=ttft_bars,
        machine=machine_lines(result.machine),
    )


def headline(direction: Direction) -> list[str]:
    """What a direction shows, in sentences worked out from its rows, losses included."""
    counts = [
        f"{name} {row.correct_choice} of {row.n}"
        for arm, name in _PROSE_ARMS.items()
        if (row := direction.row(arm)) is not None
    ]
    sentences = [f"Right options: {', '.join(counts)}."]
    texts = [
        f"{name} {row.correct_text}"
        for arm, name in _PROSE_ARMS.items()
        if (row := direction.row(arm)) is not None and row.correct_text is not None
    ]
    if texts:
        sentences.append(f"Right in free text: {', '.join(texts)}.")
    transfer = direction.row("transfer")
    if transfer is None:
        return [*sentences, "The transfer itself was not measured."]
    sentences.append(_against_controls(transfer, direction))
    for arm, name in (("receiver_native", "receiver"), ("source_native", "source")):
        row = direction.row(arm)
        if row is not None:
            sentences.append(_against_native(transfer, row, name))
    return sentences


def _against_controls(transfer: ArmRow, direction: Direction) -> str:
    controls = [row for arm in ("no_context", "wrong_document") if (row := direction.row(arm))]
    if len(controls) < 2:
        missing = "No control was" if not controls else "Only one of the two controls was"
        return f"{missing} measured, so it’s open whether the transfer reads at all."
    lost = [
        _PROSE_ARMS[row.arm] for row in controls if transfer.correct_choice <= row.correct_choice
    ]
    if lost:
        return (
            f"The transfer does not beat {' or '.join(lost)}: these figures show no reading "
            "through it."
        )
    near = [_PROSE_ARMS[row.arm] for row in controls if transfer.low <= row.high]
    if near:
        return (
            "The transfer is ahead of both controls, but the 95% intervals overlap with "
            f"{' and '.join(near)}: {transfer.n} questions don’t settle it."
        )
    return "The transfer beats both controls, and the 95% intervals don’t overlap."


def _against_native(transfer: ArmRow, native: ArmRow, name: str) -> str:
    ahead = transfer.correct_choice - native.correct_choice
    options = "option" if abs(ahead) == 1 else "options"
    if ahead < 0:
        right = f"It gets {-ahead} fewer {options} right than the {name}’s own reading"
    elif ahead == 0:
        right = f"It gets as many options right as the {name}’s own reading"
    else:
        right = f"It gets {ahead} more {options} right than the {name}’s own reading"
    here, there = transfer.ttft_ms_median, native.ttft_ms_median
    if here is None or there is None:
        return f"{right}; time to first token {NOT_MEASURED}."
    if milliseconds(here) == milliseconds(there):
        return f"{right}; both give a first token after {milliseconds(here)}."
    pace = "sooner" if here < there else "later"
    return (
        f"{right}, with a first token {pace}: {milliseconds(here)} against {milliseconds(there)}."
    )


def accuracy_bars(direction: Direction) -> dict[str, Any]:
    """Bars of right options in percent, and the lines at chance and at no context."""
    bars = []
    for arm in _CHART_ARMS:
        row = direction.row(arm)
        bars.append({"arm": arm, "row": row, "percent": row and 100 * row.correct_choice / row.n})
    control = direction.row("no_context")
    options = {len(item.options) for item in direction.items} or {4}
    return {
        "bars": bars,
        # Questions with unequal numbers of options have no single chance line.
        "chance": 100 / options.pop() if len(options) == 1 else None,
        "control": control,
        "control_percent": control and 100 * control.correct_choice / control.n,
    }


def ttft_bars(direction: Direction) -> dict[str, Any]:
    """Stacked parts of the time to first token per arm; every bar to the scale of the longest."""
    longest = max((sum(row.ttft_parts_ms.values()) for row in direction.rows), default=0.0)
    names = [name for name in PART_LABELS if any(name in r.ttft_parts_ms for r in direction.rows)]
    for row in direction.rows:
        names += [name for name in row.ttft_parts_ms if name not in names]
    bars = [
        {
            "row": row,
            "total_ms": sum(row.ttft_parts_ms.values()),
            "parts": [
                {"name": name, "ms": ms, "percent": 100 * ms / longest}
                for name in names
                if (ms := row.ttft_parts_ms.get(name)) is not None and longest > 0
            ],
        }
        for row in direction.rows
    ]
    return {"bars": bars, "names": names, "measured": longest > 0}


def milliseconds(value: float | None) -> str:
    """``812 ms``, ``3.4 ms``; seconds from ten seconds on."""
    if value is None:
        return NOT_MEASURED
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def size(value: int | None) -> str:
    """Bytes as MB or GB."""
    if value is None:
        return NOT_MEASURED
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def share(value: float) -> str:
    """A share of 1 as a whole percentage."""
    return f"{100 * value:.0f}%"


def known(value: object, digits: int | None = None) -> str:
    """A value as text, ``not measured`` for ``None`` and empty text."""
    if value is None or value == "":
        return NOT_MEASURED
    return f"{value:.{digits}f}" if digits is not None else str(value)


def machine_lines(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine's record as pairs of label and text, nested versions spelled out."""
    lines = []
    for name, value in machine.items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            value = ", ".join(f"{key} {known(inner)}" for key, inner in value.items())
        elif name.endswith("_bytes") and isinstance(value, int):
            value = size(value)
        lines.append((label, known(value)))
    return lines
