"""OpenStax review questions over excerpts of the section they belong to.

Owns the join of questions and prose, the choice of an excerpt, the two splits and the check that
they share no text. Opens the two books it names and no other file.

The excerpt, by rule and never by a model: a section's running text (without its list of aims) is
cut once into consecutive pieces of whole paragraphs, of at most ``tokens`` tokens; a paragraph
that is too long is cut at sentences. A sentence *states* an option if it has the option's words
one after another (articles at its head aside, plurals cut), or all content words of an option of
three or more. A piece can be a question's excerpt if a sentence in it states the right option and
that sentence with its two neighbours has ``NEAR_WORDS`` content words of the question (or all of
them, if there are fewer). Of such pieces the one with most question words around the answer is
taken, then the one with most question words in all, then the earliest.

The bias this gives: only answers that the text says in the option's own words are kept, so short
names and terms are over-represented, and the right option always stands in the excerpt, where a
wrong one may not. Each question therefore says whether a wrong option is stated there as well
(``contested``), and results are counted apart. Questions whose right option is *not* what the
text says ("which is not ...") and options that speak of other options are left out; every reason
is counted. One call: ``read_split(folder, "test", count=characters)``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry.errors import BadInput
from kvferry.judging.tasks.choice_text import ChoiceText, Question
from kvferry.judging.tasks.words import content_stems, holds_phrase, shingles, stems, words
from kvferry.provenance import parse_json

VERSION = "openstax-1"
TUNE_BOOK, HALVED_BOOK = "biology", "anatomy_physiology"
TOKENS = 600
NEAR_WORDS = 2
SHINGLE_WORDS = 8
CHARACTERS_A_TOKEN = 3
"""Fewer than English text has, so that a budget counted this way is never too large."""

Split = Literal["tune", "test"]
SPLITS: tuple[Split, ...] = ("tune", "test")
Count = Callable[[str], int]

_AIMS = ("by the end of this section", "chapter objectives")
_SENTENCE = re.compile(r"(?<=[\w)”\"% ][.!?])\s+(?=[A-Z(“\"*])")
_OTHERS = re.compile(
    r"\b(all|none|any|both|neither|each|two) (of )?(the |these )?(above|these|answers|choices)\b"
    r"|\b(both|neither|either) [a-e] (and|or|nor) [a-e]\b"
    r"|^[a-e](, [a-e])*,? (and|or|nor) [a-e]\b|^(both|all|none|neither)$",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"\b(not|cannot|except|false|incorrect|untrue)\b|(?<!at )\bleast\b|n[’']t\b", re.IGNORECASE
)


@dataclass(frozen=True)
class ReviewQuestion:
    """A question with the excerpt that states its answer.

    Attributes:
        id: as the data names it.
        options: as in the book, in its order.
        answer: index of the right one.
        contested: a wrong option is stated in the excerpt as well.
    """

    id: str
    book: str
    module: str
    context: str
    question: str
    options: tuple[str, ...]
    answer: int
    contested: bool

    def row(self) -> dict[str, Any]:
        """Plain values: a row for ``kvferry tune --data rows:FILE``."""
        values = asdict(self)
        options = list(values.pop("options"))
        return values | {"choices": options, "answer": options[self.answer]}


@dataclass(frozen=True)
class QuestionSet:
    """A split's questions, and what was left out.

    Attributes:
        rows: in the books' order.
        asked: questions looked at.
        left_out: reason -> how many.
        shared: ids dropped from ``tune`` because their excerpt has text of the test sections, or
            their question is a test question.
    """

    split: Split
    rows: tuple[ReviewQuestion, ...]
    asked: int
    left_out: dict[str, int]
    shared: tuple[str, ...] = ()

    def counts(self) -> dict[str, Any]:
        """Figures for a record or a terminal."""
        return {
            "split": self.split,
            "asked": self.asked,
            "kept": len(self.rows),
            "contested": sum(row.contested for row in self.rows),
            "excerpts": len({row.context for row in self.rows}),
            "left_out": dict(sorted(self.left_out.items())),
            "shared_with_test": list(self.shared),
        }


def characters(text: str) -> int:
    """Tokens a text has at most, counted without a tokenizer."""
    return -(-len(text) // CHARACTERS_A_TOKEN)


def token_count(tokenizer: Any) -> Count:
    """Counts tokens as a model with this tokenizer reads them."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    return count


