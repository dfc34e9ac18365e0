"""The figures in README.md and docs/results.md are those of the records in results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pages_agree_with_their_records() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "results_tables.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
