"""Twelve real passages with a question each; CC BY text, see ATTRIBUTION.md in this folder."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def passages() -> list[dict[str, Any]]:
    """The rows: id, title, passage, question, options, answer, accept, licence."""
    text = resources.files(__name__).joinpath("passages.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
