"""Words of a text for comparing texts: folded, without punctuation, plurals cut.

Owns what counts as the same word, as a content word and as shared text. Refuses nothing.
One call: ``shingles(words("The tide turns at noon."), 3)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")
_STOP = (
    "a an the of in on at to for from by with as and or is are was were be been being it its "
    "this that these those which what who whom whose when where why how do does did done has have "
    "had not no than then there their they them he she his her into can could may might will would "
    "should must also each most more some any all one following called"
)
STOP_WORDS = frozenset(_STOP.split())


def words(text: str) -> list[str]:
    """Words in order: case folded, no punctuation."""
    return _WORD.findall(text.casefold())


def stems(text: str) -> list[str]:
    """Words with a plural's ``s`` cut, so that *cell* and *cells* are one."""
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        for word in words(text)
    ]


def content_stems(text: str) -> set[str]:
    """Stems that are no stop words."""
    return {stem for stem in stems(text) if stem not in STOP_WORDS}


def holds_phrase(text: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether words stand in a text one after another; an empty phrase stands nowhere."""
    size = len(phrase)
    wanted = list(phrase)
    return size > 0 and any(
        list(text[place : place + size]) == wanted for place in range(len(text) - size + 1)
    )


def shingles(text: Sequence[str], size: int) -> set[tuple[str, ...]]:
    """Every run of ``size`` words; none of a shorter text."""
    return {tuple(text[place : place + size]) for place in range(len(text) - size + 1)}
