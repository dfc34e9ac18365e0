"""Spans of time: source prefill, map, inject, tail, first token, decode.

Owns the clock. On a CUDA device it waits for the device at both ends of a span. One call:
``with spans.measure("map"): …``.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("source_prefill", "prefill", "map", "correct", "inject", "tail", "first_token")
"""The parts of a time to first token, in order; an arm has those it needs."""


class Spans:
    """Milliseconds by name; a name measured twice adds up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ms: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time a block."""
        started = now(self.device)
        try:
            yield
        finally:
            self.add(name, now(self.device) - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a name."""
        self.ms[name] = self.ms.get(name, 0.0) + 1000.0 * seconds

    def copy(self) -> Spans:
        """The same spans, to be added to apart."""
        twin = Spans(self.device)
        twin.ms = dict(self.ms)
        return twin

    @property
    def ttft_ms(self) -> float:
        """Sum of the parts of a time to first token."""
        return sum(self.ms.get(part, 0.0) for part in PARTS)


def now(device: torch.device) -> float:
    """Seconds, after the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: the device's on CUDA, else this process's resident size."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
