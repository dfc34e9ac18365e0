"""What a corrector is trained for: one table of losses over the same batch.

A batch is one handed-over context and several continuations after it. Each loss looks at the
receiver's answer to the mapped cache; teachers are the given answers, the receiver's own reading
or the source's. Losses are means over scored tokens, in nats (``hidden`` has no unit).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.running.choices import Answered


@dataclass(frozen=True)
class Batch:
    """One context's continuations, with whatever teachers the objectives asked for.

    Attributes:
        targets: the answers' tokens, ``[N]`` int64.
        student: the receiver on the mapped cache; differentiable.
        receiver: the receiver on its own reading.
        source: the source on its own reading.
    """

    targets: Tensor
    student: Answered
    receiver: Answered | None
    source: Answered | None


def answers(batch: Batch) -> Tensor:
    """Cross-entropy on the given answers."""
    return torch.nn.functional.cross_entropy(batch.student.logits.float(), batch.targets)


def receiver_kl(batch: Batch) -> Tensor:
    """KL from the receiver's own reading: become what it would have said."""
    assert batch.receiver is not None
    return _kl(batch.receiver.logits, batch.student.logits)


def source_kl(batch: Batch) -> Tensor:
    """KL from the source's own reading: say what the source would have said."""
    assert batch.source is not None
    return _kl(batch.source.logits, batch.student.logits)


def hidden(batch: Batch) -> Tensor:
    """Squared distance of last hidden states from the receiver's own, over their mean square."""
    assert batch.receiver is not None
    want = batch.receiver.hidden.float()
    error = (batch.student.hidden.float() - want).square().mean()
    return error / want.square().mean().clamp_min(1e-12)


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    size = min(teacher.shape[-1], student.shape[-1])  # vocabularies may be padded differently
    want = teacher[:, :size].float().log_softmax(-1)
    got = student[:, :size].float().log_softmax(-1)
    return (want.exp() * (want - got)).sum(-1).mean()


@dataclass(frozen=True)
class Objective:
    """A loss and the teachers it needs."""

    loss: Callable[[Batch], Tensor]
    needs_receiver: bool = False
    needs_source: bool = False


OBJECTIVES: dict[str, Objective] = {
    "answers": Objective(answers),
    "receiver_kl": Objective(receiver_kl, needs_receiver=True),
    "source_kl": Objective(source_kl, needs_source=True),
    "hidden": Objective(hidden, needs_receiver=True),
}
"""Name -> objective; running text is the same with the text's own next tokens as answers."""
