"""What must start at once loads no torch: the package, help, judging and report."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "kvferry"
HEAVY = {"torch", "transformers", "vllm", "ray", "datasets", "tokenizers"}
LIGHT = sorted(
    path
    for folder in ("judging", "report")
    for path in (SRC / folder).rglob("*.py")
    if path.name != "evaluate.py"
)


def _at_import(body: list[ast.stmt]) -> list[str]:
    """Modules that importing a file loads: functions and TYPE_CHECKING blocks left out."""
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            names += _at_import(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            names += _at_import([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])
    return names


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: str(path.relative_to(SRC)))
def test_judging_and_report_import_nothing_heavy(path: Path) -> None:
    names = {n.split(".")[0] for n in _at_import(ast.parse(path.read_text("utf-8")).body)}
    assert not names & HEAVY


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, kvferry; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert _python(code).strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["capture", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['kvferry', *{arguments!r}]\n"
        "from kvferry.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        f"print('loaded', sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert _python(code).strip().endswith("loaded []")


def test_no_file_runs_code_of_a_model() -> None:
    """``trust_remote_code`` stands nowhere but as False; nothing is unpickled."""
    for path in SRC.rglob("*.py"):
        text = path.read_text("utf-8")
        assert "trust_remote_code=True" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", "")
                assert (owner, node.attr) not in {("torch", "load"), ("pickle", "load")}, path
