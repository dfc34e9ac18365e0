"""Weighted second moments between blocks of features, and the ridge solved from them.

Owns the float64 arithmetic. Blocks come standardised over all rows of the fit, so that weighted
or partial moments lose no digits; only the products of blocks that stand in one problem together
are summed. One call: ``BlockMoments.of(x, y, problems, weights).problem(blocks, ["K"])``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.errors import BadInput

CHUNK_ROWS = 2048
Problem = tuple[tuple[str, ...], str]
"""Blocks of features, and the target."""


@dataclass
class BlockMoments:
    """Sums over rows, each row times its weight, all float64.

    Attributes:
        weight: the weights' sum.
        x_sum: block -> ``[F]``.
        gram: two blocks -> ``[F1, F2]``.
        cross: block and target -> ``[F, W]``.
        y_sum: target -> ``[W]``.
    """

    weight: float
    x_sum: dict[str, Tensor]
    gram: dict[tuple[str, str], Tensor]
    cross: dict[tuple[str, str], Tensor]
    y_sum: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        x: dict[str, Tensor],
        y: dict[str, Tensor],
        problems: Iterable[Problem],
        weights: Tensor,
        known: dict[tuple[str, str], Tensor] | None = None,
    ) -> BlockMoments:
        """Sum over rows.

        Args:
            x: block -> ``[N, F]`` float32, standardised.
            y: target -> ``[N, W]`` float32.
            problems: what will be asked for.
            weights: ``[N]``; rows from the first ``len(weights)`` on are left out.
            known: products of blocks summed before over the same rows and weights.
        """
        problems, known = list(problems), known or {}
        pairs = {(a, b) for blocks, _ in problems for a in blocks for b in blocks if a <= b}
        crosses = {(a, target) for blocks, target in problems for a in blocks}
        names, targets = sorted({a for a, _ in crosses}), sorted({t for _, t in crosses})

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        moments = cls(
            float(weights.double().sum()),
            {a: zeros(x[a].shape[1]) for a in names},
            {(a, b): zeros(x[a].shape[1], x[b].shape[1]) for a, b in sorted(pairs - known.keys())},
            {(a, t): zeros(x[a].shape[1], y[t].shape[1]) for a, t in sorted(crosses)},
            {t: zeros(y[t].shape[1]) for t in targets},
        )
        for start in range(0, len(weights), CHUNK_ROWS):
            rows = slice(start, min(start + CHUNK_ROWS, len(weights)))
            weight = weights[rows].double()
            plain = {a: x[a][rows].double() for a in names}
            goals = {t: y[t][rows].double() for t in targets}
            for t in targets:
                moments.y_sum[t] += weight @ goals[t]
            for a in names:
                left = (plain[a] * weight[:, None]).T
                moments.x_sum[a] += left.sum(1)
                for b in names:
                    if (a, b) in moments.gram:
                        moments.gram[a, b].addmm_(left, plain[b])
                for t in targets:
                    if (a, t) in moments.cross:
                        moments.cross[a, t].addmm_(left, goals[t])
        moments.gram |= {pair: known[pair] for pair in pairs & known.keys()}
        return moments

    def problem(
        self, blocks: Sequence[str], targets: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Centred moments: Gram ``[F, F]``, cross ``[F, W]``, means ``[F]`` and ``[W]``."""
        x_mean = torch.cat([self.x_sum[a] for a in blocks]) / self.weight
        y_mean = torch.cat([self.y_sum[t] for t in targets]) / self.weight
        gram = torch.cat([torch.cat([self._pair(a, b) for b in blocks], 1) for a in blocks])
        cross = torch.cat([torch.cat([self.cross[a, t] for t in targets], 1) for a in blocks])
        # cat copies, so the sums stay as they are.
        gram.div_(self.weight).addr_(x_mean, x_mean, alpha=-1.0)
        cross.div_(self.weight).addr_(x_mean, y_mean, alpha=-1.0)
        return gram, cross, x_mean, y_mean

    def _pair(self, a: str, b: str) -> Tensor:
        return self.gram[a, b] if a <= b else self.gram[b, a].T


@dataclass
class Ridge:
    """One problem's moments with features scaled to unit variance under the row weights.

    Attributes:
        gram: ``[F, F]`` correlations.
        right: ``[F, W]``.
        scale: ``[F]`` deviations; infinite for a feature that never changes.
    """

    gram: Tensor
    right: Tensor
    scale: Tensor

    @classmethod
    def of(cls, gram: Tensor, cross: Tensor) -> Ridge:
        """Scale a problem; its two tensors are used up (for wide features they are large)."""
        variance = gram.diagonal().clone()
        scale = variance.clamp_min(1e-12).sqrt()
        scale = torch.where(variance > 1e-10, scale, torch.full_like(scale, torch.inf))
        return cls(gram.div_(scale[:, None]).div_(scale), cross.div_(scale[:, None]), scale)

    def solve(self, lam: float) -> Tensor | None:
        """Weights ``[F, W]``, or ``None`` where lambda is too small for these moments."""
        left = self.gram.clone()
        left.diagonal().add_(lam)
        factor, failed = torch.linalg.cholesky_ex(left)
        if int(failed):
            return None
        return torch.cholesky_solve(self.right, factor) / self.scale[:, None]

    def low_rank(
        self, weight: Tensor, lam: float, rank: int, metric: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best map of a rank by the ridge's own measure, as two factors.

        With S the scaled Gram plus lambda, W the full ridge and M the outputs' metric, the rows of
        the second factor are the leading eigenvectors of ``M^1/2 W' S W M^1/2`` (reduced-rank
        regression, Izenman 1975), put back through ``M^-1/2``.

        Args:
            weight: ``[F, W]``, the full ridge of this lambda.
            metric: ``[W, W]``; ``None`` counts all outputs alike.

        Raises:
            BadInput: a rank beyond the width.
        """
        width = weight.shape[1]
        if rank > width:
            raise BadInput(
                expected=f"a rank up to {width}, the target's width",
                got=str(rank),
                next_step="choose a smaller one, or none",
            )
        scaled = weight * torch.where(self.scale.isinf(), 0.0, self.scale)[:, None]
        inner = scaled.T @ (self.gram @ scaled) + lam * (scaled.T @ scaled)
        root = inverse = torch.eye(width, dtype=torch.float64)
        if metric is not None:
            values, vectors = torch.linalg.eigh(metric.double())
            values = values.clamp_min(1e-6 * float(values[-1])).sqrt()
            root = vectors @ torch.diag(values) @ vectors.T
            inverse = vectors @ torch.diag(1.0 / values) @ vectors.T
        _, vectors = torch.linalg.eigh(root @ inner @ root)
        leading = vectors[:, -rank:]
        return weight @ (root @ leading), leading.T @ inverse


def choose_lambda(
    solutions: dict[float, Tensor], x: Tensor, y: Tensor, y_mean: Tensor, columns: slice
) -> float:
    """The lambda with the least squared error on held-out rows.

    Args:
        solutions: lambda -> ``[F, all W]``.
        x: ``[N, F]``, less the fit's mean.
        y: ``[N, W]``.
        y_mean: ``[W]``, the fit's.
        columns: the target's place in the solutions.
    """
    goal = y.double() - y_mean
    best = min(
        ((float((x @ w[:, columns] - goal).square().sum()), lam) for lam, w in solutions.items()),
        default=None,
    )
    if best is None:
        raise BadInput(
            expected="a lambda large enough for these rows",
            got="none of those tried",
            next_step="give more rows, or larger lambdas",
        )
    return best[1]
