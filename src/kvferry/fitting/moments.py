"""Streaming float64 sufficient statistics for many ridge problems at once, mergeable.

For receiver layer r and kind t (K or V) the map's features are the canonical K and V of a list of
source layers S[r, t]. Only the Gram blocks between source layers that stand in one list together
are kept, and the products of each list's features with its target. Sums are of float64 values;
nothing of the text can be read back from them but its second moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.errors import WrongPair

Candidates = dict[str, list[int]]
"""``"r.K"`` or ``"r.V"`` -> source layers, best first."""

KINDS = ("K", "V")


def target_key(layer: int, kind: str) -> str:
    """The name of a target: receiver layer and kind."""
    return f"{layer}.{kind}"


def pairs_needed(candidates: Candidates) -> dict[int, list[int]]:
    """For each source layer i, the layers j >= i that share a list with it."""
    pairs: dict[int, set[int]] = {}
    for layers in candidates.values():
        for i in layers:
            pairs.setdefault(i, set()).update(j for j in layers if j >= i)
    return {i: sorted(pairs[i]) for i in sorted(pairs)}


def moments_bytes(candidates: Candidates, feature_width: int, target_width: int) -> int:
    """Bytes of one split's moments.

    Args:
        feature_width: floats a source layer gives a token (K and V).
        target_width: floats a target has a token.
    """
    blocks = sum(len(js) for js in pairs_needed(candidates).values())
    cross = sum(len(layers) for layers in candidates.values())
    return 8 * (blocks * feature_width**2 + cross * feature_width * target_width)


@dataclass
class Moments:
    """Sums over rows, all float64.

    Attributes:
        candidates: which features each target may use.
        rows: number of rows summed.
        x_sum: source layer -> ``[F]``.
        gram: source layer i -> ``[F, n F]``, blocks i x j for the j of ``pairs_needed``.
        y_sum: target -> ``[W]``.
        y_square: target -> ``[W]``.
        cross: target -> ``[k F, W]``, features in the order of its list.
    """

    candidates: Candidates
    rows: int
    x_sum: dict[int, Tensor]
    gram: dict[int, Tensor]
    y_sum: dict[str, Tensor]
    y_square: dict[str, Tensor]
    cross: dict[str, Tensor]

    @classmethod
    def empty(cls, candidates: Candidates, feature_width: int, target_width: int) -> Moments:
        """Zeros for the given problems."""
        f, w = feature_width, target_width

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        pairs = pairs_needed(candidates)
        return cls(
            candidates=candidates,
            rows=0,
            x_sum={i: zeros(f) for i in pairs},
            gram={i: zeros(f, len(js) * f) for i, js in pairs.items()},
            y_sum={t: zeros(w) for t in candidates},
            y_square={t: zeros(w) for t in candidates},
            cross={t: zeros(len(s) * f, w) for t, s in candidates.items()},
        )

    def add(self, features: list[Tensor], targets: dict[str, Tensor]) -> None:
        """Add the rows of one text.

        Args:
            features: per source layer ``[T, F]``, any float dtype.
            targets: per target ``[T, W]``.
        """
        pairs = pairs_needed(self.candidates)
        x = {i: features[i].double() for i in pairs}
        self.rows += int(next(iter(x.values())).shape[0])
        for i, js in pairs.items():
            self.x_sum[i] += x[i].sum(0)
            self.gram[i].addmm_(x[i].T, torch.cat([x[j] for j in js], dim=1))
        for name, layers in self.candidates.items():
            y = targets[name].double()
            self.y_sum[name] += y.sum(0)
            self.y_square[name] += y.square().sum(0)
            self.cross[name].addmm_(torch.cat([x[j] for j in layers], dim=1).T, y)

    def merge(self, other: Moments) -> None:
        """Add another run's sums.

        Raises:
            WrongPair: the other run kept other problems.
        """
        if self.candidates != other.candidates:
            raise WrongPair(
                expected="moments with the same source layers for every target",
                got="another choice",
                next_step="capture the second run with --plan-from the first",
            )
        self.rows += other.rows
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine += theirs

    def block(self, i: int, j: int) -> Tensor:
        """Gram block of source layers i x j, ``[F, F]``."""
        if i > j:
            return self.block(j, i).T
        width = self.x_sum[i].shape[0]
        place = pairs_needed(self.candidates)[i].index(j)
        return self.gram[i][:, place * width : (place + 1) * width]

    def problem(self, name: str, layers: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Centred second moments of one target for some of its layers.

        Returns:
            Gram ``[kF, kF]``, cross ``[kF, W]``, feature mean ``[kF]``, target mean ``[W]``;
            Gram and cross divided by the number of rows.
        """
        order = self.candidates[name]
        width = self.x_sum[order[0]].shape[0]
        gram = torch.cat(
            [torch.cat([self.block(i, j) for j in layers], dim=1) for i in layers], dim=0
        )
        places = [order.index(i) for i in layers]
        cross = torch.cat([self.cross[name][p * width : (p + 1) * width] for p in places])
        x_mean = torch.cat([self.x_sum[i] for i in layers]) / self.rows
        y_mean = self.y_sum[name] / self.rows
        gram = gram / self.rows - torch.outer(x_mean, x_mean)
        cross = cross / self.rows - torch.outer(x_mean, y_mean)
        return gram, cross, x_mean, y_mean

    def target_variance(self, name: str) -> Tensor:
        """Variance of each target dim, ``[W]``."""
        mean = self.y_sum[name] / self.rows
        return self.y_square[name] / self.rows - mean.square()

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Named tensors for safetensors."""
        named = {f"{prefix}.rows": torch.tensor([self.rows], dtype=torch.int64)}
        for i in self.x_sum:
            named[f"{prefix}.x_sum.{i:04d}"] = self.x_sum[i]
            named[f"{prefix}.gram.{i:04d}"] = self.gram[i]
        for t in self.candidates:
            named[f"{prefix}.y_sum.{t}"] = self.y_sum[t]
            named[f"{prefix}.y_square.{t}"] = self.y_square[t]
            named[f"{prefix}.cross.{t}"] = self.cross[t]
        return named

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], prefix: str, candidates: Candidates
    ) -> Moments:
        """The inverse of ``tensors``; a missing name raises ``KeyError``."""
        layers = list(pairs_needed(candidates))
        return cls(
            candidates=candidates,
            rows=int(tensors[f"{prefix}.rows"][0]),
            x_sum={i: tensors[f"{prefix}.x_sum.{i:04d}"] for i in layers},
            gram={i: tensors[f"{prefix}.gram.{i:04d}"] for i in layers},
            y_sum={t: tensors[f"{prefix}.y_sum.{t}"] for t in candidates},
            y_square={t: tensors[f"{prefix}.y_square.{t}"] for t in candidates},
            cross={t: tensors[f"{prefix}.cross.{t}"] for t in candidates},
        )

    def _sums(self) -> Iterable[Tensor]:
        for table in (self.x_sum, self.gram):
            yield from (table[i] for i in sorted(table))
        for named in (self.y_sum, self.y_square, self.cross):
            yield from (named[t] for t in sorted(named))
