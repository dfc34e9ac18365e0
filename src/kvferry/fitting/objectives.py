"""What a corrector is trained for: one table of losses over the same batch.

A batch is one handed-over context and several continuations after it. Each loss looks at the
receiver's answer to the mapped cache; teachers are the given answers, the receiver's own reading
or the source's. Losses are means over scored tokens, in nats (``hidden`` and ``attention`` have no
unit).
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
        student: the receiver on the mapped cache; differentiable. ``None`` where no objective
            looks at its answer.
        receiver: the receiver on its own reading.
        source: the source on its own reading.
        attention: for each layer to match, what the receiver's own queries get from the mapped
            cache (differentiable) and from its own, ``[N, heads * head_dim]`` each.
    """

    targets: Tensor
    student: Answered | None
    receiver: Answered | None
    source: Answered | None
    attention: tuple[tuple[Tensor, Tensor], ...] = ()


def answers(batch: Batch) -> Tensor:
    """Cross-entropy on the given answers."""
    assert batch.student is not None
    return torch.nn.functional.cross_entropy(batch.student.logits.float(), batch.targets)


def receiver_kl(batch: Batch) -> Tensor:
    """KL from the receiver's own reading: become what it would have said."""
    assert batch.student is not None
    assert batch.receiver is not None
    return _kl(batch.receiver.logits, batch.student.logits)


def source_kl(batch: Batch) -> Tensor:
    """KL from the source's own reading: say what the source would have said."""
    assert batch.student is not None
    assert batch.source is not None
    return _kl(batch.source.logits, batch.student.logits)


def hidden(batch: Batch) -> Tensor:
    """Squared distance of last hidden states from the receiver's own, over their mean square."""
    assert batch.student is not None
    assert batch.receiver is not None
    return _relative_error(batch.student.hidden, batch.receiver.hidden)


def attention(batch: Batch) -> Tensor:
    """Squared distance of attention outputs, the queries being the receiver's own, over their
    mean square; mean over layers. No receiver pass to go back through: a cheap warm start."""
    errors = [_relative_error(got, want) for got, want in batch.attention]
    return torch.stack(errors).mean()


def _relative_error(got: Tensor, want: Tensor) -> Tensor:
    want = want.float()
    return (got.float() - want).square().mean() / want.square().mean().clamp_min(1e-12)


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    size = min(teacher.shape[-1], student.shape[-1])  # vocabularies may be padded differently
    want = teacher[:, :size].float().log_softmax(-1)
    got = student[:, :size].float().log_softmax(-1)
    return (want.exp() * (want - got)).sum(-1).mean()


@dataclass(frozen=True)
class Objective:
    """A loss and what it needs in a batch."""

    loss: Callable[[Batch], Tensor]
    needs_student: bool = True
    needs_receiver: bool = False
    needs_source: bool = False
    needs_attention: bool = False


OBJECTIVES: dict[str, Objective] = {
    "answers": Objective(answers),
    "receiver_kl": Objective(receiver_kl, needs_receiver=True),
    "source_kl": Objective(source_kl, needs_source=True),
    "hidden": Objective(hidden, needs_receiver=True),
    "attention": Objective(attention, needs_student=False, needs_attention=True),
}
"""Name -> objective; running text is the same with the text's own next tokens as answers."""
