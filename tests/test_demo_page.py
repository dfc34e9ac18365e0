"""The demo page: its figures are the input's, nothing is loaded, nothing unsafe gets through."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import ValidationError

from kvferry.errors import BadInput
from kvferry.report.demo_page import demo_page, headline, milliseconds
from kvferry.report.demo_result import ArmRow, DemoResult, Direction, Item, ItemAnswer

PARTS = {"source_prefill": 210.0, "map": 42.0, "inject": 6.5, "tail": 88.0, "first_token": 31.0}
VOID = {"meta", "br", "img", "link", "input", "hr"}


def arm_row(arm: str, correct: int, **fields: Any) -> ArmRow:
    is_control = arm in ("no_context", "wrong_document")
    return ArmRow.model_validate(
        {"arm": arm, "is_control": is_control, "correct_choice": correct, "n": 12} | fields
    )


def direction(transfer: int = 5, no_context: int = 4, **fields: Any) -> Direction:
    rows = [
        arm_row("source_native", 7, correct_text=6, ttft_ms_median=251.0),
        arm_row(
            "transfer",
            transfer,
            correct_text=3,
            ttft_ms_median=377.0,
            ttft_parts_ms=PARTS,
            decode_tokens_per_s=11.37,
        ),
        arm_row(
            "receiver_native",
            10,
            correct_text=9,
            ttft_ms_median=1204.0,
            ttft_parts_ms={"prefill": 1173.0, "first_token": 31.0},
        ),
        arm_row("no_context", no_context, correct_text=0),
        arm_row("wrong_document", 2),
    ]
    item = Item(
        id="demo-01",
        title="Heart Anatomy",
        context="A typical heart is\n\n8 cm wide & <b>red</b>.",
        question="How wide is a typical heart?",
        options=["8 cm", "9 cm", "7 cm", "10 cm"],
        answer=0,
        answers={
            "transfer": ItemAnswer(
                chosen=1, text="<script>alert(1)</script>", text_correct=False, ttft_ms=377.0
            ),
            "receiver_native": ItemAnswer(chosen=0, text="8 cm", text_correct=True, ttft_ms=1204.0),
        },
    )
    values = {
        "source": "Small-0.5B",
        "receiver": "Large-1.5B",
        "map_name": "small-to-large",
        "map_sha256": "ab" * 32,
        "k_key": 4,
        "k_value": 8,
        "map_bytes": 123_400_000,
        "rows": rows,
        "items": [item],
        "notes": ["Greedy decoding."],
    }
    return Direction.model_validate(values | fields)


def result(*directions: Direction, **fields: Any) -> DemoResult:
    values = {
        "title": "kvferry demo",
        "created": "2026-01-02T03:04:05+00:00",
        "code": {"kvferry": "0.1.0", "commit": "c0ffee", "dirty": True},
        "machine": {"cores": 2, "memory_bytes": 8_000_000_000, "versions": {"torch": None}},
        "command": "kvferry demo --out demo.html",
        "directions": list(directions) or [direction()],
        "caveats": ["Twelve questions are few."],
    }
    return DemoResult.model_validate(values | fields)


class Outline(HTMLParser):
    """Collects loads, tags and balance."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text_of(page: str) -> str:
    body = page.split("</style>", 1)[1]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_figures_on_the_page_are_the_input() -> None:
    page = demo_page(result())
    text = text_of(page)
    for row in direction().rows:
        assert f"{row.correct_choice} of 12 [{100 * row.low:.0f}% to {100 * row.high:.0f}%]" in text
    for needed in (
        "377 ms source prefill 210 ms map 42 ms inject 6.5 ms tail 88 ms first token 31 ms",
        "11.4 tokens/s",
        "123.4 MB",
        "4 for keys, 8 for values",
        "ab" * 32,
        "c0ffee with uncommitted changes",
        "8.00 GB",
        "kvferry demo --out demo.html",
        "Twelve questions are few.",
        "Greedy decoding.",
        "chance: 25%",
    ):
        assert needed in text, needed
    assert "width:41.67%" in page
    assert "left:33.33%" in page
    assert "left:25.00%" in page


