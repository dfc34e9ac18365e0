"""Every command in README and docs is one that exists; the quick ones run, the rest run as real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL):
            joined = block.replace("\\\n", " ")
            for line in joined.splitlines():
                if line.startswith("kvferry "):
                    found.append((page.name, shlex.split(line, comments=True)[1:]))
    return found


def test_the_pages_have_commands() -> None:
    assert len(commands()) >= 8


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_a_documented_command_parses(page: str, arguments: list[str]) -> None:
    root = typer.main.get_command(app)
    context = root.make_context("kvferry", list(arguments), resilient_parsing=False)
    command, rest = root, list(arguments)
    while rest and rest[0] == "--matmul":  # an option of the root, with its value
        rest = rest[2:]
    while hasattr(command, "commands") and not (rest and rest[0].startswith("-")):
        name = rest.pop(0)
        assert name in command.commands, f"{page}: no verb {name}"
        command = command.commands[name]
    child = command.make_context("verb", rest, parent=context)
    assert not child.args


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_light_commands_run() -> None:
    for arguments in (["models", "list"], ["--version"], ["models", "show", "smollm2-135m"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


def test_the_readme_example_is_short_and_valid() -> None:
    example = python_blocks()[0]
    compile(example, "README.md", "exec")
    assert len([line for line in example.splitlines() if line.strip()]) <= 8


@pytest.mark.real
def test_the_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(ROOT)
    exec(compile(python_blocks()[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