def read_split(
    folder: Path, split: Split, *, count: Count = characters, tokens: int = TOKENS
) -> QuestionSet:
    """The questions of a split.

    Args:
        folder: holds ``openstax_mcq`` and ``openstax_prose``.
        split: ``tune``: biology and the first half of anatomy's sections; ``test``: its second.
        count: tokens of a text.
        tokens: an excerpt has at most this many.

    Raises:
        BadInput: an unknown split, a missing or damaged file, no question left.
    """
    if split not in SPLITS:
        raise BadInput(
            expected=f"a split among {', '.join(SPLITS)}",
            got=repr(split),
            next_step="choose one of them; other books are not read",
        )
    book = _book(folder, HALVED_BOOK)
    first, second = halves(book)
    test = _joined("test", [(HALVED_BOOK, second)], folder, count, tokens)
    if split == "test":
        return _some(test, folder)
    texts = [(TUNE_BOOK, _book(folder, TUNE_BOOK)), (HALVED_BOOK, first)]
    tune = _joined("tune", texts, folder, count, tokens)
    bodies = ("\n\n".join(_paragraphs(text)) for text in second.values())
    shared = set(shared_text(tune.rows, test.rows, bodies))
    kept = tuple(row for row in tune.rows if row.id not in shared)
    dropped = tuple(row.id for row in tune.rows if row.id in shared)
    left = tune.left_out | {"shares text with test": len(dropped)}
    return _some(QuestionSet("tune", kept, tune.asked, left, dropped), folder)


