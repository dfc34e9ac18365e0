"""Time to first token by part, for every arm and several context lengths, in one run.

Warm-up, repeats, medians with spread; arms are interleaved so that a drifting machine is fair to
all. Also the map's time over the bare matrix products it contains.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import BadInput
from kvferry.maps.linear import cache_features
from kvferry.provenance import code_version, machine
from kvferry.running import decode
from kvferry.running.decode import Sampling
from kvferry.running.handoff import ARMS, Handoff
from kvferry.running.timing import PARTS, now
from kvferry.terminal import progress

QUESTION = "What is the text about?"


def bench(
    ferry: Handoff,
    text: str,
    *,
    lengths: Sequence[int],
    repeats: int = 3,
    warmup: int = 1,
    new_tokens: int = 16,
) -> dict[str, Any]:
    """Time every arm at every length.

    Args:
        text: running text, at least as long as the longest length.
        lengths: context tokens.
        repeats: counted runs.
        warmup: runs before them, not counted.
        new_tokens: tokens generated, for the decode rate.

    Returns:
        medians with minimum and maximum, in milliseconds, and what they were measured on.

    Raises:
        BadInput: the text is too short.
    """
    asked = int(ferry.layout.tail(QUESTION).numel())
    ferry.require_room(max(lengths), asked + new_tokens)
    ids = ferry.layout.context(text)
    if ids.numel() < max(lengths):
        raise BadInput(
            expected=f"a text of at least {max(lengths)} tokens",
            got=f"{ids.numel()} tokens",
            next_step="give a longer --context, or smaller --lengths",
        )
    rows = []
    total = sum(lengths) * (repeats + warmup) * len(ARMS)
    sampling = Sampling(new_tokens, min_new_tokens=new_tokens)
    with progress("bench", total=total, unit="tokens") as advance:
        for length in lengths:
            runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
            for turn in range(warmup + repeats):
                for arm in ARMS:
                    timing = _run(ferry, ids[:length], arm, sampling)
                    if turn >= warmup:
                        runs[arm].append(timing)
                    advance(length)
            rows.append({"context_tokens": length, "arms": _arms(runs)})
    return {
        "format": "kvferry-bench-1",
        "map": ferry.map.identity,
        "source": ferry.map.config.source.spec,
        "receiver": ferry.map.config.receiver.spec,
        **ferry.rounding,
        "k": [ferry.map.config.k_key, ferry.map.config.k_value],
        "repeats": repeats,
        "warmup": warmup,
        "new_tokens": new_tokens,
        "lengths": rows,
        "map_over_products": map_over_products(ferry, ids[: min(512, max(lengths))]),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "code": code_version(),
    }


def map_over_products(ferry: Handoff, body: Tensor, *, repeats: int = 9) -> dict[str, Any]:
    """The map's whole time over that of the matrix products in it, interleaved.

    The map's time has features, products and biases in it; the products are the same matrices of
    the same shapes multiplied one after another, and nothing else.
    """
    with torch.no_grad():
        read = ferry.canonical(ferry.read(ferry.source, body).cache, body)
        features = cache_features(read)
        pairs = [
            (torch.cat([features[i] for i in t.layers], dim=1), t.weight)
            for t in ferry.map.targets.values()
        ]
        whole, bare = [], []
        for turn in range(repeats + 2):
            started = now(ferry.receiver.device)
            ferry.map_cache(read)
            middle = now(ferry.receiver.device)
            for left, right in pairs:
                torch.mm(left, right)
            ended = now(ferry.receiver.device)
            if turn >= 2:
                whole.append(1000 * (middle - started))
                bare.append(1000 * (ended - middle))
    return {
        "tokens": int(body.numel()),
        "map_ms": _spread(whole),
        "products_ms": _spread(bare),
        "ratio": statistics.median(w / b for w, b in zip(whole, bare, strict=True)),
        "repeats": repeats,
    }


def _run(ferry: Handoff, body: Tensor, arm: Any, sampling: Sampling) -> dict[str, float]:
    held = ferry.hand_over_ids(body, arm=arm)
    spans = held.spans.copy()
    tail = torch.cat((held.rest, ferry.layout.tail(QUESTION)))
    ids = decode.generate(held.loaded, held.cache, [tail], sampling, spans)[0]
    steps = max(int(ids.numel()) - 1, 1)
    timing = {part: spans.ms[part] for part in PARTS if part in spans.ms}
    return timing | {
        "ttft": spans.ttft_ms,
        "decode_tokens_per_s": 1000.0 * steps / max(spans.ms["decode"], 1e-9),
    }


def _arms(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        arm: {name: _spread([run[name] for run in timings]) for name in timings[0]}
        for arm, timings in runs.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }
