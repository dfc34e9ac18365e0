"""Ctrl-C and SIGTERM end a command with a code and a line; the same command goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_capture import write_texts

SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
from kvferry.models import load
from tests.small_pair import loaded
pair = {"small": loaded("qwen2", layers=2), "large": loaded("llama", seed=1)}
load.load_model = lambda spec, **_: pair[spec]
from kvferry.fitting.capture import PairReader
read, count = PairReader.read, 0
def read_and_interrupt(self, item):
    global count
    count += 1
    if count == int(os.environ.get("INTERRUPT_AT", "0")):
        signal.raise_signal(int(os.environ["SIGNAL"]))  # at a known text
    return read(self, item)
PairReader.read = read_and_interrupt
from kvferry.cli import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_in_a_capture_and_going_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    texts = write_texts(tmp_path, 400)
    arguments = ["capture", "small", "large", "--corpus", str(texts), "--out", "capture"]
    arguments += ["--tokens", "20000", "--chunk-tokens", "64", "--k-max", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    environment["PYTHONHASHSEED"] = "0"

    def start(interrupt_at: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            cwd=tmp_path,
            env={**environment, "INTERRUPT_AT": str(interrupt_at), "SIGNAL": str(int(number))},
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )

    stopped = start(100)
    assert stopped.returncode == code, stopped.stderr
    assert "interrupted" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "capture" / "capture.json").exists()
    again = start(0)
    assert again.returncode == 0, again.stderr
    assert '"moments_sha256"' in again.stdout
