"""Capture's speed over the plain forward speed of the two models, in one process.

    python benchmarks/capture_speed.py SOURCE RECEIVER TEXTS [--texts 12] [--out FILE]

Texts are read alternately by the two models alone (decoder only, cache kept, no logits) and by the
capture's own loop (the same forward passes, then features and moments). The last line is JSON:
the ratio of the sums, and its spread over texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from kvferry.fitting.capture import (
    DIRECTIONS,
    CaptureSettings,
    PairReader,
    _stack,
    plan_items,
    targets_of,
)
from kvferry.fitting.corpus import read_corpus
from kvferry.fitting.moments import Moments
from kvferry.fitting.selection import choose_layers
from kvferry.maps.linear import cache_features
from kvferry.models.cache import forward
from kvferry.models.geometry import Geometry
from kvferry.models.load import load_model
from kvferry.provenance import code_version, machine, write_json
from kvferry.running.prompt import PromptLayout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("receiver")
    parser.add_argument("corpus", nargs="+")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--k-max", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    models = load_model(arguments.source), load_model(arguments.receiver)
    layout = PromptLayout().bind(models[1].tokenizer)
    items = plan_items(read_corpus(arguments.corpus), layout, CaptureSettings(tokens=20_000))
    items = [i for i in items if i.token_ids.numel() == 512][: arguments.texts + 4]
    reader = PairReader(models, layout)
    probe = [reader.read(item) for item in items[:4]]
    direction = DIRECTIONS[0]
    plan, _ = choose_layers(
        _stack(probe[:3], direction), _stack(probe[3:], direction), k_max=arguments.k_max
    )
    widths = [2 * Geometry.from_config(m.model.config).layers[0].width for m in models]
    moments = Moments.empty(plan, widths[0], widths[1] // 2)
    plain, captured = [], []
    for item in items[4:]:
        started = time.perf_counter()
        ids = torch.cat((reader.prefix, item.token_ids))
        with torch.no_grad():
            for loaded in models:
                forward(loaded.model, ids[None], torch.arange(ids.numel())[None])
        middle = time.perf_counter()
        caches = reader.read(item)
        moments.add(cache_features(caches[0]), targets_of(caches[1]))
        ended = time.perf_counter()
        plain.append(middle - started)
        captured.append(ended - middle)
    ratios = [p / c for p, c in zip(plain, captured, strict=True)]
    tokens = sum(int(i.token_ids.numel()) for i in items[4:])
    result = {
        "plain_tokens_per_s": tokens / sum(plain),
        "capture_tokens_per_s": tokens / sum(captured),
        "ratio": sum(plain) / sum(captured),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "n": len(ratios),
        "k_max": arguments.k_max,
        "machine": machine(),
        "code": code_version(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    print(json.dumps(result, sort_keys=True))


if __name__ == "__main__":
    main()
