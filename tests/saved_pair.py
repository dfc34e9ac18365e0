"""A pair of small random models in folders, with a map between them: for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.models.load import load_model
from tests.small_pair import model, random_map, tokenizer

LONG = {"max_position_embeddings": 4096}


def save_model(folder: Path, name: str, **more: Any) -> Path:
    """Weights, config and tokenizer as transformers writes them."""
    model(name, **LONG, **more).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_pair(root: Path) -> Path:
    """Two models and a random map between them; returns the map's folder."""
    source = load_model(str(save_model(root / "source", "qwen2", layers=2)))
    receiver = load_model(str(save_model(root / "receiver", "llama", seed=1, kv_heads=1)))
    random_map(source, receiver).save_pretrained(root / "map")
    return root / "map"
