"""What a corrector is trained and judged on: running text, rows with answers, the source's words.

Owns how texts become contexts with continuations, and who is held out: a document's split follows
from its id, so what is judged was never trained on. One call: ``running_text(layout, documents,
settings)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvferry.errors import BadInput
from kvferry.fitting.corpus import Document, split_of
from kvferry.fitting.train import TuneText
from kvferry.provenance import (
    add_record,
    parse_json,
    read_records,
    sha256_text,
    sole_writer,
    start_records,
)
from kvferry.running.choices import Asked
from kvferry.running.decode import Sampling
from kvferry.running.handoff import Handoff
from kvferry.running.prompt import BoundLayout
from kvferry.terminal import progress

PROMPTS = (
    "Summarise the text in one or two sentences.",
    "What is the main point of the text?",
    "Name three things that the text mentions.",
    "Explain the text to somebody who has not read it.",
)
"""What the source is asked about a text that comes without questions."""
JUDGED_TOKENS = 8
"""Of a continuation to choose: few, or every choice is right."""


@dataclass(frozen=True)
class TuneData:
    """Texts of one source.

    Attributes:
        name: what it is, for people and the map's card.
        task: ``True`` for questions with answers, ``False`` for running text.
        train: trained on, from documents of the fit split.
        held_out: judged on, from those of the select split.
    """

    name: str
    task: bool
    train: tuple[TuneText, ...]
    held_out: tuple[TuneText, ...]

    def weighted(self, ratio: float) -> TuneData:
        """The same by its source's name, drawn ``ratio`` times as often as one with ratio 1."""
        each = ratio / max(len(self.train), 1)
        train = tuple(replace(text, weight=each, source=self.name) for text in self.train)
        held_out = tuple(replace(text, source=self.name) for text in self.held_out)
        return replace(self, train=train, held_out=held_out)


@dataclass(frozen=True)
class RunningText:
    """How running text is cut.

    Attributes:
        context_tokens: read and handed over.
        target_tokens: predicted after one more token.
        held_out: texts to judge on.
        options: continuations to choose from when judged, one of them the text's own.
        texts: pieces to train on, evenly spread; 0 for all.
    """

    context_tokens: int = 256
    target_tokens: int = 64
    held_out: int = 16
    options: int = 4
    texts: int = 0


