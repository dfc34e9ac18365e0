"""What the command line prints: progress on stderr, tables and JSON on stdout.

Owns the consoles and the progress bar with rate and time left. One call:
``with progress("capture", total=100, unit="tokens") as advance: advance(10)``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text


class Advance(Protocol):
    """Takes the number of units just done, and a word about them."""

    def __call__(self, units: float, note: str = "") -> None: ...


def out() -> Console:
    """The console for results (stdout)."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def err() -> Console:
    """The console for progress and messages (stderr)."""
    return Console(file=sys.stderr, highlight=False)


def say(text: str) -> None:
    """One line of news on stderr."""
    err().print(text, markup=False)


def print_json(value: Any) -> None:
    """One line of JSON on stdout, keys sorted; NaN is refused."""
    sys.stdout.write(json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that fits 80 columns; every column but the first is right-aligned."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    out().print(table)


class _RateColumn(ProgressColumn):
    """Units a second, with bytes shown as MB."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        super().__init__()

    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        if self._unit == "bytes":
            total = (task.total or 0) / 1e6
            return Text(f"{task.completed / 1e6:.0f}/{total:.0f} MB {speed / 1e6:.1f} MB/s")
        done = f"{task.completed:.0f}/{task.total or 0:.0f} {self._unit}"
        return Text(f"{done} {speed_text(speed, self._unit)}")


@contextmanager
def progress(label: str, *, total: float, unit: str, done: float = 0.0) -> Iterator[Advance]:
    """A progress bar on stderr with rate and time left; plain lines where it is no terminal.

    Yields:
        a function that takes the number of units just done, and a word about them.
    """
    console = err()
    if not console.is_terminal:
        yield _plain_advance(label, total=total, unit=unit, done=done)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        _RateColumn(unit),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(label, total=total, completed=done)  # type: ignore[arg-type]

        def advance(units: float, note: str = "") -> None:
            bar.update(task, advance=units, description=_noted(label, note))

        yield advance


def _noted(label: str, note: str) -> str:
    return f"{label} ({note})" if note else label


def speed_text(rate: float, unit: str) -> str:
    """Units a second, or seconds for one where that is easier to read."""
    return f"{rate:.1f} {unit}/s" if rate >= 1.0 or rate <= 0.0 else f"{1.0 / rate:.1f} s each"


def _plain_advance(label: str, *, total: float, unit: str, done: float) -> Advance:
    """Progress as a line every few seconds, for logs and pipes."""
    import time

    started = time.monotonic()
    state = {"done": done, "said": started}

    def advance(units: float, note: str = "") -> None:
        state["done"] += units
        now = time.monotonic()
        if now - state["said"] < 10.0 and state["done"] < total:
            return
        state["said"] = now
        rate = (state["done"] - done) / max(now - started, 1e-9)
        left = (total - state["done"]) / rate if rate > 0 else 0.0
        scale, name = (1e6, "MB") if unit == "bytes" else (1.0, unit)
        say(
            f"{_noted(label, note)}: {state['done'] / scale:.0f}/{total / scale:.0f} {name}, "
            f"{speed_text(rate / scale, name)}, {left:.0f} s left"
        )

    return advance
