"""How float32 products are computed is asked for once and kept in records."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def kvferry(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_an_unknown_kind_is_refused_with_what_there_is() -> None:
    for done in (
        kvferry("--matmul", "fp4", "models", "list"),
        kvferry("models", "list", KVFERRY_MATMUL="fp4"),
    ):
        assert done.returncode == 2
        assert "float32, bfloat16" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("asked", "kept"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_headers_say_how_products_were_computed(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, kept: str
) -> None:
    from kvferry.provenance import machine

    monkeypatch.delenv("KVFERRY_MATMUL", raising=False)
    if asked:
        monkeypatch.setenv("KVFERRY_MATMUL", asked)
    assert machine()["matmul"] == kept
