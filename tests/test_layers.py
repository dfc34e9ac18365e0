"""Imports follow docs/architecture.md, and light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "kvferry"
ORDER = [
    {"errors"},
    {"provenance"},
    {"terminal"},
    {"demo_data"},
    {"models"},
    {"maps"},
    {"running"},
    {"fitting"},
    {"judging"},
    {"audio"},
    {"report"},
    {"serving"},
    {"engines"},
    {"verbs"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


def room(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_file_has_a_room() -> None:
    assert {room(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_up_only(path: Path) -> None:
    own = RANK[room(path)]
    for name in imports(path):
        if name.startswith("kvferry."):
            other = name.split(".")[1]
            if other in RANK:
                assert RANK[other] <= own, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "statement",
    [
        "import kvferry",
        "import kvferry.cli",
        "import kvferry.judging.paired_stats",
        "import kvferry.report.demo_page",
        "import kvferry.models.catalog",
    ],
)
def test_light_imports_load_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_resolve() -> None:
    import kvferry

    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = kvferry.nothing
