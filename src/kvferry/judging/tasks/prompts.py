"""Free-form requests: first turns of MT-Bench and Vicuna, as a context and a question.

Owns which prompts are asked and how one becomes a context to hand over. By rule:

- A group is one category of one file. Groups take turns in the order in which they first appear,
  MT-Bench's before Vicuna's; within a group, prompts that bring a passage come first, then the
  order of the file. A prompt whose words came before is passed over.
- A prompt brings a passage if a line begins with ``Question:`` (what stands before is the context,
  what follows the question), or if ``PASSAGE_CHARS`` characters or more stand below its first line
  (the first line is the question, the rest the context).
- Any other prompt is the context as a whole, and the question is ``WHOLE``.

One call: ``read_prompts(folder, 40)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import BadInput
from kvferry.judging.tasks.words import words
from kvferry.provenance import parse_json

VERSION = "prompts-1"
FILES = {"mt_bench": "mt_bench_question.jsonl", "vicuna": "vicuna_bench_question.jsonl"}
WHOLE = "Write the answer to this request."
PASSAGE_CHARS = 100
_QUESTION = re.compile(r"^Question:\s*", re.MULTILINE)


@dataclass(frozen=True)
class Prompt:
    """A request.

    Attributes:
        id: file and number.
        category: as the file says.
        request: as it was written, for whoever judges the answers.
        context: what is read and handed over.
        question: what the answering model reads itself.
        whole: the context is the whole request.
    """

    id: str
    category: str
    request: str
    context: str
    question: str
    whole: bool

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def split_request(text: str) -> tuple[str, str] | None:
    """Context and question of a prompt that brings a passage; ``None`` for any other."""
    if (mark := _QUESTION.search(text)) and text[: mark.start()].strip():
        question = text[mark.end() :].strip()
        return (text[: mark.start()].strip(), question) if question else None
    first, _, rest = text.strip().partition("\n")
    return (rest.strip(), first.strip()) if len(rest.strip()) >= PASSAGE_CHARS else None


def read_prompts(folder: Path, n: int) -> list[Prompt]:
    """``n`` prompts, spread over the categories.

    Args:
        folder: holds ``mt_bench``.

    Raises:
        BadInput: a missing or damaged file, or fewer prompts than asked for.
    """
    groups: dict[tuple[str, str], list[Prompt]] = {}
    seen: set[tuple[str, ...]] = set()
    for name, file in FILES.items():
        for prompt in _read(folder / "mt_bench" / file, name):
            key = tuple(words(prompt.request)) or (prompt.request,)
            if key not in seen:
                seen.add(key)
                groups.setdefault((name, prompt.category), []).append(prompt)
    queues = [sorted(group, key=lambda prompt: prompt.whole) for group in groups.values()]
    found: list[Prompt] = []
    for turn in range(max(map(len, queues), default=0)):
        found += [queue[turn] for queue in queues if turn < len(queue)]
    if len(found) < n:
        raise BadInput(
            expected=f"{n} prompts in {folder / 'mt_bench'}",
            got=f"{len(found)} different ones",
            next_step="ask for fewer with -n",
        )
    return found[:n]


def _read(path: Path, name: str) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            expected=f"a readable file {path}",
            got=str(error),
            next_step="give --data FOLDER that holds mt_bench",
        ) from error
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = parse_json(line)
            turns, category = raw["turns"], str(raw["category"])
            if not isinstance(turns, list) or not isinstance(turns[0], str):
                raise TypeError("turns that are no list of texts")
            text = turns[0].strip()
            prompt_id = f"{name}/{raw['question_id']}"
            if prompt_id in seen:
                raise ValueError(f"question_id {raw['question_id']} again")
            seen.add(prompt_id)
        except (ValueError, LookupError, TypeError) as error:
            raise BadInput(
                expected=f"a prompt with question_id, category and turns at {path}:{number}",
                got=f"{type(error).__name__}: {error}",
                next_step="copy the file again",
            ) from error
        if text:
            parts = split_request(text)
            context, question = parts or (text, WHOLE)
            yield Prompt(prompt_id, category, text, context, question, parts is None)
