"""One receiver layer's maps, for every variant, in memory; on disk afterwards.

Owns which blocks of features a variant takes there, the order of the work (problems with the same
rows and blocks are solved together), and a layer map's file. Blocks are named ``kv.i``, ``res.i``
and ``pc``. One call: ``fit_layer(readings, plan, layer, variants)``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import BadInput
from kvferry.fitting.ridge import LAMBDAS
from kvferry.fitting.selection import choose_layers
from kvferry.terminal import say

from .moments import BlockMoments, Ridge, choose_lambda
from .pieces import READS, Readings, read_tensors
from .projection import Projection
from .variants import Variant

COMPONENTS = 128
FLOOR = 0.25
"""Least weight of a row, as a share of the mean."""
PROBE = {"fit": 12, "select": 6}
"""Pieces on which source layers are chosen."""


@dataclass(frozen=True)
class Plan:
    """Choices made once for a direction.

    Attributes:
        direction: forward or backward.
        lists: ``K``, ``V``, ``joint``, ``res`` -> receiver layer -> source layers, best first.
        basis: reduced K/V of every source layer: ``mean.i`` [F] and ``basis.i`` [F, c].
    """

    direction: str
    lists: dict[str, list[list[int]]]
    basis: dict[str, Tensor]

    @property
    def reads(self) -> str:
        """The side whose features are taken."""
        return READS[self.direction][0]

    @property
    def answers(self) -> str:
        """The side whose keys and values are fitted."""
        return READS[self.direction][1]

    def blocks(self, variant: Variant, layer: int, target: str) -> tuple[str, ...]:
        """The blocks of features that a variant takes for a target.

        Raises:
            BadInput: more layers than there are in the lists.
        """
        count = variant.value_layers if target == "V" else variant.key_layers
        chosen = self.lists["joint" if variant.joint else "V" if target == "V" else "K"][layer]
        residuals = self.lists["res"][layer]
        if count > len(chosen) or variant.residuals > len(residuals):
            raise BadInput(
                expected=f"up to {len(chosen)} K/V layers and {len(residuals)} residuals",
                got=variant.name,
                next_step="ask for fewer",
            )
        names = [f"kv.{i}" for i in chosen[:count]]
        names += [f"res.{i}" for i in residuals[: variant.residuals]]
        names += ["res.0"] if variant.embedding else []
        names += ["pc"] if variant.all_layers else []
        return tuple(dict.fromkeys(names))


def make_plan(readings: Readings, direction: str, *, k_max: int = 6, residuals: int = 2) -> Plan:
    """Choose source layers on the first pieces, and reduce every layer's K/V on all rows.

    K/V layers as ``fitting/selection.py`` does; ``joint`` and the residuals by the R^2 of K and V
    together, each scaled to unit variance.
    """
    reads, answers = READS[direction]
    depth = len(readings.geometry(reads)["layers"])
    goals = _with_joint({split: _goals(readings, answers, split) for split in PROBE})
    lists: dict[str, list[list[int]]] = {"K": [], "V": [], "joint": [], "res": []}
    receiver_depth = len(readings.geometry(answers)["layers"])
    say(f"{direction}: choosing up to {k_max} source layers for each of {receiver_depth} layers")
    x = {s: _features(readings, f"{reads}.kv", depth, s, step=1) for s in PROBE}
    found, _ = choose_layers((x["fit"], goals["fit"]), (x["select"], goals["select"]), k_max=k_max)
    del x
    for kind in ("K", "V", "joint"):
        lists[kind] = [found[f"{r}.{kind}"] for r in range(receiver_depth)]
    # Every second row, every joint target: residuals are wide.
    x = {s: _features(readings, f"{reads}.res", depth, s, step=2) for s in PROBE}
    joint = {s: {n: t[::2] for n, t in goals[s].items() if n.endswith("joint")} for s in PROBE}
    found, _ = choose_layers(
        (x["fit"], joint["fit"]), (x["select"], joint["select"]), k_max=residuals
    )
    lists["res"] = [found[f"{r}.joint"] for r in range(receiver_depth)]
    del x, goals, joint
    basis = {}
    for i in range(depth):
        (rows,) = readings.load("fit", [f"{reads}.kv.{i}"])
        mean = rows.double().mean(0)
        centred = rows.double() - mean
        scale = centred.square().mean(0).sqrt().clamp_min(1e-9)
        centred /= scale
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        kept = vectors[:, -COMPONENTS:] / scale[:, None]
        basis |= {f"mean.{i}": mean.float(), f"basis.{i}": kept.float().contiguous()}
    return Plan(direction, lists, basis)


def _features(readings: Readings, stem: str, depth: int, split: str, *, step: int) -> list[Tensor]:
    return [
        readings.load(split, [f"{stem}.{i}"], limit=PROBE[split])[0][::step].clone()
        for i in range(depth)
    ]


def _goals(readings: Readings, side: str, split: str) -> dict[str, Tensor]:
    named = {}
    for r in range(len(readings.geometry(side)["layers"])):
        (rows,) = readings.load(split, [f"{side}.kv.{r}"], limit=PROBE[split])
        width = rows.shape[1] // 2
        named |= {f"{r}.K": rows[:, :width], f"{r}.V": rows[:, width:]}
    return named


def _with_joint(goals: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """K and V side by side, each over its deviation on the fit's rows."""
    wide = {split: dict(named) for split, named in goals.items()}
    for name, keys in goals["fit"].items():
        if not name.endswith("K"):
            continue
        layer = name[:-2]
        scales = [
            (t - t.mean(0)).square().mean().sqrt().clamp_min(1e-9)
            for t in (keys, goals["fit"][f"{layer}.V"])
        ]
        for split, named in goals.items():
            parts = (named[name] / scales[0], named[f"{layer}.V"] / scales[1])
            wide[split][f"{layer}.joint"] = torch.cat(parts, 1)
    return wide


