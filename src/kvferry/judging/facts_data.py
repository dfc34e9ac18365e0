"""The invented facts as texts to tune on: questions with one-word answers, and recitals.

Owns how a fact text becomes continuations with targets. A recital says all of a text's facts in
one continuation and is trained on its values alone: three times as many targets for the same
tokens as questions. One call: ``question_data(ferry, 100, seed=0, held_out=8)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.judging.choice_runs import asked_of
from kvferry.judging.tasks.facts import (
    HELD_OUT_SEED,
    PEOPLE,
    RECITE,
    Recital,
    data_name,
    make_recitals,
    make_texts,
)

if TYPE_CHECKING:
    from kvferry.fitting.train import TuneText
    from kvferry.fitting.tune_data import TuneData
    from kvferry.running.handoff import Handoff
    from kvferry.running.prompt import BoundLayout


def question_data(ferry: Handoff, texts: int, *, seed: int, held_out: int) -> TuneData:
    """Every fact of the seen texts asked for, each in one drawn way."""
    from kvferry.fitting.tune_data import TuneData

    return TuneData(
        data_name(texts, seed),
        True,
        _texts(ferry, texts, seed, 3 * PEOPLE),
        _texts(ferry, held_out, seed + HELD_OUT_SEED, 16),
    )


def recital_data(ferry: Handoff, texts: int, *, seed: int) -> TuneData:
    """The same texts, each said in other words; nothing to judge on."""
    from kvferry.fitting.tune_data import TuneData

    said = tuple(recited(ferry.layout, one) for one in make_recitals(texts, seed=seed))
    return TuneData(data_name(texts, seed, recited=True), True, said, ())


def recited(layout: BoundLayout, recital: Recital) -> TuneText:
    """One continuation with every statement; its values are the targets."""
    import torch

    from kvferry.fitting.train import TuneText
    from kvferry.running.choices import Asked

    pieces, scored = [], []
    for statement in recital.statements:
        for text, counts in (
            (statement.before, False),
            (statement.value, True),
            (statement.after, False),
        ):
            ids = layout.continuation(text)
            pieces.append(ids)
            scored.append(torch.full((ids.numel(),), counts))
    asked = Asked(layout.tail(RECITE), (torch.cat(pieces),), 0, torch.cat(scored))
    return TuneText(f"{recital.text_id}-recited", layout.context(recital.context), (asked,))


def _texts(ferry: Handoff, count: int, seed: int, questions: int) -> tuple[TuneText, ...]:
    from kvferry.fitting.train import TuneText

    return tuple(
        TuneText(text.text_id, ferry.layout.context(text.context), asked_of(ferry, text))
        for text in make_texts("seen", count, seed=seed, questions=questions)
    )
