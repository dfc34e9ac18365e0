"""What one run of the demo found: directions, arms, items and how they were measured.

Owns the shape of ``demo.json``. Refuses counts that can't be, figures that aren't finite and
unknown fields. One call: ``DemoResult.model_validate_json(text)``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvferry.errors import BadInput
from kvferry.judging.paired_stats import wilson

Arm = Literal["source_native", "transfer", "receiver_native", "no_context", "wrong_document"]

CONTROLS: frozenset[str] = frozenset({"no_context", "wrong_document"})
"""Arms whose receiver hasn't seen the passage: what they reach isn't reading."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmRow(_Strict):
    """One arm's figures over the items of a direction.

    Attributes:
        correct_choice: items with the right option chosen.
        correct_text: items with the right answer in the generated text; ``None`` if not measured.
        n: items scored.
        ttft_ms_median: time to first token.
        ttft_parts_ms: medians of the parts (source_prefill, prefill, map, inject, tail,
            first_token); each is a median of its own.
        low: lower 95% Wilson bound of the share of right options; worked out when left out.
        high: upper bound.

    Raises:
        BadInput: ``n`` is 0, a count is outside 0..n, or ``low``/``high`` don't follow from them.
    """

    arm: Arm
    is_control: bool
    correct_choice: int
    correct_text: int | None = None
    n: int
    ttft_ms_median: float | None = Field(default=None, ge=0)
    ttft_parts_ms: dict[str, float] = Field(default_factory=dict)
    decode_tokens_per_s: float | None = Field(default=None, ge=0)
    low: float = -1.0
    high: float = -1.0

    @model_validator(mode="before")
    @classmethod
    def _fill_bounds(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not {"correct_choice", "n"} <= data.keys():
            return data
        low, high = wilson(int(data["correct_choice"]), int(data["n"]))
        return {"low": low, "high": high} | data

    @model_validator(mode="after")
    def _check(self) -> ArmRow:
        low, high = wilson(self.correct_choice, self.n)
        if abs(low - self.low) > 1e-6 or abs(high - self.high) > 1e-6:
            raise BadInput(
                expected=f"Wilson bounds {low:.4f} to {high:.4f} for {self.arm}",
                got=f"{self.low:.4f} to {self.high:.4f}",
                next_step="leave low and high out; they are worked out from the counts",
            )
        if self.correct_text is not None and not 0 <= self.correct_text <= self.n:
            raise BadInput(
                expected=f"right texts between 0 and {self.n} for {self.arm}",
                got=str(self.correct_text),
                next_step="check how the answers were counted",
            )
        if self.is_control != (self.arm in CONTROLS):
            raise BadInput(
                expected=f"is_control = {self.arm in CONTROLS} for {self.arm}",
                got=str(self.is_control),
                next_step="mark no_context and wrong_document, and no other arm, as controls",
            )
        if any(part < 0 for part in self.ttft_parts_ms.values()):
            raise BadInput(
                expected=f"milliseconds of 0 or more for {self.arm}",
                got=str(self.ttft_parts_ms),
                next_step="check the clock that timed the parts",
            )
        return self


class ItemAnswer(_Strict):
    """What one arm answered; ``None`` where it wasn't asked."""

    chosen: int | None = None
    text: str | None = None
    text_correct: bool | None = None
    ttft_ms: float | None = Field(default=None, ge=0)


class Item(_Strict):
    """One question, its passage and every arm's answer."""

    id: str
    title: str
    context: str
    question: str
    options: list[str] = Field(min_length=2)
    answer: int
    answers: dict[Arm, ItemAnswer]

    @model_validator(mode="after")
    def _check(self) -> Item:
        chosen = [a.chosen for a in self.answers.values() if a.chosen is not None]
        if any(not 0 <= index < len(self.options) for index in [self.answer, *chosen]):
            raise BadInput(
                expected=f"option numbers from 0 to {len(self.options) - 1} in {self.id}",
                got=f"answer {self.answer}, chosen {chosen}",
                next_step="number the options from 0",
            )
        return self


class Direction(_Strict):
    """One source, one receiver, the map between them and what it did."""

    source: str
    receiver: str
    map_name: str
    map_sha256: str | None = None
    k_key: int | None = None
    k_value: int | None = None
    map_bytes: int | None = None
    rows: list[ArmRow] = Field(min_length=1)
    items: list[Item] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> Direction:
        arms = [row.arm for row in self.rows]
        if len(set(arms)) < len(arms) or len({row.n for row in self.rows}) > 1:
            raise BadInput(
                expected="one row an arm, all over the same items",
                got=", ".join(f"{row.arm} n={row.n}" for row in self.rows),
                next_step="score every arm on the same items before comparing them",
            )
        return self

    def row(self, arm: str) -> ArmRow | None:
        """The row of an arm, ``None`` if it wasn't run."""
        return next((row for row in self.rows if row.arm == arm), None)


class Attribution(_Strict):
    """Whose text the passages are."""

    text: str
    licence: str
    url: str = Field(pattern=r"^https://")


OPENSTAX = Attribution(
    text=(
        "Passages from Anatomy & Physiology, © 2014 OpenStax College; Markdown turned into plain "
        "text, whole sentences excerpted. Questions and options were written for kvferry."
    ),
    licence="CC BY 3.0",
    url="https://creativecommons.org/licenses/by/3.0/",
)


class DemoResult(_Strict):
    """Everything the demo page shows."""

    title: str
    created: str
    code: dict[str, Any]
    machine: dict[str, Any]
    command: str
    directions: list[Direction] = Field(min_length=1)
    caveats: list[str] = Field(default_factory=list)
    attribution: Attribution = OPENSTAX
