"""Many short continuations of one held context in one pass: scoring, choosing, training.

Owns the batch of questions on one cache and where their logits are taken. One call:
``option_scores(loaded, cache, asked)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvferry.models.attention_probe import recorded_attention
from kvferry.models.cache import cache_argument, entries, fork
from kvferry.models.load import LoadedModel
from kvferry.running.decode import nan_logits, score


@dataclass(frozen=True)
class Continuation:
    """What follows a context: read ``tail``, then be scored on ``answer``, both ``[n]`` int64.

    Attributes:
        scored: which of the answer's tokens count, ``[n]`` bool; ``None`` for all.
    """

    tail: Tensor
    answer: Tensor
    scored: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """The answer's tokens that count."""
        return self.answer if self.scored is None else self.answer[self.scored]

    @property
    def places(self) -> Tensor:
        """Where they are predicted, counted from the tail's first token."""
        first = int(self.tail.numel()) - 1
        every = torch.arange(first, first + self.answer.numel())
        return every if self.scored is None else every[self.scored]


@dataclass(frozen=True)
class Answered:
    """A model's outputs at the positions that predict the answers' tokens.

    Attributes:
        logits: ``[N, vocab]``.
        hidden: last hidden states ``[N, hidden]``, before the output projection.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Asked:
    """A question about a text, as token ids.

    Attributes:
        tail: question and cue, ``[Q]`` int64.
        options: continuations to choose from; one alone for free text.
        right: index of the answer among them.
        scored: which of the answer's tokens are trained on, ``[n]`` bool; ``None`` for all.
    """

    tail: Tensor
    options: tuple[Tensor, ...]
    right: int = 0
    scored: Tensor | None = None

    @property
    def continuation(self) -> Continuation:
        """What is trained on."""
        return Continuation(self.tail, self.options[self.right], self.scored)


def answer_all(loaded: LoadedModel, cache: DynamicCache, rows: list[Continuation]) -> Answered:
    """One forward pass over all continuations on one cache, logits only where they are scored.

    Padding stands behind, where it can't change what comes before.
    """
    model: Any = loaded.model
    joined = [torch.cat((row.tail, row.answer[:-1])) for row in rows]
    width = max(int(ids.numel()) for ids in joined)
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    for place, one in enumerate(joined):
        ids[place, : one.numel()] = one
    held = int(cache.get_seq_length())
    positions = torch.arange(held, held + width, device=loaded.device).expand(len(rows), -1)
    body = model.get_decoder()
    output = body(
        input_ids=ids.to(loaded.device),
        position_ids=positions,
        use_cache=True,
        **{cache_argument(body): fork(model, cache, batch=len(rows))},
    )
    picked = torch.cat(
        [
            output.last_hidden_state[place, row.places.to(loaded.device)]
            for place, row in enumerate(rows)
        ]
    )
    return Answered(model.get_output_embeddings()(picked), picked)


def match_attention(
    loaded: LoadedModel,
    native: DynamicCache,
    cache: DynamicCache,
    rows: list[Continuation],
    layers: Sequence[int] | None,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """What a model's own queries about a context get from another cache and from its own.

    Args:
        native: the model's own reading, layers of ``[1, H, T, D]``.
        cache: another cache of the same length; differentiable.
        rows: what is read behind the context; every token of theirs asks.
        layers: which; ``None`` for all.

    Returns:
        a layer: outputs on ``cache`` and on ``native``, ``[N, heads * head_dim]``.
    """
    with torch.no_grad(), recorded_attention(loaded.model) as calls:
        answer_all(loaded, native, rows)
    lengths = torch.tensor([row.tail.numel() + row.answer.numel() - 1 for row in rows])
    width = int(calls[0].query.shape[2])
    real = (torch.arange(width) < lengths[:, None]).to(calls[0].query.device)
    held = entries(cache)
    found = []
    for index in range(len(calls)) if layers is None else layers:
        with torch.no_grad():
            want = calls[index].output()[real]
        found.append((calls[index].output_on(*held[index])[real], want))
    return tuple(found)


def option_scores(
    loaded: LoadedModel, cache: DynamicCache, asked: Sequence[Asked]
) -> list[list[Tensor]]:
    """Log-probabilities of each question's options, ``[n]`` float32 an option of n tokens.

    Questions whose options are all single tokens are answered in one pass.
    """
    found: dict[int, list[Tensor]] = {}
    short = [i for i, one in enumerate(asked) if all(o.numel() == 1 for o in one.options)]
    with torch.no_grad():
        if short:
            rows = [asked[i].continuation for i in short]
            logits = answer_all(loaded, cache, rows).logits
            if bool(torch.isnan(logits).any()):
                raise nan_logits()
            for i, row in zip(short, logits.float().log_softmax(-1).cpu(), strict=True):
                found[i] = list(row[torch.cat(asked[i].options)].split(1))
    for i, one in enumerate(asked):
        if i not in found:
            found[i] = score(loaded, cache, one.tail, list(one.options))
    return [found[i] for i in range(len(asked))]


def likeliest(scores: Sequence[Tensor]) -> int:
    """Index of the option with the highest mean log-probability a token."""
    means = [float(each.mean()) for each in scores]
    return max(range(len(means)), key=means.__getitem__)
