"""The residual beside the ridge, trained through the frozen receiver.

Owns the kinds of residual in one table (``KINDS``), their parameters and their cost. Every kind
ends in a factor that is zero at the start, so that an untrained corrector changes nothing. Inputs
are standardised source features, as the ridge takes them, or the ridge's own output; residuals
come in units of how much the ridge's output of that target varies, so that one learning rate fits
targets of all sizes (values of a first layer may be fifty times smaller than keys). One call:
``Corrector.build(config, shape)``; then ``corrector(features, mapped)`` gives the residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

Kind = Literal["features", "output", "per_head", "trunk"]


class CorrectorConfig(BaseModel):
    """What a corrector is.

    Attributes:
        kind: ``features``: SiLU between two low-rank factors on the target's source features;
            ``output``: the same on the ridge's output for that target; ``per_head``: ``features``
            with factors of its own for each receiver head; ``trunk``: one hidden layer on all
            source layers shared by all targets.
        rank: hidden units of a target (of the trunk, for ``trunk``; of a head, for ``per_head``).
        keys: whether keys are corrected.
        values: whether values are.
        layers: receiver layers to correct; ``None`` for all.
        gate: a learned factor for each target, one at the start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind = "features"
    rank: int = Field(32, ge=1)
    keys: bool = True
    values: bool = True
    layers: tuple[int, ...] | None = None
    gate: bool = False


@dataclass(frozen=True)
class CorrectorShape:
    """The map a corrector stands beside.

    Attributes:
        sources: target (``"layer.K"``) -> its source layers, as in the map.
        depth: source layers.
        features: features of a source layer.
        width: a receiver target's width, heads times head_dim.
        heads: receiver KV heads.
    """

    sources: dict[str, tuple[int, ...]]
    depth: int
    features: int
    width: int
    heads: int