def test_headline_says_where_the_transfer_loses() -> None:
    said = " ".join(headline(direction()))
    assert "transfer 5 of 12, receiver’s own reading 10 of 12" in said
    assert "no context 4 of 12" in said
    assert "Right in free text: transfer 3, receiver’s own reading 9" in said
    assert "95% intervals overlap" in said
    assert (
        "5 fewer options right than the receiver’s own reading, with a first token sooner" in said
    )
    assert "2 fewer options right than the source’s own reading, with a first token later" in said
    assert all(sentence in text_of(demo_page(result())) for sentence in headline(direction()))


@pytest.mark.parametrize(
    ("transfer", "no_context", "expected"),
    [
        (4, 4, "does not beat no context:"),
        (2, 4, "does not beat no context or wrong document"),
        (12, 2, "beats both controls, and the 95% intervals don’t overlap"),
        (10, 2, "as many options right as the receiver’s own reading"),
        (11, 2, "1 more option right than the receiver’s own reading"),
    ],
)
def test_headline_follows_the_counts(transfer: int, no_context: int, expected: str) -> None:
    assert expected in " ".join(headline(direction(transfer, no_context)))


def test_everything_is_escaped() -> None:
    page = demo_page(result(direction(notes=["a <i>note</i>"]), title="<script>x</script>"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;red&lt;/b&gt;" in page
    assert "<i>note" not in page


def test_nothing_is_loaded_and_tags_balance() -> None:
    page = demo_page(result(direction(), direction(transfer=9)))
    outline = Outline(page)
    assert outline.open == []
    loads = [
        (tag, value)
        for tag, attributes in outline.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data")
    ]
    licence = ("a", "https://creativecommons.org/licenses/by/3.0/")
    assert loads == [licence]
    assert "url(" not in page
    assert "@import" not in page
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("caption") == tags.count("table") == 4
    assert all("scope" in attributes for tag, attributes in outline.tags if tag == "th")


def test_missing_values_read_not_measured() -> None:
    bare = direction(
        rows=[arm_row("transfer", 0), arm_row("no_context", 12)],
        items=[],
        notes=[],
        map_sha256=None,
        map_bytes=None,
        k_key=None,
    )
    page = demo_page(result(bare, caveats=[], code={"commit": None}, machine={}))
    text = text_of(page)
    assert text.count("not measured") >= 10
    assert "nan" not in text.lower().split()
    assert "None" not in text
    assert 'class="stack"' not in page
    assert "Only one of the two controls was measured" in text
    alone = direction(rows=[arm_row("receiver_native", 3)])
    assert "transfer itself was not measured" in text_of(demo_page(result(alone)))


def test_nothing_scored_is_refused() -> None:
    with pytest.raises(BadInput):
        arm_row("transfer", 0, n=0)
    with pytest.raises(BadInput):
        arm_row("transfer", 13)
    with pytest.raises(BadInput):
        arm_row("transfer", 3, correct_text=13)
    with pytest.raises(BadInput):
        arm_row("transfer", 3, low=0.5, high=0.6)
    with pytest.raises(BadInput):
        direction(rows=[arm_row("transfer", 3), arm_row("no_context", 3, n=11)])
    with pytest.raises(ValidationError):
        arm_row("transfer", 3, ttft_ms_median=float("nan"))


def test_json_round_trip() -> None:
    first = result()
    assert DemoResult.model_validate_json(first.model_dump_json()) == first


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "not measured"), (0.0, "0.0 ms"), (9.94, "9.9 ms"), (812.3, "812 ms")],
)
def test_milliseconds(value: float | None, shown: str) -> None:
    assert milliseconds(value) == shown