def halves(book: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """A book's sections, first and second half in its own order."""
    modules = list(book)
    middle = len(modules) // 2
    return (
        {module: book[module] for module in modules[:middle]},
        {module: book[module] for module in modules[middle:]},
    )


def shared_text(
    tune: Sequence[ReviewQuestion], test: Sequence[ReviewQuestion], sections: Iterable[str] = ()
) -> list[str]:
    """What must not be tuned on.

    Args:
        sections: text that test excerpts come from, all of it: so the answer doesn't depend on how
            excerpts were cut.

    Returns:
        ids of tune questions whose excerpt has eight words in a row of a test excerpt or of one of
        ``sections``, or whose question is a test question.
    """
    seen: set[tuple[str, ...]] = set()
    for text in {*(row.context for row in test), *sections}:
        seen |= shingles(words(text), SHINGLE_WORDS)
    asked = {tuple(words(row.question)) for row in test}
    guilty = {
        context
        for context in {row.context for row in tune}
        if shingles(words(context), SHINGLE_WORDS) & seen
    }
    return [row.id for row in tune if row.context in guilty or tuple(words(row.question)) in asked]


def choice_texts(
    rows: Sequence[ReviewQuestion], *, n: int | None = None, seed: int = 0
) -> list[ChoiceText]:
    """Questions grouped by excerpt, for a choice run.

    Args:
        n: at most this many questions, drawn by ``seed``; ``None`` for all.
        seed: also of the excerpts' order, by which each gets its wrong document.
    """
    draw = random.Random(f"{VERSION} {seed}")
    asked = list(rows) if n is None or n >= len(rows) else draw.sample(list(rows), n)
    groups: dict[str, list[ReviewQuestion]] = {}
    for row in sorted(asked, key=lambda row: row.id):
        groups.setdefault(row.context, []).append(row)
    texts = [
        ChoiceText(
            group[0].id,
            context,
            tuple(
                Question(
                    row.question,
                    "contested" if row.contested else "uncontested",
                    row.options,
                    row.answer,
                )
                for row in group
            ),
            group[0].module,
        )
        for context, group in groups.items()
    ]
    draw.shuffle(texts)
    return texts


def _joined(
    split: Split,
    books: Sequence[tuple[str, dict[str, str]]],
    folder: Path,
    count: Count,
    tokens: int,
) -> QuestionSet:
    rows: list[ReviewQuestion] = []
    left: Counter[str] = Counter()
    asked = 0
    seen: set[str] = set()
    for name, sections in books:
        pieces: dict[str, list[_Piece]] = {}
        for where, raw in _lines(folder / "openstax_mcq" / f"{name}.jsonl"):
            fields = ("id", "module", "question", "options", "answer")
            if not all(field in raw for field in fields):
                raise _damaged(where, f"fields {sorted(raw)}")
            module = raw["module"]
            texts = (module, raw["question"], raw["answer"])
            if not all(isinstance(text, str) for text in texts) or not raw["question"].strip():
                raise _damaged(where, "a module, question or answer that is no text")
            if not isinstance(raw["options"], list):
                raise _damaged(where, "options that are no list")
            if str(raw["id"]) in seen:
                raise _damaged(where, f"id {raw['id']} again")
            seen.add(str(raw["id"]))
            if module not in sections:
                continue
            asked += 1
            if module not in pieces:
                cut = cut_section(sections[module], count=count, tokens=tokens)
                pieces[module] = [_Piece(text) for text in cut]
            found = _place(name, raw, pieces[module])
            if isinstance(found, str):
                left[found] += 1
            else:
                rows.append(found)
    return QuestionSet(split, tuple(rows), asked, dict(left))


class _Piece:
    """A possible excerpt, with its sentences' words."""

    def __init__(self, text: str) -> None:
        self.text = text
        split = [s for paragraph in text.split("\n\n") for s in _SENTENCE.split(paragraph)]
        self.sentences = [stems(sentence) for sentence in split]

    def states(self, option: str) -> list[int]:
        """Numbers of the sentences that state an option; none for one of stop words alone."""
        phrase = stems(option)
        while len(phrase) > 1 and phrase[0] in ("a", "an", "the"):
            phrase = phrase[1:]
        content = content_stems(option)
        return [
            number
            for number, sentence in enumerate(self.sentences if content else [])
            if holds_phrase(sentence, phrase) or (len(content) >= 3 and content <= set(sentence))
        ]

    def around(self, number: int, wanted: set[str]) -> int:
        """Of the wanted words, how many a sentence and its neighbours have."""
        near = self.sentences[max(number - 1, 0) : number + 2]
        return len(wanted & {word for sentence in near for word in sentence})


def _place(book: str, raw: dict[str, Any], pieces: Sequence[_Piece]) -> ReviewQuestion | str:
    """The question with its excerpt, or why it is left out."""
    options = tuple(str(option).strip() for option in raw["options"])
    right = "ABCDEFGH".find(str(raw["answer"]))
    if not 0 <= right < len(options) or len(set(options)) < len(options) or not all(options):
        return "options or key unsound"
    if any(_OTHERS.search(option.rstrip(".")) for option in options):
        return "options speak of other options"
    if _NEGATED.search(raw["question"]):
        return "asks for what is not so"
    wanted = content_stems(raw["question"]) - content_stems(options[right])
    need = min(NEAR_WORDS, len(wanted))
    best: tuple[tuple[int, int], _Piece] | None = None
    for piece in pieces:
        near = max((piece.around(n, wanted) for n in piece.states(options[right])), default=-1)
        if near < need:
            continue
        inside = len(wanted & {word for sentence in piece.sentences for word in sentence})
        if best is None or (near, inside) > best[0]:
            best = (near, inside), piece
    if best is None:
        return "answer not found in the section"
    piece = best[1]
    return ReviewQuestion(
        id=str(raw["id"]),
        book=book,
        module=raw["module"],
        context=piece.text,
        question=str(raw["question"]).strip(),
        options=options,
        answer=right,
        contested=any(piece.states(o) for place, o in enumerate(options) if place != right),
    )


def cut_section(text: str, *, count: Count, tokens: int) -> list[str]:
    """A section as consecutive pieces of whole paragraphs; a heading opens the next piece."""
    pieces: list[list[str]] = [[]]
    for block in _blocks(text, count, tokens):
        if count("\n\n".join([*pieces[-1], block])) > tokens:
            carried: list[str] = []
            while len(pieces[-1]) > 1 and _heading(pieces[-1][-1]):
                carried.insert(0, pieces[-1].pop())
            if count("\n\n".join([*carried, block])) > tokens:
                carried = []
            pieces.append(carried)
        pieces[-1].append(block)
    return ["\n\n".join(piece) for piece in pieces if piece and not all(map(_heading, piece))]


def _paragraphs(text: str) -> list[str]:
    """A section's paragraphs without its list of aims."""
    blocks = [paragraph.strip() for paragraph in text.split("\n\n")]
    return [block for block in blocks if block and not block.casefold().startswith(_AIMS)]


def _blocks(text: str, count: Count, tokens: int) -> Iterator[str]:
    """Paragraphs; one that is too long as runs of its sentences."""
    for block in _paragraphs(text):
        if count(block) <= tokens:
            yield block
            continue
        run: list[str] = []
        for sentence in _SENTENCE.split(block):
            if run and count(" ".join([*run, sentence])) > tokens:
                yield " ".join(run)
                run = []
            if count(sentence) <= tokens:  # a "sentence" beyond the budget is a table: left out
                run.append(sentence)
        if run:
            yield " ".join(run)


def _heading(block: str) -> bool:
    return len(block.split()) <= 12 and block[-1] not in '.!?:;”")'


def _book(folder: Path, name: str) -> dict[str, str]:
    """Module -> text, in the book's order."""
    book: dict[str, str] = {}
    for where, raw in _lines(folder / "openstax_prose" / f"{name}.jsonl"):
        if not isinstance(raw.get("text"), str) or not isinstance(raw.get("module"), str):
            raise _damaged(where, f"fields {sorted(raw)}")
        if raw["module"] in book:
            raise _damaged(where, f"module {raw['module']} again")
        book[raw["module"]] = raw["text"]
    return book


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            expected=f"a readable file {path}",
            got=str(error),
            next_step="give --data FOLDER that holds openstax_mcq and openstax_prose",
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            raw = parse_json(line)
        except ValueError as error:
            raise _damaged(where, str(error)) from error
        if not isinstance(raw, dict):
            raise _damaged(where, type(raw).__name__)
        yield where, raw


def _damaged(where: str, got: str) -> BadInput:
    return BadInput(
        expected=f"a question or a section at {where}",
        got=got,
        next_step="copy the file again",
    )


def _some(found: QuestionSet, folder: Path) -> QuestionSet:
    if not found.rows:
        raise BadInput(
            expected=f"questions whose answer stands in their section, in {folder}",
            got=f"none of {found.asked} ({found.left_out})",
            next_step="check the data, or give a larger --tokens",
        )
    return found
