"""The figures in README.md and docs/results.md are those of the records in results/."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry.maps.cache_map import CacheMap

ROOT = Path(__file__).resolve().parent.parent


def test_pages_agree_with_their_records() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "results_tables.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kept_corrector_is_the_one_that_was_measured(tmp_path: Path) -> None:
    name = "qwen-0.5b-to-1.5b"
    shutil.copytree(ROOT / "results" / "tuned" / f"{name}-generic", tmp_path / "map")
    ridge = ROOT / "src" / "kvferry" / "shipped_maps" / name / "map.safetensors"
    shutil.copy(ridge, tmp_path / "map")
    header = json.loads((ROOT / "results/measure-anatomy-generic/header.json").read_text("utf-8"))
    tuned = CacheMap.from_pretrained(tmp_path / "map")
    assert tuned.identity == header["maps"][f"{name}-generic"]["identity"]
    bare = CacheMap.from_pretrained(ridge.parent)
    assert tuned.config.tuned is not None
    assert tuned.config.tuned["from_map"] == bare.identity == tuned.without_corrector().identity
