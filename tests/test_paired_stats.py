"""Wilson's interval and McNemar's exact test against values worked out by hand."""

from __future__ import annotations

from math import comb, sqrt

import pytest

from kvferry.errors import BadInput
from kvferry.judging.paired_stats import mcnemar_exact, wilson


def wilson_by_formula(correct: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    share = correct / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(24, 64, 0.2667, 0.4975), (11, 64, 0.0989, 0.2823), (0, 12, 0.0, 0.2425)],
)
def test_wilson_by_hand(correct: int, n: int, low: float, high: float) -> None:
    assert wilson(correct, n) == pytest.approx((low, high), abs=2e-4)
    assert wilson(correct, n) == pytest.approx(wilson_by_formula(correct, n), abs=1e-9)


def test_wilson_widens_with_confidence() -> None:
    narrow, wide = wilson(5, 12, 0.8), wilson(5, 12, 0.99)
    assert wide[0] < narrow[0] < 5 / 12 < narrow[1] < wide[1]


@pytest.mark.parametrize(
    ("correct", "n", "confidence"),
    [(0, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 95.0)],
)
def test_wilson_refuses(correct: int, n: int, confidence: float) -> None:
    with pytest.raises(BadInput):
        wilson(correct, n, confidence)


def test_mcnemar_by_hand() -> None:
    """16 against 7: the tail of Binomial(23, 1/2) from 16 on, and twice that."""
    one_sided, two_sided = mcnemar_exact(16, 7)
    tail = sum(comb(23, k) for k in range(16, 24)) / 2**23
    assert one_sided == pytest.approx(tail)
    assert one_sided == pytest.approx(0.0466, abs=5e-5)
    assert two_sided == pytest.approx(2 * tail)


def test_mcnemar_has_a_direction() -> None:
    assert mcnemar_exact(7, 16)[0] > 0.95
    assert mcnemar_exact(5, 5)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(("fixed", "regressed"), [(0, 0), (-1, 3), (3, -1)])
def test_mcnemar_refuses(fixed: int, regressed: int) -> None:
    with pytest.raises(BadInput):
        mcnemar_exact(fixed, regressed)
