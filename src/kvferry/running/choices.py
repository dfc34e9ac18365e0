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
from kvferry.models.cache import cache_argument, entries, fork, rows_of
from kvferry.models.load import LoadedModel
from kvferry.running.decode import nan_logits

BATCH_TOKENS = 8192
"""Held and read tokens of all rows of one scoring pass: about half a gigabyte of a small model."""


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

    Tails are read side by side, and so are the options behind them, as many at once as keep
    ``BATCH_TOKENS``.

    Raises:
        NotFinite: NaN among the logits.
    """
    held = int(cache.get_seq_length())
    longest = max((int(one.tail.numel()) for one in asked), default=0)
    size = max(BATCH_TOKENS // (held + longest), 1)
    found: list[list[Tensor]] = []
    with torch.no_grad():
        for start in range(0, len(asked), size):
            found += _scores_at_once(loaded, cache, asked[start : start + size])
    return found


def _scores_at_once(
    loaded: LoadedModel, cache: DynamicCache, asked: Sequence[Asked]
) -> list[list[Tensor]]:
    """One pass over all tails, padded in front, then the options' further tokens behind them."""
    model: Any = loaded.model
    head = model.get_output_embeddings()
    held = int(cache.get_seq_length())
    ends = torch.tensor([held + one.tail.numel() for one in asked])
    width = int(ends.max()) - held
    ids = torch.zeros((len(asked), width), dtype=torch.int64)
    mask = torch.ones((len(asked), held + width), dtype=torch.int64)
    for row, one in enumerate(asked):
        gap = width - int(one.tail.numel())
        ids[row, gap:] = one.tail
        mask[row, held : held + gap] = 0
    positions = (ends[:, None] - width + torch.arange(width)).clamp_min(0)
    read = fork(model, cache, batch=len(asked))
    hidden = _behind(loaded, read, ids, mask, positions)
    first = _log_probabilities(head(hidden[:, -1]))
    found = [[first[row, option[:1]] for option in one.options] for row, one in enumerate(asked)]
    further = [
        (row, place, option)
        for row, one in enumerate(asked)
        for place, option in enumerate(one.options)
        if option.numel() > 1
    ]
    further.sort(key=lambda each: int(each[2].numel()))
    size = max(BATCH_TOKENS // (held + width), 1)
    for start in range(0, len(further), size):
        group = further[start : start + size]
        rows = torch.tensor([row for row, _, _ in group])
        count = max(int(option.numel()) for _, _, option in group) - 1
        # Padded behind: what stands behind a token can't change it.
        ids = torch.zeros((len(group), count), dtype=torch.int64)
        for place, (_, _, option) in enumerate(group):
            ids[place, : option.numel() - 1] = option[:-1]
        behind = torch.cat((mask[rows], torch.ones_like(ids)), 1)
        positions = ends[rows, None] + torch.arange(count)
        hidden = _behind(loaded, rows_of(model, read, rows), ids, behind, positions)
        for state, (row, place, option) in zip(hidden, group, strict=True):
            steps = _log_probabilities(head(state[: option.numel() - 1]))
            rest = steps.gather(1, option[1:, None])[:, 0]
            found[row][place] = torch.cat((found[row][place], rest))
    return found


def _behind(
    loaded: LoadedModel, cache: DynamicCache, ids: Tensor, mask: Tensor, positions: Tensor
) -> Tensor:
    """Last hidden states ``[B, n, hidden]`` of tokens behind a cache, which they extend."""
    model: Any = loaded.model
    body = model.get_decoder()
    output = body(
        input_ids=ids.to(loaded.device),
        attention_mask=mask.to(loaded.device),
        position_ids=positions.to(loaded.device),
        use_cache=True,
        **{cache_argument(body): cache},
    )
    states: Tensor = output.last_hidden_state
    return states


def _log_probabilities(logits: Tensor) -> Tensor:
    if bool(torch.isnan(logits).any()):
        raise nan_logits()
    return logits.float().log_softmax(-1).cpu()


def likeliest(scores: Sequence[Tensor]) -> int:
    """Index of the option with the highest mean log-probability a token."""
    means = [float(each.mean()) for each in scores]
    return max(range(len(means)), key=means.__getitem__)
