"""All variants of one direction: solved layer by layer, kept, and put into records.

Owns the output folder: ``plan.json`` and ``basis.safetensors`` (choices made once),
``weights/VARIANT/LAYER.safetensors`` with a JSON file each, ``header.json`` and ``records.jsonl``
with one record a variant. Only what is missing is done; a stopped run goes on. One call:
``fit_variants(readings, "forward", variants, folder)``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    read_object,
    read_records,
    sole_writer,
    start_records,
    write_json,
)
from kvferry.terminal import progress

from .layers import LayerMap, Plan, Reduced, Target, fit_layer, load_block, make_plan
from .pieces import Readings, read_tensors, write_tensors
from .variants import Variant, default_variants


def fit_variants(
    readings: Readings,
    direction: str,
    variants: list[Variant],
    folder: Path,
    *,
    k_max: int = 6,
    after_layer: Callable[[int], None] | None = None,
) -> Plan:
    """Solve what is missing and write a record for each variant.

    Args:
        k_max: K/V source layers kept in the lists.
        after_layer: called with each receiver layer done (tests stop here).

    Returns:
        the plan, for measuring losses.

    Raises:
        BadInput: the folder holds a run of other readings or another direction.
    """
    header = {
        "format": "kvferry-ridge-ablation-1",
        "readings": readings.header["identity"],
        "direction": direction,
        "k_max": k_max,
        "rows": {s: readings.rows(s) for s in ("fit", "select", "test")},
        "models": {s: m["spec"] for s, m in readings.header["models"].items()},
        "revisions": {s: m["revision"] for s, m in readings.header["models"].items()},
        "books": sorted({f"{p['split']}: {p['book']}" for p in readings.header["pieces"]}),
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "ablation"):
        records = start_records(folder, header, same=("readings", "direction", "k_max"))
        plan = _plan(readings, direction, folder, k_max)
        depth = len(readings.geometry(plan.answers)["layers"])
        for variant in variants:  # a variant that can't be fitted stops here, before the long part
            for target in variant.targets:
                for layer in range(depth):
                    plan.blocks(variant, layer, target)
        pc = Reduced({}, {})
        with progress("fit", total=depth, unit="layers") as advance:
            for layer in range(depth):
                missing = [v for v in variants if not _stem(folder, v, layer, ".json").exists()]
                if any(v.all_layers for v in missing) and not pc.rows:
                    splits = ("fit", "select", "test")
                    pc.rows = {s: load_block(readings, plan, s, "pc") for s in splits}
                if missing:
                    found = fit_layer(readings, plan, layer, missing, pc)
                    for variant in missing:
                        _save(folder, variant, layer, *found[variant.name])
                advance(1)
                if after_layer is not None:
                    after_layer(layer)
        done = {record["variant"] for record in read_records(records)}
        for variant in variants:
            if variant.name not in done:
                add_record(records, _record(readings, plan, folder, variant, depth))
    return plan


def asked_variants(readings: Readings, direction: str, k: int) -> list[Variant]:
    """The default list for these readings."""
    reads, answers = ("source", "receiver")[:: 1 if direction == "forward" else -1]
    shapes = [readings.geometry(side)["layers"][0] for side in (reads, answers)]
    return default_variants(
        width=shapes[1]["num_kv_heads"] * shapes[1]["head_dim"],
        same_heads=shapes[0]["num_kv_heads"] == shapes[1]["num_kv_heads"],
        rows=readings.rows("fit"),
        k=k,
    )


def _plan(readings: Readings, direction: str, folder: Path, k_max: int) -> Plan:
    path = folder / "plan.json"
    if not path.exists():
        plan = make_plan(readings, direction, k_max=k_max)
        write_tensors(folder / "basis.safetensors", plan.basis)
        write_json(path, {"lists": plan.lists})
    lists = read_object(path, "lists")["lists"]
    return Plan(direction, lists, read_tensors(folder / "basis.safetensors"))


def _stem(folder: Path, variant: Variant, layer: int, suffix: str) -> Path:
    return folder / "weights" / variant.slug / f"{layer:03d}{suffix}"


def _save(folder: Path, variant: Variant, layer: int, maps: LayerMap, r2: dict[str, float]) -> None:
    tensors, facts = {}, {}
    for name, target in maps.items():
        tensors |= {
            f"{name}.left": target.left,
            f"{name}.center": target.center,
            f"{name}.bias": target.bias,
        }
        if target.right is not None:
            tensors[f"{name}.right"] = target.right
        facts[name] = {
            "blocks": list(target.blocks),
            "lambda": target.lam,
            "numbers": target.numbers,
            "int8_bytes": target.int8_bytes,
        }
    write_tensors(_stem(folder, variant, layer, ".safetensors"), tensors)
    write_json(_stem(folder, variant, layer, ".json"), {"r2_test": r2, "targets": facts})


def load_layer_map(folder: Path, variant: Variant, layer: int) -> LayerMap:
    """A layer's map as it was saved."""
    facts = read_object(_stem(folder, variant, layer, ".json"), "targets")["targets"]
    tensors = read_tensors(_stem(folder, variant, layer, ".safetensors"))
    return {
        name: Target(
            tuple(fact["blocks"]),
            tensors[f"{name}.left"],
            tensors.get(f"{name}.right"),
            tensors[f"{name}.center"],
            tensors[f"{name}.bias"],
            fact["lambda"],
            fact["numbers"],
        )
        for name, fact in facts.items()
    }


def _record(
    readings: Readings, plan: Plan, folder: Path, variant: Variant, depth: int
) -> dict[str, Any]:
    """R^2, size and work of a variant, over all layers."""
    layers = [read_object(_stem(folder, variant, r, ".json"), "r2_test") for r in range(depth)]
    facts = [fact for layer in layers for fact in layer["targets"].values()]
    numbers = sum(fact["numbers"] for fact in facts)
    shared = own = 0
    if variant.all_layers:
        shared = sum(t.numel() for name, t in plan.basis.items() if name.startswith("basis"))
    if variant.normed:  # the receiver's own W_k and W_v have to be run behind the map
        side = readings.header["models"][plan.answers]["geometry"]
        own = sum(
            2 * side["hidden_size"] * shape["num_kv_heads"] * shape["head_dim"]
            for shape in side["layers"]
        )
    lambdas = [fact["lambda"] for fact in facts]
    return {
        "variant": variant.name,
        "direction": plan.direction,
        "rows": min(variant.rows or readings.rows("fit"), readings.rows("fit")),
        "n_test_rows": readings.rows("test"),
        "r2_test": {
            kind: sum(layer["r2_test"][kind] for layer in layers) / depth for kind in ("K", "V")
        },
        "numbers": numbers + shared,
        "int8_bytes": sum(fact["int8_bytes"] for fact in facts) + shared,
        "multiply_adds": numbers + shared + own,
        "lambdas": {f"{lam:g}": lambdas.count(lam) for lam in sorted(set(lambdas))},
        "code": code_version(),
        "torch_threads": torch.get_num_threads(),
    }
