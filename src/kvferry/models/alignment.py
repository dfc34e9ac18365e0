"""Which receiver positions come from which source positions, and whether two tokenizers agree.

This release runs pairs whose tokenizers give the same ids, so the alignment is one to one; it is
still a value that handoff carries, so that other alignments are data and no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import TokenizerMismatch

_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; naïve café, 50 % off!",
    "def f(x):\n    return {'a': x ** 2}\n\n\t# done",
    "日本語のテキスト и русский текст 🙂",
)


@dataclass(frozen=True)
class Alignment:
    """For each receiver position the source position whose features it takes.

    Attributes:
        source_index: ``[T]`` int64 into the source's body rows.
    """

    source_index: Tensor

    @classmethod
    def one_to_one(cls, length: int) -> Alignment:
        """Equal token ids on both sides."""
        return cls(torch.arange(length))


@dataclass(frozen=True)
class TokenizerAgreement:
    """How two tokenizers compare.

    Attributes:
        agree: the same ids for the same text.
        common: entries with the same id on both sides.
        only_source: entries that only the source has (or has under another id).
        only_receiver: entries that only the receiver has (or has under another id).
        differing: some of them, as (token, id in source, id in receiver).
        reason: one line.
    """

    agree: bool
    common: int
    only_source: int
    only_receiver: int
    differing: tuple[tuple[str, int | None, int | None], ...]
    reason: str


def compare_tokenizers(source: Any, receiver: Any, *, show: int = 5) -> TokenizerAgreement:
    """Compare vocabularies entry by entry, and the ids of a few probe texts.

    Args:
        source: a transformers tokenizer.
        receiver: a transformers tokenizer.
        show: how many differing entries to name.
    """
    ours, theirs = source.get_vocab(), receiver.get_vocab()
    names = sorted(set(ours) | set(theirs), key=lambda t: (ours.get(t, theirs.get(t)), t))
    differing = [(t, ours.get(t), theirs.get(t)) for t in names if ours.get(t) != theirs.get(t)]
    probes_differ = [
        text
        for text in _PROBES
        if source.encode(text, add_special_tokens=False)
        != receiver.encode(text, add_special_tokens=False)
    ]
    common = len(names) - len(differing)
    if probes_differ:
        reason = f"the same text gets other ids, e.g. {probes_differ[0][:30]!r}"
    elif differing:
        reason = f"{len(differing)} entries differ but ordinary text gets the same ids"
    else:
        reason = f"all {common} entries have the same id"
    return TokenizerAgreement(
        agree=not probes_differ,
        common=common,
        only_source=sum(b is None for _, _, b in differing),
        only_receiver=sum(a is None for _, a, _ in differing),
        differing=tuple(differing[:show]),
        reason=reason,
    )


def require_same_tokens(source: Any, receiver: Any) -> None:
    """Refuse a pair whose tokenizers number text differently.

    Raises:
        TokenizerMismatch: with some ids on which they differ.
    """
    found = compare_tokenizers(source, receiver)
    if not found.agree:
        shown = "; ".join(f"{t!r}: {a} / {b}" for t, a, b in found.differing[:3])
        raise TokenizerMismatch(
            expected="tokenizers that give the same ids for the same text",
            got=f"{found.reason} ({found.common} entries in common; {shown})",
            next_step="choose a pair of one family; pairs with other tokenizers are not run yet",
        )


def require_ids_in_range(token_ids: Tensor, vocab_size: int, name: str) -> None:
    """Refuse ids that a model has no embedding for.

    Raises:
        TokenizerMismatch: an id beyond the model's embeddings, or below zero.
    """
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.numel():
        raise TokenizerMismatch(
            expected=f"token ids from 0 and below {vocab_size}, the embeddings of {name}",
            got=str(int(outside.flatten()[0])),
            next_step="use the tokenizer that belongs to the model",
        )


def positions(start: int, length: int) -> Tensor:
    """``start, start + 1, …``: ``[length]`` int64."""
    return torch.arange(start, start + length)