def running_text(
    layout: BoundLayout, documents: Sequence[Document], settings: RunningText, *, name: str
) -> TuneData:
    """Next-token prediction: a document's tokens are read, those after them are the answer.

    Judged by choosing a held-out text's own continuation among other texts'.

    Raises:
        BadInput: too few documents that are long enough.
    """
    need = settings.context_tokens + 1 + settings.target_tokens
    cut: dict[str, list[tuple[str, Tensor]]] = {"fit": [], "select": []}
    for document in sorted(documents, key=lambda d: d.doc_id):
        if document.split not in cut:
            continue
        if document.split == "select" and len(cut["select"]) >= max(
            settings.held_out, settings.options
        ):
            continue
        ids = layout.context(document.text)
        pieces = ids.numel() // need if document.split == "fit" else min(ids.numel() // need, 1)
        for place in range(pieces):
            piece = ids[place * need : (place + 1) * need]
            cut[document.split].append((f"{document.doc_id[:16]}-{place}", piece))
    train, held = cut["fit"], cut["select"]
    if not train or len(held) < settings.options:
        raise BadInput(
            expected=f"documents of {need} tokens or more: one or more of the fit split, "
            f"{settings.options} or more of the select split",
            got=f"{len(train)} pieces and {len(held)} documents in {name}",
            next_step="give more or longer texts, or a smaller --context-tokens",
        )
    if settings.texts:
        train = train[:: max(len(train) // settings.texts, 1)][: settings.texts]
    at = settings.context_tokens
    trained = tuple(
        TuneText(text_id, ids[:at], (Asked(ids[at : at + 1], (ids[at + 1 :],)),))
        for text_id, ids in train
    )
    judged = []
    for place, (text_id, ids) in enumerate(held):
        others = [held[(place + step) % len(held)][1] for step in range(settings.options)]
        right = place % settings.options  # its own stands at another place in each text
        options = [one[at + 1 : at + 1 + JUDGED_TOKENS] for one in others]
        options[0], options[right] = options[right], options[0]
        judged.append(
            TuneText(text_id, ids[:at], (Asked(ids[at : at + 1], tuple(options), right),))
        )
    return TuneData(name, False, trained, tuple(judged))


@dataclass(frozen=True)
class Row:
    """A question about a text.

    Attributes:
        choices: answers to choose from; empty for free text.
        answer: the right one, as text; ``None`` where the source shall say it.
    """

    context: str
    question: str
    choices: tuple[str, ...]
    answer: str | None

    @property
    def text_id(self) -> str:
        """Names the context, and decides its split."""
        return sha256_text(self.context)


def read_rows(path: Path) -> list[Row]:
    """Rows of a .jsonl file: ``context``, ``question``, and ``choices`` and ``answer`` if known.

    ``answer`` is the text of the answer or its index among the choices.

    Raises:
        BadInput: a line that is not such a row, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            expected=f"a readable .jsonl file {path}", got=str(error), next_step="check the path"
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, f"{path}:{number}"))
    return rows


def holds_rows(path: Path) -> bool:
    """Whether a file is rows with questions, not running text: its first line says so."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as stream:
        first = next((line for line in stream if line.strip()), "")
    return '"question"' in first and '"context"' in first


def _row(line: str, where: str) -> Row:
    problem = ""
    try:
        raw = parse_json(line)
        context, question = raw["context"], raw["question"]
        listed, answer = raw.get("choices") or [], raw.get("answer")
        if not isinstance(listed, list):
            raise TypeError(f"choices that are no list: {listed!r}")
        choices = tuple(listed)
        if isinstance(answer, int) and not isinstance(answer, bool):
            if not 0 <= answer < len(choices):
                raise IndexError(f"answer {answer} of {len(choices)} choices, counted from 0")
            answer = choices[answer]
        texts = [context, question, *choices, *([] if answer is None else [answer])]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            problem = "an empty text, or one that is not a string"
        elif choices and answer is not None and answer not in choices:
            problem = f"an answer that is none of the choices: {answer!r}"
        elif len(choices) == 1 or len(set(choices)) < len(choices):
            problem = f"{len(choices)} choices, {len(set(choices))} different"
        else:
            return Row(context, question, choices, answer)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise BadInput(
        expected=f"a row with context, question, choices and answer at {where}",
        got=problem,
        next_step='write {"context": "...", "question": "...", "choices": ["a", "b"], '
        '"answer": "a"}',
    )


def task_rows(
    layout: BoundLayout, rows: Sequence[Row], *, cue: str, held_out: int, name: str
) -> TuneData:
    """Questions with answers, grouped by context; a context's split follows from its text.

    Raises:
        BadInput: a row without an answer, or too few contexts.
    """
    if any(row.answer is None for row in rows):
        raise BadInput(
            expected="an answer in every row",
            got=f"{sum(row.answer is None for row in rows)} rows without one in {name}",
            next_step="let the source answer them: --data source:FILE",
        )
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.text_id, []).append(row)
    train: list[TuneText] = []
    held: list[TuneText] = []
    for text_id in sorted(groups):
        text = TuneText(
            text_id[:16],
            layout.context(groups[text_id][0].context),
            tuple(_asked(layout, row, cue) for row in groups[text_id]),
        )
        split = split_of(text_id)
        if split == "fit":
            train.append(text)
        elif split == "select" and len(held) < held_out and len(text.asked[0].options) > 1:
            held.append(text)
    if not train:
        raise BadInput(
            expected="contexts to train on",
            got=f"{len(groups)} contexts in {name}, none of the fit split",
            next_step="give more rows",
        )
    return TuneData(name, True, tuple(train), tuple(held))


def _asked(layout: BoundLayout, row: Row, cue: str) -> Asked:
    options = row.choices or (str(row.answer),)
    ids = tuple(layout.continuation(f" {option}") for option in options)
    return Asked(layout.tail(row.question, cue=cue), ids, options.index(str(row.answer)))


def source_answers(
    ferry: Handoff,
    rows: Sequence[Row],
    folder: Path,
    *,
    max_new_tokens: int,
    name: str,
) -> TuneData:
    """The source's own greedy answers, generated once and kept in ``folder``; resumes.

    Args:
        rows: what to ask; their answers are not looked at.
        folder: gets ``source_answers/`` with ``header.json`` and ``records.jsonl``.

    Raises:
        BadInput: answers of another source or length are kept there.
        ContextTooLong: a row is beyond a model's limit.
    """
    for row in rows:
        size = int(ferry.layout.context(row.context).numel())
        more = int(ferry.layout.tail(row.question).numel()) + max_new_tokens
        ferry.require_room(size, more)
    header = {
        "format": "kvferry-source-answers-1",
        "source": {"revision": ferry.source.revision, "precision": str(ferry.source.precision)},
        "layout": ferry.layout.identity,
        "max_new_tokens": max_new_tokens,
    }
    folder = folder / "source_answers"
    with sole_writer(folder, "answering"):
        named = ("text_id", "question")
        path = start_records(
            folder, header, same=("source", "layout", "max_new_tokens"), once=named
        )
        kept = {
            (r["text_id"], r["question"]): r["token_ids"]
            for r in read_records(path, keys=("token_ids",), once=named)
        }
        _answer_all(ferry, rows, path, kept, Sampling(max_new_tokens))
    texts: dict[str, list[Asked]] = {}
    bodies = {}
    for row in rows:
        ids = kept[row.text_id, row.question]
        if ids and split_of(row.text_id) == "fit":
            bodies[row.text_id] = ferry.layout.context(row.context)
            texts.setdefault(row.text_id, []).append(
                Asked(ferry.layout.tail(row.question), (torch.tensor(ids),))
            )
    train = tuple(TuneText(i[:16], bodies[i], tuple(texts[i])) for i in sorted(texts))
    return TuneData(name, True, train, ())


def _answer_all(
    ferry: Handoff,
    rows: Sequence[Row],
    path: Path,
    kept: dict[tuple[str, str], list[int]],
    sampling: Sampling,
) -> None:
    with progress("source answers", total=len(rows), unit="answers") as advance:
        for row in rows:
            if (row.text_id, row.question) not in kept:
                answer = ferry(row.context, row.question, arm="source_native", sampling=sampling)
                kept[row.text_id, row.question] = list(answer.token_ids)
                add_record(
                    path,
                    {
                        "text_id": row.text_id,
                        "question": row.question,
                        "token_ids": list(answer.token_ids),
                        "text": answer.text,
                    },
                )
            advance(1)


def prompts_for(documents: Sequence[Document], *, chars: int) -> list[Row]:
    """Documents without questions, asked what ``PROMPTS`` ask, in turn."""
    return [
        Row(document.text[:chars], PROMPTS[place % len(PROMPTS)], (), None)
        for place, document in enumerate(documents)
    ]
