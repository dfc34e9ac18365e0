"""The command line: one verb a stage, every verb in its own file under ``verbs/``.

Owns exit codes: 0 done, 2 bad input (no traceback), 3 ``check`` says unsupported or limited,
130 interrupted, 143 asked to end. Imports no torch until a verb needs it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

import typer

from kvferry import __version__
from kvferry.errors import KvferryError
from kvferry.provenance import MATMUL_VARIABLE, MATMULS
from kvferry.provenance import matmul as require_matmul
from kvferry.terminal import say

VERBS = (
    "models",
    "check",
    "capture",
    "fit",
    "tune",
    "measure",
    "compare",
    "card",
    "ask",
    "bench",
    "judge",
    "rows",
    "recipe",
    "demo",
)

app = typer.Typer(
    name="kvferry",
    help="One language model reads, another answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
    matmul: str = typer.Option(
        MATMULS[0],
        "--matmul",
        envvar=MATMUL_VARIABLE,
        help="What float32 products on the CPU round their factors to: float32 (not at all) or "
        "bfloat16, faster on processors with bf16 tiles. Kept in records.",
    ),
) -> None:
    """One language model reads, another answers."""
    os.environ[MATMUL_VARIABLE] = matmul
    require_matmul()


for _verb in VERBS:
    import_module(f"kvferry.verbs.{_verb}").register(app)


def _terminate(number: int, _: object) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does: temporary files go, what was finished stays."""
    sys.exit(128 + number)


def main() -> NoReturn:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KvferryError as error:
        say(f"error: {type(error).__name__}")
        for line in error.lines():
            say("  " + line)
        sys.exit(2)
    except SystemExit as ended:
        if ended.code in (130, 143):  # Ctrl-C, or asked to end
            say("interrupted; what was finished is kept, and the same command resumes from there")
        raise
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        say(f"error: {type(error).__name__}")
        # What was renamed onto, where there is that: the other one is a temporary file's name.
        say(f"  expected  to read or write {error.filename2 or error.filename or 'a file'}")
        say(f"  got       {error.strerror or error}")
        say("  next      check the path, its rights and the room on the disk")
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
