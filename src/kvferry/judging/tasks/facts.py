"""Invented facts: a text about eight people, questions with one-word answers.

Owns the generator and what is held out: phrasings, attribute kinds, and all names and values are
disjoint between ``seen`` and ``unseen``. Every question's candidates are the eight values that the
text itself gives for that attribute, so a guess is right one time in eight, and a reader who only
knows what kind of word is asked for does no better. One call: ``make_texts("seen", 8, seed=1)``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

VERSION = "facts-1"
PEOPLE = 8
CUE = "The answer is"

Part = Literal["seen", "unseen_phrasing", "unseen_kinds"]
PARTS: tuple[Part, ...] = ("seen", "unseen_phrasing", "unseen_kinds")

SEEN_NAMES = """
Ada Boris Carla Dmitri Elena Felix Greta Hugo Iris Jonas Karin Leon Mira Nils Olga Pavel Rosa
Stefan Tilda Ulrich Vera Walter Yara Zeno Anton Berta Celia Darius Edith Fabian Gloria Harald
Ingrid Jasper Katya Lars Magda Norbert Odette Petra
"""
UNSEEN_NAMES = """
Alma Bruno Chloe Desmond Esther Franz Gemma Hector Ilse Julius Klara Lionel Marta Nadia Oscar
Paula Quentin Ruth Silas Thea Uma Viktor Wanda Xenia
"""

SEEN_KINDS: dict[str, str] = {
    "job": """baker pilot nurse farmer lawyer painter teacher plumber dentist waiter sailor tailor
    barber butcher judge miner""",
    "city": """Lisbon Oslo Cairo Madrid Dublin Vienna Boston Tokyo Paris Berlin Athens Lima Rome
    Moscow Toronto Sydney""",
    "pet": """dog cat parrot rabbit horse snake goat turtle hamster duck pony lizard frog mouse
    chicken fish""",
    "colour": """red blue green yellow black white orange purple pink brown gray silver gold""",
    "drink": """coffee tea milk beer wine water juice soda cider whiskey rum lemonade""",
    "month": """January February March April May June July August September October November
    December""",
    "language": """French German Spanish Italian Russian Chinese Greek Arabic Turkish Polish Dutch
    Hindi""",
    "vehicle": """car truck bicycle motorcycle boat tractor van scooter bus taxi""",
}
UNSEEN_KINDS: dict[str, str] = {
    "instrument": "piano guitar violin flute drums trumpet cello harp organ banjo",
    "sport": "tennis golf football hockey boxing swimming chess rugby cricket skiing",
    "fruit": "apple banana cherry grape lemon mango peach pear melon plum",
    "subject": "history physics chemistry biology music geography economics law art philosophy",
}
QUESTIONS: dict[str, str] = {
    "job": "What is {name}'s job?",
    "city": "Which city does {name} live in?",
    "pet": "What kind of pet does {name} have?",
    "colour": "What is {name}'s favourite colour?",
    "drink": "What does {name} like to drink?",
    "month": "In which month was {name} born?",
    "language": "Which language does {name} speak?",
    "vehicle": "What does {name} travel in?",
    "instrument": "Which instrument does {name} play?",
    "sport": "Which sport does {name} play?",
    "fruit": "What is {name}'s favourite fruit?",
    "subject": "Which subject does {name} study?",
}
# A clause a kind and phrasing; a text joins three of them about each person.
CLAUSES: dict[str, tuple[str, ...]] = {
    "job": ("works as a {v}", "is a {v}", "earns a living as a {v}"),
    "city": ("lives in {v}", "has a home in {v}", "is based in {v}"),
    "pet": ("keeps a {v}", "owns a {v}", "looks after a {v}"),
    "colour": ("loves the colour {v}", "always wears {v}", "prefers {v} to any other colour"),
    "drink": ("drinks {v}", "orders {v} every day", "never goes without {v}"),
    "month": ("was born in {v}", "has a birthday in {v}", "celebrates a birthday each {v}"),
    "language": ("speaks {v}", "grew up with {v} at home", "writes letters in {v}"),
    "vehicle": ("travels by {v}", "gets around with a {v}", "goes everywhere by {v}"),
    "instrument": ("plays the {v}", "practises the {v}", "performs on the {v}"),
    "sport": ("plays {v}", "spends weekends on {v}", "trains hard for {v}"),
    "fruit": ("likes {v} best of all fruit", "has a {v} with every meal", "buys {v} at the market"),
    "subject": ("studies {v}", "reads {v} at university", "takes a course in {v}"),
}
SEEN_FRAMES = (
    "{name} {a}, {b} and {c}.",
    "{name} {a}. {name} also {b} and {c}.",
    "There is someone called {name} who {a}, {b} and {c}.",
    "{name}, who {a}, {b} and {c}.",
)
UNSEEN_FRAMES = (
    "Of {name} it is known that this person {a}, and that the same one {b}; besides, {name} {c}.",
    "Meet {name}: {name} {a}, {name} {b}, {name} {c}.",
)


@dataclass(frozen=True)
class Question:
    """One question about a text.

    Attributes:
        text: the question.
        kind: which attribute is asked for.
        candidates: the text's eight values of that attribute, shuffled.
        answer: index of the right one.
    """

    text: str
    kind: str
    candidates: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class FactText:
    """A text and its questions."""

    text_id: str
    context: str
    questions: tuple[Question, ...]


def make_texts(part: Part, count: int, *, seed: int, questions: int = 16) -> list[FactText]:
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


def _text(part: Part, text_id: str, generator: random.Random, questions: int) -> FactText:
    unseen = part != "seen"
    kinds = UNSEEN_KINDS if part == "unseen_kinds" else SEEN_KINDS
    names = generator.sample((UNSEEN_NAMES if unseen else SEEN_NAMES).split(), PEOPLE)
    chosen = generator.sample(sorted(kinds), 3)
    values = {kind: generator.sample(kinds[kind].split(), PEOPLE) for kind in chosen}
    frame = generator.choice(UNSEEN_FRAMES if unseen else SEEN_FRAMES)
    # The last clause of each kind is held out with the frames.
    phrasing = {
        kind: CLAUSES[kind][-1] if unseen else generator.choice(CLAUSES[kind][:-1])
        for kind in chosen
    }
    sentences = []
    for place, name in enumerate(names):
        said = [phrasing[kind].format(v=values[kind][place]) for kind in chosen]
        sentences.append(frame.format(name=name, a=said[0], b=said[1], c=said[2]))
    pairs = [(place, kind) for place in range(PEOPLE) for kind in chosen]
    asked = generator.sample(pairs, questions)
    return FactText(
        text_id,
        " ".join(sentences),
        tuple(_question(place, kind, names, values, generator) for place, kind in asked),
    )


def _question(
    place: int,
    kind: str,
    names: list[str],
    values: dict[str, list[str]],
    generator: random.Random,
) -> Question:
    candidates = generator.sample(values[kind], PEOPLE)
    return Question(
        QUESTIONS[kind].format(name=names[place]),
        kind,
        tuple(candidates),
        candidates.index(values[kind][place]),
    )
