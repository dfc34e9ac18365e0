"""Invented facts: a text about eight people, questions with one-word answers.

Owns the generator; its words are in ``facts_words``: phrasings, questions and names of the unseen
parts are never seen while tuning, nor are the values of unseen kinds. Every question's candidates
are the eight values that the text itself gives for that attribute, so a guess is right one time in
eight, and a reader who only knows what kind of word is asked for does no better.
One call: ``make_texts("seen", 8, seed=1)``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from kvferry.judging.tasks.choice_text import ChoiceText, Question
from kvferry.judging.tasks.facts_words import (
    CLAUSES,
    QUESTIONS,
    SEEN_FRAMES,
    SEEN_KINDS,
    SEEN_NAMES,
    UNSEEN_FRAMES,
    UNSEEN_KINDS,
    UNSEEN_NAMES,
)

VERSION = "facts-2"
PEOPLE = 8
CUE = "The answer is"
HELD_OUT_SEED = 500
"""Added to a data seed for the facts that are judged on while tuning; tests use others again."""

Part = Literal["seen", "unseen_phrasing", "unseen_kinds"]
PARTS: tuple[Part, ...] = ("seen", "unseen_phrasing", "unseen_kinds")

RECITE = "Say in other words, one by one, what the text says about each of them."
MIXED_TEXTS = 0.5
"""Share of seen texts in which every person is told of in another way and order."""


@dataclass(frozen=True)
class Statement:
    """One fact in a sentence: ``before``, the value, ``after``; they join to it."""

    before: str
    value: str
    after: str


@dataclass(frozen=True)
class Recital:
    """A text, and all that it says in drawn order and other words; only values are to be learnt."""

    text_id: str
    context: str
    statements: tuple[Statement, ...]


def data_name(texts: int, seed: int, *, recited: bool = False) -> str:
    """What facts to tune on are called in a map's card: version, texts and seed."""
    return f"{VERSION}:{texts}:{seed}" + (":recited" if recited else "")


def seed_of(name: str) -> int | None:
    """The seed in a ``data_name`` of this version; ``None`` for other data."""
    return int(name.split(":")[2]) if name.startswith(f"{VERSION}:") else None


def make_texts(part: Part, count: int, *, seed: int, questions: int = 16) -> list[ChoiceText]:
    """Texts of one part; the same arguments give the same texts.

    Args:
        part: ``seen`` kinds and phrasings (for tuning and for the seen test, by other seeds),
            ``unseen_phrasing`` (seen kinds, other frames and clauses, other names) or
            ``unseen_kinds`` (other kinds, frames and names).
        count: how many.
        seed: of everything drawn.
        questions: asked of each text.
    """
    generator = random.Random(f"{VERSION} {part} {seed}")
    return [_text(part, f"{part}-{seed}-{index}", generator, questions) for index in range(count)]


def make_recitals(count: int, *, seed: int) -> list[Recital]:
    """The seen texts of ``make_texts`` of that seed, with all they say in other words."""
    generator = random.Random(f"{VERSION} seen {seed}")
    found = []
    for index in range(count):
        told = _tell("seen", generator)
        _asked(told, generator, 3 * PEOPLE, unseen=False)  # keeps the draws in step
        text_id = f"seen-{seed}-{index}"
        own = random.Random(f"{VERSION} recital {text_id}")
        facts = [(place, kind) for place in range(PEOPLE) for kind in told.values]
        own.shuffle(facts)
        found.append(
            Recital(text_id, told.context, tuple(_statement(told, *fact, own) for fact in facts))
        )
    return found


def _statement(told: _Told, place: int, kind: str, generator: random.Random) -> Statement:
    before, after = _way(CLAUSES[kind], False, generator).split("{v}")
    return Statement(
        f" {told.names[place]} {before.rstrip()}", f" {told.values[kind][place]}", f"{after}."
    )


@dataclass(frozen=True)
class _Told:
    """A drawn text: who, what of each kind, and how it was said."""

    names: list[str]
    values: dict[str, list[str]]
    context: str


def _text(part: Part, text_id: str, generator: random.Random, questions: int) -> ChoiceText:
    told = _tell(part, generator)
    return ChoiceText(
        text_id, told.context, _asked(told, generator, questions, unseen=part != "seen")
    )


def _tell(part: Part, generator: random.Random) -> _Told:
    unseen = part != "seen"
    kinds = UNSEEN_KINDS if part == "unseen_kinds" else SEEN_KINDS
    names = generator.sample((UNSEEN_NAMES if unseen else SEEN_NAMES).split(), PEOPLE)
    chosen = generator.sample(sorted(kinds), 3)
    values = {kind: generator.sample(kinds[kind].split(), PEOPLE) for kind in chosen}
    frames = UNSEEN_FRAMES if unseen else SEEN_FRAMES
    frame = generator.choice(frames)
    mixed = not unseen and generator.random() < MIXED_TEXTS
    phrasing = {kind: _way(CLAUSES[kind], unseen, generator) for kind in chosen}
    sentences = []
    for place, name in enumerate(names):
        if mixed:  # every person told in another way
            frame = generator.choice(frames)
            phrasing = {kind: _way(CLAUSES[kind], unseen, generator) for kind in chosen}
        order = generator.sample(chosen, 3) if mixed else chosen
        said = [phrasing[kind].format(v=values[kind][place]) for kind in order]
        sentences.append(frame.format(name=name, a=said[0], b=said[1], c=said[2]))
    between = "\n" if frame.startswith("-") and not mixed else " "
    return _Told(names, values, between.join(sentences))


def _asked(
    told: _Told, generator: random.Random, count: int, *, unseen: bool
) -> tuple[Question, ...]:
    pairs = [(place, kind) for place in range(PEOPLE) for kind in told.values]
    return tuple(
        _question(told.names[place], kind, told.values[kind], place, unseen, generator)
        for place, kind in generator.sample(pairs, count)
    )


def _way(ways: tuple[str, ...], unseen: bool, generator: random.Random) -> str:
    """One of the ways to say or to ask something; the last one is held out."""
    return ways[-1] if unseen else generator.choice(ways[:-1])


def _question(
    name: str,
    kind: str,
    values: list[str],
    place: int,
    unseen: bool,
    generator: random.Random,
) -> Question:
    candidates = generator.sample(values, PEOPLE)
    return Question(
        _way(QUESTIONS[kind], unseen, generator).format(name=name),
        kind,
        tuple(candidates),
        candidates.index(values[place]),
    )
