"""Invented benchmark files in the official formats: a few textbook sections, a few prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLANTS = ["heather", "bramble", "willow", "hawthorn", "juniper", "bracken", "foxglove", "yarrow"]
USES = ["dyes", "baskets", "ropes", "salves", "candles", "brooms", "flutes", "fences"]
PLACES = ["moor", "valley", "island", "harbour", "quarry", "orchard", "marsh", "ridge"]
TRADERS = ["millers", "sailors", "monks", "weavers", "bakers", "smiths", "tanners", "coopers"]


def _section(book: int, number: int) -> str:
    trader = TRADERS[(number * 3 + book) % 8]
    plant, use = PLANTS[(number + book) % 8], USES[(number * 3 + book) % 8]
    place = PLACES[(number * 5 + book) % 8]
    return (
        "By the end of this section, you will be able to: * Name the plants\n\n"
        f"Plants of the {place}\n\n"
        f"Long ago {plant} number {book}{number} was gathered on the {place} for {use}. "
        f"In {book}{number} few people of chapter {book}{number} remember the {plant}.\n\n"
        f"The {trader} of {book}{number} paid {number + 2} coins in {book}{number} "
        f"a bundle on the {place} in year {book}{number}. Then trade in {use} ended."
    )


def _asked(book: str, module: str, number: int, offset: int) -> list[dict[str, Any]]:
    plant = PLANTS[(number + offset) % 8]
    wrong = [one for one in PLANTS if one != plant][:3]
    place, trader = PLACES[(number * 5 + offset) % 8], TRADERS[(number * 3 + offset) % 8]
    base = {"book": book, "module": module}
    return [
        base
        | {
            "id": f"{book}/{module}/0",
            "question": f"What was gathered on the {place} in {offset}{number}?",
            "options": [*wrong[:2], plant, wrong[2]],
            "answer": "C",
        },
        base
        | {
            "id": f"{book}/{module}/1",
            "question": f"Who paid for each bundle of {offset}{number}?",
            "options": ["kings", trader, "queens", "bishops"],
            "answer": "B",
        },
        base
        | {
            "id": f"{book}/{module}/2",
            "question": f"What was gathered on the {place}?",
            "options": ["stones", plant, "shells", "all of the above"],
            "answer": "B",
        },
        base
        | {
            "id": f"{book}/{module}/3",
            "question": f"Which plant was not gathered on the {place}?",
            "options": ["stones", plant, "shells", "sand"],
            "answer": "A",
        },
        base
        | {
            "id": f"{book}/{module}/4",
            "question": f"What swims near the {place}?",
            "options": ["herring", "cod", "eel", "perch"],
            "answer": "A",
        },
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_textbooks(folder: Path, sections: int = 6) -> Path:
    """Two books of sections with five questions each: two sound, three to be left out."""
    for offset, book in ((1, "biology"), (2, "anatomy_physiology")):
        prose, asked = [], []
        for number in range(sections):
            module = f"m{offset}{number}"
            text = _section(offset, number)
            prose.append({"book": book, "module": module, "title": "Plants", "text": text})
            asked += _asked(book, module, number, offset)
        _write(folder / "openstax_prose" / f"{book}.jsonl", prose)
        _write(folder / "openstax_mcq" / f"{book}.jsonl", asked)
    return folder


def write_prompts(folder: Path) -> Path:
    """Two files of prompts; one repeats, one brings a passage, one a question line."""
    passage = "\n".join(f"{i}. The {plant} stands by the gate." for i, plant in enumerate(PLANTS))
    bench = [
        (81, "writing", "Write a line about rain."),
        (82, "writing", f"Name the plants in this list:\n{passage}"),
        (83, "writing", "Write a line about snow."),
        (101, "reasoning", "Read this:\nAda is older than Bo.\nQuestion: Who is younger?"),
    ]
    other = [
        (1, "generic", "How do I tie a knot?"),
        (2, "generic", "write a line about RAIN"),
        (3, "generic", "How do I mend a net?"),
    ]
    for name, rows in (("mt_bench_question", bench), ("vicuna_bench_question", other)):
        _write(
            folder / "mt_bench" / f"{name}.jsonl",
            [{"question_id": i, "category": c, "turns": [t, "And now?"]} for i, c, t in rows],
        )
    return folder
