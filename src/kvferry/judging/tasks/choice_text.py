"""A text and its questions with candidates: what every choice task gives to a choice run.

Owns the two values that tasks and runs share. One call: ``ChoiceText("m1", "The tide ...", ())``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question about a text.

    Attributes:
        text: the question.
        kind: what is asked for, or another label to count by.
        candidates: answers to choose from.
        answer: index of the right one.
    """

    text: str
    kind: str
    candidates: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceText:
    """A text and its questions.

    Attributes:
        text_id: names it in the records.
        context: what is read.
        questions: asked about it, together.
        group: where it comes from; a text of the same group is never its wrong document, nor one
            that states an answer to its questions. Empty: any other text may be.
    """

    text_id: str
    context: str
    questions: tuple[Question, ...]
    group: str = ""
