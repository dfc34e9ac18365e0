"""Ctrl-C ends a command with code 130 and one line, and the same command goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.test_capture import write_texts

SCRIPT = """
import sys
from kvferry.models import load
from tests.small_pair import loaded
pair = {"small": loaded("qwen2", layers=2), "large": loaded("llama", seed=1)}
load.load_model = lambda spec, **_: pair[spec]
from kvferry.cli import main
main()
"""


def test_ctrl_c_in_a_capture_and_going_on(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 400)
    arguments = ["capture", "small", "large", "--corpus", str(texts), "--out", "capture"]
    arguments += ["--tokens", "20000", "--chunk-tokens", "64", "--k-max", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    environment["PYTHONHASHSEED"] = "0"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    with start() as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("moments:"):
                running.send_signal(signal.SIGINT)
                break
        _, rest = running.communicate(timeout=60)
    assert running.returncode == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    with start() as again:
        out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert '"moments_sha256"' in out
