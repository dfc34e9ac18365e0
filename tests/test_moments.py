"""Sums of rows: the same however they came, equal to numpy's, and enough for ridge and R^2."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.errors import WrongPair
from kvferry.fitting.capture import fit_in_memory
from kvferry.fitting.moments import Candidates, Moments, moments_bytes, pairs_needed
from kvferry.fitting.ridge import FitResult, FitSettings, _solve_target, r_squared
from kvferry.fitting.selection import choose_layers
from kvferry.models.geometry import Geometry
from tests.tiny import config

CANDIDATES: Candidates = {"0.K": [0, 2], "0.V": [2, 1], "1.K": [1], "1.V": [3, 0, 2]}
F, W, LAYERS = 6, 4, 4
Rows = tuple[list[Tensor], dict[str, Tensor]]


def rows(count: int, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    features = [3.0 + torch.randn(count, F, generator=draw) for _ in range(LAYERS)]
    targets = {
        name: features[layers[0]][:, :W] * 0.7 + torch.randn(count, W, generator=draw)
        for name, layers in CANDIDATES.items()
    }
    return features, targets


def of(value: Rows, start: int = 0, stop: int | None = None) -> Rows:
    return [x[start:stop] for x in value[0]], {n: y[start:stop] for n, y in value[1].items()}


def summed(*parts: Rows) -> Moments:
    moments = Moments.empty(CANDIDATES, F, W)
    for features, targets in parts:
        moments.add(features, targets)
    return moments


def same(a: Moments, b: Moments, tolerance: float) -> None:
    assert a.rows == b.rows
    one, two = a.tensors("m"), b.tensors("m")
    assert one.keys() == two.keys()
    for name in one:
        scale = float(one[name].abs().max())
        assert float((one[name] - two[name]).abs().max()) <= tolerance * scale, name


def columns(value: Rows, name: str, layers: list[int]) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate([value[0][i].double().numpy() for i in layers], axis=1)
    return x, value[1][name].double().numpy()


@given(cuts=st.lists(st.integers(1, 199), max_size=12, unique=True))
@settings(max_examples=30, deadline=None)
def test_streamed_moments_are_batch_moments(cuts: list[int]) -> None:
    whole = rows(200)
    edges = [0, *sorted(cuts), 200]
    parts = [of(whole, a, b) for a, b in itertools.pairwise(edges)]
    same(summed(whole), summed(*parts), 1e-12)


@given(order=st.permutations(range(5)))
@settings(max_examples=30, deadline=None)
def test_merging_in_any_order(order: list[int]) -> None:
    parts = [rows(20 + 10 * i, seed=i) for i in range(5)]
    total = Moments.empty(CANDIDATES, F, W)
    for index in order:
        total.merge(summed(parts[index]))
    same(summed(*parts), total, 1e-12)


def test_merging_pairs_of_merges() -> None:
    parts = [summed(rows(30, seed=i)) for i in range(4)]
    left, right = parts[0], parts[2]
    left.merge(parts[1])
    right.merge(parts[3])
    left.merge(right)
    same(summed(*(rows(30, seed=i) for i in range(4))), left, 1e-12)


def test_merging_other_problems_is_refused() -> None:
    other = Moments.empty({**CANDIDATES, "0.K": [0, 1]}, F, W)
    with pytest.raises(WrongPair, match="same source layers"):
        summed(rows(9)).merge(other)


def test_tensors_and_back() -> None:
    moments = summed(rows(40))
    back = Moments.from_tensors(moments.tensors("forward/fit"), "forward/fit", CANDIDATES)
    same(moments, back, 0.0)
    incomplete = moments.tensors("a")
    del incomplete["a.cross.1.V"]
    with pytest.raises(KeyError):
        Moments.from_tensors(incomplete, "a", CANDIDATES)


def test_only_needed_blocks_are_kept_and_bytes_are_counted() -> None:
    assert pairs_needed(CANDIDATES) == {0: [0, 2, 3], 1: [1, 2], 2: [2, 3], 3: [3]}
    moments = summed(rows(5))
    held = sum(t.nbytes for t in (*moments.gram.values(), *moments.cross.values()))
    assert moments_bytes(CANDIDATES, F, W) == held


@pytest.mark.parametrize(("i", "j"), [(0, 0), (0, 2), (2, 0), (1, 2), (3, 0)])
def test_blocks_are_symmetric_products(i: int, j: int) -> None:
    value = rows(70)
    moments = summed(value)
    assert torch.equal(moments.block(i, j), moments.block(j, i).T)
    x = [t.double() for t in value[0]]
    torch.testing.assert_close(moments.block(i, j), x[i].T @ x[j], rtol=1e-12, atol=0)


PROBLEMS = [("0.K", [0, 2]), ("0.K", [2]), ("0.V", [2, 1]), ("1.V", [0, 3]), ("1.V", [2, 0, 3])]


@pytest.mark.parametrize(("name", "layers"), PROBLEMS)
def test_problem_is_numpy_s_centred_second_moments(name: str, layers: list[int]) -> None:
    value = rows(150)
    gram, cross, x_mean, y_mean = summed(value).problem(name, layers)
    x, y = columns(value, name, layers)
    np.testing.assert_allclose(x_mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(y_mean, y.mean(0), rtol=1e-12)
    xc, yc = x - x.mean(0), y - y.mean(0)
    np.testing.assert_allclose(gram, xc.T @ xc / 150, atol=1e-12)
    np.testing.assert_allclose(cross, xc.T @ yc / 150, atol=1e-12)
    np.testing.assert_allclose(summed(value).target_variance(name), y.var(0), rtol=1e-10)


@pytest.mark.parametrize(("name", "layers"), PROBLEMS)
def test_r_squared_from_moments_is_that_of_the_rows(name: str, layers: list[int]) -> None:
    fit, test = rows(150), rows(60, seed=8)
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(F * len(layers), W, generator=draw, dtype=torch.float64)
    _, _, x_mean, y_mean = summed(fit).problem(name, layers)
    found = r_squared(summed(test), name, layers, weight, x_mean, y_mean)
    x, y = columns(test, name, layers)
    predicted = (x - x_mean.numpy()) @ weight.numpy() + y_mean.numpy()
    expected = 1.0 - ((y - predicted) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    assert found == pytest.approx(float(expected), rel=1e-10)


def solve(
    by_split: dict[str, Moments], name: str, layers: list[int], lambdas: tuple[float, ...]
) -> FitResult:
    chosen = FitSettings(lambdas=lambdas)
    result = FitResult({}, {s: {} for s in by_split}, {}, {}, chosen)
    _solve_target(result, name, layers, by_split)
    return result


@pytest.mark.parametrize("value", [1e-4, 0.03, 10.0])
@pytest.mark.parametrize(("name", "layers"), PROBLEMS)
def test_ridge_is_the_closed_form_on_the_rows(name: str, layers: list[int], value: float) -> None:
    from scipy import linalg

    fit, select, test = rows(150), rows(50, 1), rows(50, 2)
    moments = {"fit": summed(fit), "select": summed(select), "test": summed(test)}
    result = solve(moments, name, layers, (value,))
    x, y = columns(fit, name, layers)
    z = (x - x.mean(0)) / x.std(0)
    left = z.T @ z / len(z) + value * np.eye(z.shape[1])
    standard = linalg.solve(left, z.T @ (y - y.mean(0)) / len(z), assume_a="pos")
    weight = standard / x.std(0)[:, None]
    found = result.targets[name]
    np.testing.assert_allclose(found.weight, weight, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found.bias, y.mean(0) - x.mean(0) @ weight, rtol=2e-5, atol=1e-5)
    predicted = found.apply([t.float() for t in test[0]]).double().numpy()
    truth = columns(test, name, layers)[1]
    r2 = 1.0 - ((truth - predicted) ** 2).sum() / ((truth - truth.mean(0)) ** 2).sum()
    assert result.r2["test"][name] == pytest.approx(float(r2), abs=1e-5)


def test_lambda_is_chosen_on_select_documents() -> None:
    moments = {"fit": summed(rows(30)), "select": summed(rows(400, 1)), "test": summed(rows(9, 2))}
    lambdas = (1e-4, 1e-2, 1.0, 1e3)
    scores = {v: solve(moments, "1.V", [3, 0, 2], (v,)).r2["select"]["1.V"] for v in lambdas}
    result = solve(moments, "1.V", [3, 0, 2], lambdas)
    assert result.lambdas["1.V"] == max(scores, key=lambda v: scores[v])
    assert result.r2["select"]["1.V"] == pytest.approx(max(scores.values()))


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, -7.3, 1000.1, 31_234.567])
def test_a_constant_feature_takes_no_weight(constant: float) -> None:
    parts = {split: rows(120, seed) for seed, split in enumerate(("fit", "select", "test"))}
    for features, _ in parts.values():
        features[0][:, 2] = constant
        features[2][:, 5] = constant
    result = solve({s: summed(v) for s, v in parts.items()}, "0.K", [0, 2], (1e-4, 1e-2))
    target = result.targets["0.K"]
    assert torch.isfinite(target.weight).all()
    assert torch.isfinite(target.bias).all()
    assert float(target.weight[2].abs().max()) < 1e-3
    assert float(target.weight[F + 5].abs().max()) < 1e-3
    others = [i for i in range(2 * F) if i not in (2, F + 5)]
    assert float(target.weight[others].abs().max()) < 3.0
    assert result.r2["test"]["0.K"] > 0.15


def test_a_constant_target_is_explained_and_finite() -> None:
    parts = {split: rows(60, seed) for seed, split in enumerate(("fit", "select", "test"))}
    for _, targets in parts.values():
        targets["0.K"][:] = 0.25
    result = solve({s: summed(v) for s, v in parts.items()}, "0.K", [0, 2], (1e-4, 1e-2))
    assert result.r2["test"]["0.K"] == pytest.approx(1.0, abs=1e-3)
    assert float(result.targets["0.K"].weight.abs().max()) < 1e-6
    predicted = result.targets["0.K"].apply(parts["test"][0])
    torch.testing.assert_close(predicted, torch.full_like(predicted, 0.25))


def test_small_features_beside_a_large_mean_keep_their_weight() -> None:
    """Key biases of real models reach hundreds, with a deviation of about one."""
    parts = {split: rows(400, seed) for seed, split in enumerate(("fit", "select", "test"))}
    shifted = {}
    for split, (features, targets) in parts.items():
        moved = [x.clone() for x in features]
        moved[0] = moved[0] + 400.0
        shifted[split] = (moved, targets)
    plain = solve({s: summed(v) for s, v in parts.items()}, "0.K", [0, 2], (1e-3,))
    moved = solve({s: summed(v) for s, v in shifted.items()}, "0.K", [0, 2], (1e-3,))
    torch.testing.assert_close(
        plain.targets["0.K"].weight, moved.targets["0.K"].weight, atol=1e-4, rtol=1e-3
    )
    assert moved.r2["test"]["0.K"] == pytest.approx(plain.r2["test"]["0.K"], abs=1e-6)


def test_choosing_layers_finds_the_one_that_matters_first() -> None:
    draw = torch.Generator().manual_seed(5)

    def part(count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        features = [torch.randn(count, 8, generator=draw) for _ in range(5)]
        noise = 0.1 * torch.randn(count, 3, generator=draw)
        return features, {"0.K": features[3][:, :3] * 2 + noise, "0.V": features[1][:, :3] + noise}

    plan, report = choose_layers(part(400), part(200), k_max=3)
    assert plan["0.K"][0] == 3
    assert plan["0.V"][0] == 1
    assert [len(layers) for layers in plan.values()] == [3, 3]
    assert all(len(set(layers)) == 3 for layers in plan.values())
    assert report["0.K"]["select_r2"][0] > 0.9
    assert len(report["0.K"]["single_r2"]) == 5


def test_choosing_layers_for_a_target_that_never_changes() -> None:
    """A dead value head, or a select text of one repeated token: nothing to explain, no crash."""
    draw = torch.Generator().manual_seed(5)
    features = [torch.randn(64, 8, generator=draw) for _ in range(3)]
    constant = {"0.K": torch.full((64, 3), 0.5), "0.V": torch.zeros(64, 3)}
    plan, report = choose_layers((features, constant), (features, constant), k_max=2)
    assert [len(layers) for layers in plan.values()] == [2, 2]
    assert all(np.isfinite(r["select_r2"]).all() for r in report.values())


def test_more_layers_asked_for_than_there_are() -> None:
    value = rows(60)
    plan, _ = choose_layers(value, rows(40, 1), k_max=50)
    assert all(sorted(layers) == list(range(LAYERS)) for layers in plan.values())


def _geometries() -> list[Geometry]:
    return [Geometry.from_config(config(name)) for name in ("llama", "qwen3")]


def test_memory_bound_shortens_every_list_and_too_little_is_refused() -> None:
    from kvferry.errors import BadInput

    lists: Candidates = {f"{i}.{t}": [0, 1, 2] for i in range(3) for t in "KV"}
    plan = {"forward": lists}
    widths = [2 * g.layers[0].width for g in _geometries()]

    def need(k: int) -> int:
        short = {t: layers[:k] for t, layers in lists.items()}
        return 3 * moments_bytes(short, widths[0], widths[1] // 2)

    def kept(limit: int) -> Any:
        return fit_in_memory(plan, _geometries(), limit)["forward"]["0.K"]

    assert need(1) < need(2) < need(3)
    assert kept(need(3)) == [0, 1, 2]
    assert kept(need(3) - 1) == [0, 1]
    assert kept(need(1)) == [0]
    with pytest.raises(BadInput, match=r"--memory of at least .* \(k = 1\)"):
        kept(need(1) - 1)
