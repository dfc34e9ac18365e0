"""``kvferry recipe``: from data to an artifact and its figures, by the steps a file lists.

A recipe is YAML: ``about`` (a line), ``needs`` (name -> what to give with ``--with``) and ``steps``
(each a kvferry command as one line, with ``{name}`` and ``{work}`` filled in). Every step is a
command that resumes, so a stopped recipe goes on where it was; finished steps are remembered with
a hash of their line.
"""

from __future__ import annotations

import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.errors import BadInput, CorruptFile


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("recipe")(recipe)


def recipe(
    file: Annotated[Path, typer.Argument(help="Recipe, .yaml.")],
    work: Annotated[Path, typer.Option(help="Folder for everything that is made.")],
    given: Annotated[
        list[str] | None, typer.Option("--with", help="NAME=PATH for each thing it needs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Run a recipe's steps one after the other; stops at the first that fails."""
    from kvferry.provenance import sha256_text, sole_writer, write_json
    from kvferry.terminal import say

    plan = read_recipe(file)
    steps = filled(plan, {**named(given or []), "work": str(work)}, file)
    if dry_run:
        for step in steps:
            typer.echo("kvferry " + shlex.join(step))
        return
    state = work / "recipe.json"
    with sole_writer(work, "recipe"):
        done = finished(state)
        for number, step in enumerate(steps, start=1):
            name = sha256_text(shlex.join(step))
            if name in done:
                say(f"step {number} of {len(steps)}: done before")
                continue
            say(f"step {number} of {len(steps)}: kvferry {shlex.join(step)}")
            code = subprocess.run([sys.executable, "-m", "kvferry.cli", *step], check=False)
            if code.returncode:
                ended = code.returncode if code.returncode > 0 else 128 - code.returncode
                say(f"step {number} ended with code {ended}; mend it and run this again")
                raise typer.Exit(ended)
            done.append(name)
            write_json(state, {"recipe": file.name, "done": done})


def finished(state: Path) -> list[str]:
    """Hashes of the steps that are done.

    Raises:
        CorruptFile: a state that is none.
    """
    from kvferry.provenance import read_object

    if not state.exists():
        return []
    done = read_object(state, "done")["done"]
    if not isinstance(done, list):
        raise CorruptFile(
            expected=f"a list of finished steps in {state}",
            got=type(done).__name__,
            next_step="remove it; steps that are done go by quickly, as each resumes",
        )
    return [str(name) for name in done]


def read_recipe(file: Path) -> dict[str, Any]:
    """A recipe's ``about``, ``needs`` and ``steps``.

    Raises:
        BadInput: no such file, not YAML, or something missing.
    """
    import yaml

    try:
        plan = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise BadInput(
            expected=f"a readable recipe {file}",
            got=str(error).splitlines()[0],
            next_step="check the path and the YAML",
        ) from error
    sound = (
        isinstance(plan, dict)
        and set(plan) == {"about", "needs", "steps"}
        and isinstance(plan["needs"], dict)
        and isinstance(plan["steps"], list)
        and bool(plan["steps"])
        and all(isinstance(step, str) and step.strip() for step in plan["steps"])
    )
    if not sound:
        raise BadInput(
            expected=f"about, needs (name: what) and steps (a list of commands) in {file}",
            got=", ".join(map(str, plan)) if isinstance(plan, dict) else type(plan).__name__,
            next_step="look at the files in recipes/",
        )
    return dict(plan)


def named(given: list[str]) -> dict[str, str]:
    """``NAME=PATH`` pairs."""
    pairs = {}
    for text in given:
        name, mark, path = text.partition("=")
        if not mark or not name or not path or name in pairs:
            raise BadInput(
                expected="--with NAME=PATH, each name once",
                got=text,
                next_step="e.g. --with books=texts/",
            )
        pairs[name] = path
    return pairs


def filled(plan: dict[str, Any], values: dict[str, str], file: Path) -> list[list[str]]:
    """Every step's arguments with the names replaced.

    Raises:
        BadInput: something that the recipe needs was not given.
    """
    if missing := sorted(set(plan["needs"]) - set(values)):
        wanted = "; ".join(f"--with {name}=PATH ({plan['needs'][name]})" for name in missing)
        raise BadInput(
            expected=f"everything that {file.name} needs", got="less", next_step=f"add {wanted}"
        )
    if extra := sorted(set(values) - set(plan["needs"]) - {"work"}):
        wanted = ", ".join(map(str, plan["needs"])) or "nothing"
        raise BadInput(
            expected=f"only what {file.name} needs: {wanted}",
            got=", ".join(extra),
            next_step="leave it out, or write the name as the recipe does",
        )
    steps = []
    for step in plan["steps"]:
        try:
            fields = list(string.Formatter().parse(step))
            parts = shlex.split(step)
        except ValueError as error:
            raise _not_a_step(step, file) from error
        if any(spec or conversion for _, _, spec, conversion in fields):
            raise _not_a_step(step, file)
        known = {name for _, name, _, _ in fields if name is not None}
        if unknown := known - set(values):
            raise BadInput(
                expected=f"only names from needs in {file.name}",
                got=", ".join(sorted(f"{{{name}}}" for name in unknown)),
                next_step="add them to needs",
            )
        steps.append([part.format(**values) for part in parts])
    return steps


def _not_a_step(step: str, file: Path) -> BadInput:
    return BadInput(
        expected=f"steps with {{name}} and closed quotes in {file.name}",
        got=step,
        next_step="mend that line; a brace that is meant is written twice",
    )