class Corrector(nn.Module):
    """Residuals for the targets of a map; float32 parameters, zero output at the start."""

    center: Tensor
    scale: Tensor
    size: Tensor

    def __init__(self, config: CorrectorConfig, shape: CorrectorShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.names = tuple(name for name in shape.sources if _chosen(config, name))
        self.register_buffer("center", torch.zeros(shape.depth, shape.features))
        self.register_buffer("scale", torch.ones(shape.depth, shape.features))
        self.register_buffer("size", torch.ones(len(self.names)))
        self.core: nn.Module = KINDS[config.kind](config.rank, shape, self.names)
        self.gates = nn.Parameter(torch.ones(len(self.names))) if config.gate else None

    def standardise(self, features: list[Tensor], mapped: dict[str, Tensor]) -> None:
        """Take the units of what goes in and comes out from some rows.

        Args:
            features: per source layer ``[N, F]``: mean and deviation of each.
            mapped: per target ``[N, W]``, the ridge's output: its deviation, root mean square
                over the target's dimensions.
        """
        for index, rows in enumerate(features):
            self.center[index] = rows.mean(0)
            self.scale[index] = rows.std(0).clamp_min(1e-6)
        for index, name in enumerate(self.names):
            self.size[index] = mapped[name].var(0).mean().sqrt().clamp_min(1e-6)

    def forward(self, features: list[Tensor], mapped: dict[str, Tensor]) -> dict[str, Tensor]:
        """Residuals ``[T, W]`` of the corrected targets.

        Args:
            features: per source layer ``[T, F]``.
            mapped: per target ``[T, W]``, the ridge's output.
        """
        standard = [
            (rows - self.center[index]) / self.scale[index] for index, rows in enumerate(features)
        ]
        values: Tensor = self.core(standard, [mapped[name] for name in self.names])
        size = self.size if self.gates is None else self.size * self.gates
        values = values * size[:, None, None]
        return dict(zip(self.names, values.unbind(0), strict=True))

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(p.numel() for p in self.parameters())

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token."""
        return sum(p.numel() for p in self.core.parameters())


def _chosen(config: CorrectorConfig, name: str) -> bool:
    layer, kind = name.split(".")
    wanted = config.keys if kind == "K" else config.values
    return wanted and (config.layers is None or int(layer) in config.layers)


def _factor(*size: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) / math.sqrt(fan_in))


class _Features(nn.Module):
    """Low rank from a target's own source layers; ``groups`` sets of factors a target.

    The first products of all targets that take a source layer are one wide product.
    """

    def __init__(
        self, rank: int, shape: CorrectorShape, names: tuple[str, ...], groups: int = 1
    ) -> None:
        super().__init__()
        self.count, self.rank, self.groups = len(names), rank, groups
        users: dict[int, list[int]] = {}
        for target, name in enumerate(names):
            for layer in shape.sources[name]:
                users.setdefault(layer, []).append(target)
        self.layers = sorted(users)
        for layer in self.layers:
            self.register_buffer(f"users_{layer}", torch.tensor(users[layer]), persistent=False)
        fan_in = shape.features * max(len(shape.sources[name]) for name in names)
        self.down = nn.ParameterDict(
            {
                str(layer): _factor(
                    shape.features, len(users[layer]) * groups * rank, fan_in=fan_in
                )
                for layer in self.layers
            }
        )
        self.up = nn.Parameter(torch.zeros(self.count * groups, rank, shape.width // groups))

    def forward(self, features: list[Tensor], _: list[Tensor]) -> Tensor:
        rows = features[0].shape[0]
        hidden = features[0].new_zeros(self.count, rows, self.groups * self.rank)
        for layer in self.layers:
            product = (features[layer] @ self.down[str(layer)]).view(rows, -1, hidden.shape[2])
            users = getattr(self, f"users_{layer}")
            hidden = hidden.index_add(0, users, product.transpose(0, 1))
        grouped = hidden.view(self.count, rows, self.groups, self.rank).transpose(1, 2)
        active = nn.functional.silu(grouped.reshape(-1, rows, self.rank))
        values = torch.bmm(active, self.up).view(self.count, self.groups, rows, -1)
        return values.transpose(1, 2).reshape(self.count, rows, -1)


class _Output(nn.Module):
    """Low rank on the ridge's own output, normed by its size so that layers are alike."""

    def __init__(self, rank: int, shape: CorrectorShape, names: tuple[str, ...]) -> None:
        super().__init__()
        self.down = _factor(len(names), shape.width, rank, fan_in=shape.width)
        self.up = nn.Parameter(torch.zeros(len(names), rank, shape.width))

    def forward(self, _: list[Tensor], mapped: list[Tensor]) -> Tensor:
        values = torch.stack(mapped)
        values = values / values.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return torch.bmm(nn.functional.silu(torch.bmm(values, self.down)), self.up)


class _Trunk(nn.Module):
    """One hidden layer on all source layers, shared; each target has its own second factor."""

    def __init__(self, rank: int, shape: CorrectorShape, names: tuple[str, ...]) -> None:
        super().__init__()
        size = shape.depth * shape.features
        self.down = _factor(size, rank, fan_in=size)
        self.up = nn.Parameter(torch.zeros(len(names), rank, shape.width))

    def forward(self, features: list[Tensor], _: list[Tensor]) -> Tensor:
        hidden = nn.functional.silu(torch.cat(features, dim=1) @ self.down)
        return torch.matmul(hidden, self.up)


def _per_head(rank: int, shape: CorrectorShape, names: tuple[str, ...]) -> nn.Module:
    return _Features(rank, shape, names, groups=shape.heads)


KINDS: dict[Kind, Callable[[int, CorrectorShape, tuple[str, ...]], nn.Module]] = {
    "features": _Features,
    "output": _Output,
    "per_head": _per_head,
    "trunk": _Trunk,
}
"""Every kind of residual: rank, shape and targets -> a module that gives ``[targets, T, W]``."""
