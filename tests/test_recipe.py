"""Recipes are whole, their steps are commands that exist, and a run goes on where it stopped."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import BadInput, CorruptFile
from kvferry.verbs.recipe import filled, read_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_every_step_is_a_command(file: Path) -> None:
    plan = read_recipe(file)
    values = {name: f"given/{name}" for name in plan["needs"]} | {"work": "work"}
    root = typer.main.get_command(app)
    for step in filled(plan, values, file):
        command, rest = root, list(step)
        while hasattr(command, "commands") and not rest[0].startswith("-"):
            command = command.commands[rest.pop(0)]
        assert not command.make_context("kvferry", rest).args


def test_a_recipe_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    good = "models show {which}"
    file.write_text(f"about: x\nneeds: {{which: a model}}\nsteps: ['{good}', 'models show none']\n")
    arguments = ["recipe", str(file), "--work", str(tmp_path / "w"), "--with", "which=smollm2-135m"]
    stopped = CliRunner().invoke(app, arguments)
    assert stopped.exit_code == 2
    file.write_text(f"about: x\nneeds: {{which: a model}}\nsteps: ['{good}']\n")
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert "done before" in again.stderr
    shown = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert shlex.split(shown.stdout) == ["kvferry", "models", "show", "smollm2-135m"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "about, needs"),
        ("about: x\nneeds: {}\nsteps: [1]", "about, needs"),
        ("about: [", "a readable recipe"),
        ("about: x\nneeds: {a: b}\nsteps: [fit]", "everything that"),
        ("about: x\nneeds: {}\nsteps: ['fit {x}']", "only names from needs"),
    ],
)
def test_recipes_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["recipe", str(file), "--work", str(tmp_path / "w")])
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "step",
    ["models list {", "models list {}", "models list {work!q}", "models list {work:d}", "", 'a "b'],
)
def test_a_step_that_is_none(tmp_path: Path, step: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump({"about": "x", "needs": {}, "steps": [step]}), encoding="utf-8")
    done = CliRunner().invoke(app, ["recipe", str(file), "--work", str(tmp_path), "--dry-run"])
    assert isinstance(done.exception, BadInput), done.exception


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("1: 2", []),
        ("[" * 5000, []),
        ("{about: x, needs: {}, steps: []}", []),
        ("{about: x, needs: {}, steps: [models list]}", ["typo=1"]),
        ("{about: x, needs: {a: b}, steps: [models list]}", ["a=1", "a=2"]),
    ],
)
def test_a_recipe_or_what_is_given_that_is_none(
    tmp_path: Path, text: str, given: list[str]
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    named = [f"--with={pair}" for pair in given]
    arguments = ["recipe", str(file), "--work", str(tmp_path), "--dry-run", *named]
    assert isinstance(CliRunner().invoke(app, arguments).exception, BadInput)


@pytest.mark.parametrize("state", ["[]", '{"done": 5}'])
def test_a_recipe_s_state_that_is_none(tmp_path: Path, state: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("{about: x, needs: {}, steps: [models list]}", encoding="utf-8")
    (tmp_path / "recipe.json").write_text(state, encoding="utf-8")
    done = CliRunner().invoke(app, ["recipe", str(file), "--work", str(tmp_path)])
    assert isinstance(done.exception, CorruptFile)