def load_block(readings: Readings, plan: Plan, split: str, name: str) -> Tensor:
    """A block's rows ``[N, F]`` of a split, float32."""
    if name != "pc":
        return readings.load(split, [f"{plan.reads}.{name}"])[0]
    parts = []
    for i in range(len(plan.basis) // 2):
        (rows,) = readings.load(split, [f"{plan.reads}.kv.{i}"])
        parts.append((rows - plan.basis[f"mean.{i}"]) @ plan.basis[f"basis.{i}"])
    return torch.cat(parts, 1)


def load_projection(readings: Readings, side: str, layer: int) -> Projection:
    """A layer's frozen parts from the readings' folder."""
    stem = f"{side}.{layer}."
    named = read_tensors(readings.folder / "frozen.safetensors", stem=stem)
    return Projection({name.removeprefix(stem): tensor for name, tensor in named.items()})


@dataclass(frozen=True)
class Target:
    """The map of one target: ``(x - center) left [right] + bias``.

    Attributes:
        blocks: features, in the weights' order.
        left: ``[F, W]``, or ``[F, r]`` of a low-rank map.
        right: ``[r, W]`` or ``None``.
        center: ``[F]``, the fit's mean.
        bias: ``[W]``, the target's mean in the fit.
        lam: the lambda.
        numbers: weights that aren't zero by design.
    """

    blocks: tuple[str, ...]
    left: Tensor
    right: Tensor | None
    center: Tensor
    bias: Tensor
    lam: float
    numbers: int

    def apply(self, features: dict[str, Tensor]) -> Tensor:
        """``[T, W]``."""
        x = torch.cat([features[name] for name in self.blocks], 1) - self.center
        y = x @ self.left
        return (y if self.right is None else y @ self.right) + self.bias

    @property
    def int8_bytes(self) -> int:
        """Weights at a byte; a scale and a bias for each output, and the center, at four."""
        outputs = 2 * len(self.bias) + (0 if self.right is None else len(self.right))
        return self.numbers + 4 * (outputs + len(self.center))


LayerMap = dict[str, Target]


def apply_layer(
    found: LayerMap, features: dict[str, Tensor], projection: Projection
) -> dict[str, Tensor]:
    """Keys and values ``[T, W]`` of a receiver layer."""
    if "H" not in found:
        return {name: target.apply(features) for name, target in found.items()}
    normed = found["H"].apply(features)
    return {"K": projection.keys(normed), "V": projection.values(normed)}


def load_goals(readings: Readings, plan: Plan, split: str, layer: int) -> dict[str, Tensor]:
    """The receiver layer's own keys and values ``[N, W]``."""
    (rows,) = readings.load(split, [f"{plan.answers}.kv.{layer}"])
    width = rows.shape[1] // 2
    return {"K": rows[:, :width], "V": rows[:, width:]}


@dataclass
class Reduced:
    """The block ``pc``, the same for all receiver layers.

    Attributes:
        rows: split -> ``[N, F]``; empty where no variant takes it.
        gram: its products over the fit's rows, once they are summed.
    """

    rows: dict[str, Tensor]
    gram: dict[tuple[str, str], Tensor]


def fit_layer(
    readings: Readings, plan: Plan, layer: int, variants: list[Variant], pc: Reduced
) -> dict[str, tuple[LayerMap, dict[str, float]]]:
    """Every variant's map of one receiver layer, with its R^2 on the test rows.

    The rows of a split are in memory only while they are needed: first the fit's for the sums,
    then the select's for lambda, then the test's.
    """
    projection = load_projection(readings, plan.answers, layer)
    problems: dict[tuple[Any, ...], dict[tuple[str, ...], list[tuple[Variant, str]]]]
    problems = defaultdict(lambda: defaultdict(list))
    for variant in variants:
        for target in variant.targets:
            blocks = plan.blocks(variant, layer, target)
            problems[variant.weighting, variant.rows][blocks].append((variant, target))
    names = sorted({name for view in problems.values() for key in view for name in key})

    def features(split: str) -> dict[str, Tensor]:
        return {
            n: pc.rows[split] if n == "pc" else load_block(readings, plan, split, n) for n in names
        }

    x = features("fit")
    y = _targets(readings, plan, "fit", layer, projection, variants)
    base = {t: rows.mean(0, dtype=torch.float64) for t, rows in y.items()}
    y = {t: rows - base[t].float() for t, rows in y.items()}
    mean, scale = _standardise(x)
    sums = {}
    for view, mine in problems.items():
        asked = {(blocks, target) for blocks, jobs in mine.items() for _, target in jobs}
        known = pc.gram if view == (None, None) else {}
        weights = _row_weights(readings, plan, layer, *view)
        sums[view] = BlockMoments.of(x, y, asked, weights, known)
        if view == (None, None):
            pc.gram |= {k: g for k, g in sums[view].gram.items() if k == ("pc", "pc")}
    del x
    y = _targets(readings, plan, "select", layer, projection, variants)
    x = features("select")
    found: dict[str, LayerMap] = {variant.name: {} for variant in variants}
    for view, mine in problems.items():
        for blocks, jobs in mine.items():
            center = torch.cat([mean[b] for b in blocks])
            deviation = torch.cat([scale[b] for b in blocks])
            held = torch.cat([x[b] for b in blocks], 1).double().sub_(center).div_(deviation)
            solved = _solve(readings, plan, layer, sums[view], blocks, jobs, held, y, base)
            for (variant, target), (left, right, x_mean, bias, lam, numbers) in solved.items():
                found[variant.name][target] = Target(
                    blocks,
                    (left / deviation[:, None]).float().contiguous(),
                    None if right is None else right.float().contiguous(),
                    (center + x_mean * deviation).float(),
                    bias.float(),
                    lam,
                    numbers,
                )
        del sums[view]
    x = features("test")
    goals = load_goals(readings, plan, "test", layer)
    return {
        name: (maps, _r2(apply_layer(maps, x, projection), goals)) for name, maps in found.items()
    }


def _targets(
    readings: Readings,
    plan: Plan,
    split: str,
    layer: int,
    projection: Projection,
    variants: list[Variant],
) -> dict[str, Tensor]:
    named = load_goals(readings, plan, split, layer)
    if any(variant.normed for variant in variants):
        (residual,) = readings.load(split, [f"{plan.answers}.res.{layer}"])
        named["H"] = projection.normed(residual)
    return named


def _standardise(x: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Standardised blocks put in the place of raw ones; their means and deviations, float64."""
    mean, scale = {}, {}
    for name, rows in x.items():
        if name == "pc":  # centred by its making, and kept for the other layers
            mean[name] = torch.zeros(rows.shape[1], dtype=torch.float64)
            scale[name] = torch.ones(rows.shape[1], dtype=torch.float64)
            continue
        mean[name] = rows.mean(0, dtype=torch.float64)
        spread = (rows - mean[name].float()).square().mean(0, dtype=torch.float64).sqrt()
        scale[name] = torch.where(spread > 1e-9, spread, torch.ones_like(spread))
        x[name] = (rows - mean[name].float()) / scale[name].float()
    return mean, scale


def _row_weights(
    readings: Readings, plan: Plan, layer: int, weighting: str | None, rows: int | None
) -> Tensor:
    """``[N]`` with mean 1; the first ``rows`` rows alone.

    Raises:
        BadInput: more rows than there are.
    """
    have = readings.rows("fit")
    if rows is not None and rows > have:
        raise BadInput(
            expected=f"up to {have} rows, as many as were read",
            got=str(rows),
            next_step="ask for fewer, or read with a larger --tokens",
        )
    if weighting == "attention":
        weights = readings.received("fit", plan.answers, layer).double()
    elif weighting == "norm":
        (residual,) = readings.load("fit", [f"{plan.answers}.res.{layer}"])
        weights = 1.0 / residual.norm(dim=1).double().clamp_min(1e-6)
    else:
        weights = torch.ones(have, dtype=torch.float64)
    weights = weights[:rows]
    weights = weights.clamp_min(FLOOR * float(weights.mean()))
    return weights / weights.mean()


Solution = tuple[Tensor, Tensor | None, Tensor, Tensor, float, int]


def _solve(
    readings: Readings,
    plan: Plan,
    layer: int,
    moments: BlockMoments,
    blocks: tuple[str, ...],
    jobs: list[tuple[Variant, str]],
    held: Tensor,
    goals: dict[str, Tensor],
    base: dict[str, Tensor],
) -> dict[tuple[Variant, str], Solution]:
    """All maps on the same rows and blocks: one factorisation for each lambda."""
    targets = sorted({target for _, target in jobs})
    gram, cross, x_mean, y_mean = moments.problem(blocks, targets)
    ends = torch.tensor([len(moments.y_sum[t]) for t in targets]).cumsum(0).tolist()
    columns = {t: slice(e - len(moments.y_sum[t]), e) for t, e in zip(targets, ends, strict=True)}
    lambdas = {*LAMBDAS, *(v.lam for v, _ in jobs if v.lam is not None)}
    ridge = Ridge.of(gram, cross)
    whole = any(not v.same_head for v, _ in jobs)
    tried = {lam: ridge.solve(lam) for lam in sorted(lambdas)} if whole else {}
    full = {lam: weight for lam, weight in tried.items() if weight is not None}
    solved: dict[tuple[Variant, str], Solution] = {}
    for variant, target in jobs:
        place = columns[target]
        bias = base[target] + y_mean[place]
        solutions, numbers = full, len(x_mean) * len(bias)
        if variant.same_head:
            masks = _head_rows(readings, plan, blocks)
            solutions = _by_head(ridge, place, masks, lambdas)
            numbers = int(masks[0].sum()) * len(bias)
            place = slice(None)
        choice = {k: v for k, v in solutions.items() if variant.lam in (None, k)}
        if variant.lam is None:
            choice = {k: v for k, v in choice.items() if k in LAMBDAS}
        lam = choose_lambda(choice, held - x_mean, goals[target], bias, place)
        left, right = choice[lam][:, place], None
        if variant.rank is not None:
            metric = _metric(readings, plan, layer, target) if variant.rank_weighted else None
            left, right = ridge.low_rank(left, lam, variant.rank, metric)
            numbers = left.numel() + right.numel()
        solved[variant, target] = (left, right, x_mean, bias, lam, numbers)
    return solved


def _head_rows(readings: Readings, plan: Plan, blocks: tuple[str, ...]) -> list[Tensor]:
    """For each head which features are its own, ``[F]`` bool.

    Raises:
        BadInput: another number of heads on the two sides.
    """
    shapes = [readings.geometry(side)["layers"][0] for side in (plan.reads, plan.answers)]
    heads = [shape["num_kv_heads"] for shape in shapes]
    if heads[0] != heads[1]:
        raise BadInput(
            expected="as many key/value heads in both models, for headN",
            got=f"{heads[0]} and {heads[1]}",
            next_step="leave headN out",
        )
    width = shapes[0]["head_dim"]
    of_head = torch.arange(heads[0] * width) // width
    places = of_head.repeat(2 * len(blocks))
    return [places == head for head in range(heads[0])]


def _by_head(
    ridge: Ridge, place: slice, masks: list[Tensor], lambdas: set[float]
) -> dict[float, Tensor]:
    """Lambda -> weights ``[F, W]`` with zeros between heads."""
    found: dict[float, Tensor] = {}
    right = ridge.right[:, place]
    width = right.shape[1] // len(masks)
    for lam in sorted(lambdas):
        weight = torch.zeros_like(right)
        for head, mask in enumerate(masks):
            outputs = slice(head * width, (head + 1) * width)
            part = Ridge.of(ridge.gram[mask][:, mask], right[mask, outputs].clone()).solve(lam)
            if part is None:
                break
            weight[mask, outputs] = part
        else:
            found[lam] = weight / ridge.scale[:, None]
    return found


def _metric(readings: Readings, plan: Plan, layer: int, target: str) -> Tensor:
    """What an error in an output counts, ``[W, W]``: queries for K, output projection for V."""
    if target == "K":
        return torch.block_diag(*readings.queries(plan.answers, layer))
    return torch.block_diag(*load_projection(readings, plan.answers, layer).tensors["out"])


def _r2(made: dict[str, Tensor], goals: dict[str, Tensor]) -> dict[str, float]:
    """R^2 over all dims together; the rows' own mean is what a map is compared with."""
    found = {}
    for kind, goal in goals.items():
        error = (made[kind] - goal).double().square().sum()
        total = (goal.double() - goal.double().mean(0)).square().sum().clamp_min(1e-12)
        found[kind] = float(1.0 - error / total)
    return found
