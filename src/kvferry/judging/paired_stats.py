"""Statistics of right and wrong answers: an interval for a share, a test for a pair of arms.

Owns Wilson's interval (Wilson 1927) and McNemar's exact test (McNemar 1947, binomial form).
Refuses empty input: a share of nothing has no value. One call: ``wilson(24, 64)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import binomtest

from kvferry.errors import BadInput


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share of right answers.

    Args:
        correct: right answers.
        n: answers scored.
        confidence: coverage, between 0 and 1.

    Returns:
        lower and upper bound, as shares of 1.

    Raises:
        BadInput: ``n`` is 0, ``correct`` is outside 0..n or ``confidence`` outside (0, 1).
    """
    if n < 1:
        raise BadInput(
            expected="at least one scored answer",
            got=f"n = {n}",
            next_step="score some answers first; a share of nothing isn't 0",
        )
    if not 0 <= correct <= n:
        raise BadInput(
            expected=f"right answers between 0 and {n}",
            got=str(correct),
            next_step="check how the answers were counted",
        )
    if not 0.0 < confidence < 1.0:
        raise BadInput(
            expected="a confidence between 0 and 1, such as 0.95",
            got=str(confidence),
            next_step="give the confidence as a share, not in percent",
        )
    interval = binomtest(correct, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar_exact(fixed: int, regressed: int) -> tuple[float, float]:
    """McNemar's exact test on the items where two arms disagree.

    Args:
        fixed: items that only the new arm gets right.
        regressed: items that only the old arm gets right.

    Returns:
        the one-sided p (the new arm is better) and the two-sided p.

    Raises:
        BadInput: a count is negative, or the arms disagree on no item.
    """
    if fixed < 0 or regressed < 0:
        raise BadInput(
            expected="counts of items, 0 or more",
            got=f"{fixed} fixed, {regressed} regressed",
            next_step="check how the pairs were counted",
        )
    n = fixed + regressed
    if n == 0:
        raise BadInput(
            expected="at least one item on which the arms disagree",
            got="none",
            next_step="report that no item differs; there is nothing to test",
        )
    one_sided = float(binomtest(fixed, n, 0.5, alternative="greater").pvalue)
    two_sided = float(binomtest(fixed, n, 0.5, alternative="two-sided").pvalue)
    return one_sided, two_sided


class Paired(NamedTuple):
    """Two arms on the same items: who is right where the other is not, and McNemar's p."""

    fixed: int
    regressed: int
    p_one_sided: float
    p_two_sided: float


def paired(new: Sequence[bool], old: Sequence[bool]) -> Paired:
    """Compare right answers item by item; both p are 1 where the arms never disagree."""
    fixed = sum(n and not o for n, o in zip(new, old, strict=True))
    regressed = sum(o and not n for n, o in zip(new, old, strict=True))
    one, two = mcnemar_exact(fixed, regressed) if fixed + regressed else (1.0, 1.0)
    return Paired(fixed, regressed, one, two)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact sign test of wins against losses, ties left out; 1 where there are none."""
    return mcnemar_exact(wins, losses)[1] if wins + losses else 1.0
