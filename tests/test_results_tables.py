"""The figures in README.md and docs/results.md are those of the records in docs/results/."""

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


def test_the_kept_corrector_gives_the_losses_on_record(tmp_path: Path) -> None:
    name, results = "qwen-0.5b-to-1.5b", ROOT / "docs" / "results"
    kept = results / "tuned" / f"{name}-generic"
    shutil.copytree(kept, tmp_path / "map")
    ridge = ROOT / "src" / "kvferry" / "shipped_maps" / name / "map.safetensors"
    shutil.copy(ridge, tmp_path / "map")
    header = json.loads((results / "measure-anatomy-generic/header.json").read_text("utf-8"))
    same = json.loads((kept / "same_losses.json").read_text("utf-8"))
    tuned = CacheMap.from_pretrained(tmp_path / "map")
    assert same["map"] == tuned.identity
    assert same["record_maps"] == {f"{name}-generic": header["maps"][f"{name}-generic"]["identity"]}
    assert same["n"] == len(header["texts"])
    assert same["max_abs_difference_nats"] < 0.02
    assert abs(same["mean_difference_nats"]) < 0.002
    assert tuned.config.tuned is not None
    bare = CacheMap.from_pretrained(ridge.parent)
    assert tuned.config.tuned["from_map"] == bare.identity == tuned.without_corrector().identity
