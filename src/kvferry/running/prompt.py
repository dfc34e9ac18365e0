"""The prompt's layout: prefix | context | question | cue, through a chat template.

Owns how a prompt becomes token ids. The pieces are tokenised apart, so that the context's tokens
don't depend on the question and the prefix is a constant; joined, they give the rendered text.
Special tokens written inside a context or a question stay plain text. One call:
``PromptLayout().bind(tokenizer)``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import BadInput, CorruptFile, WrongPair
from kvferry.provenance import sha256_text

MIN_PREFIX_TOKENS = 4
_CONTEXT = "\u27eacontext\u27eb"
_QUESTION = "\u27eaquestion\u27eb"


@dataclass(frozen=True)
class PromptLayout:
    """What stands around a context and a question; a value that maps and records share.

    Attributes:
        instruction: first words of the user's turn, before the context.
        before_question: between context and question.
        cue: first words of the answer, put into the assistant's turn.
        system: a system message; ``None`` leaves the template's own.
    """

    instruction: str = "Read the text and answer the question about it.\n\nText:\n"
    before_question: str = "\n\nQuestion: "
    cue: str = ""
    system: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> PromptLayout:
        """A layout from ``to_dict``'s values.

        Raises:
            CorruptFile: other names, or values that are not texts.
        """
        names = {field.name for field in fields(cls)}
        sound = isinstance(values, dict) and set(values) == names
        for name, value in values.items() if sound else ():
            sound = sound and (isinstance(value, str) or (name == "system" and value is None))
        if not sound:
            raise CorruptFile(
                expected=f"a prompt layout with the texts {', '.join(sorted(names))}",
                got=str(values)[:200],
                next_step="restore the map's map.json",
            )
        return cls(**values)

    def bind(self, tokenizer: Any) -> BoundLayout:
        """Render through a tokenizer's chat template (or plainly, if it has none).

        Raises:
            BadInput: the template drops or reorders what it is given, or its prefix is too short.
        """
        rendered = self._render(tokenizer)
        if rendered.count(_CONTEXT) != 1 or rendered.count(_QUESTION) != 1:
            raise BadInput(
                expected="a chat template that shows the user's text once",
                got=f"{rendered.count(_CONTEXT)} copies of the context",
                next_step="use a tokenizer with a plain user/assistant template",
            )
        if rendered.index(_QUESTION) < rendered.index(_CONTEXT):
            raise BadInput(
                expected="a chat template that keeps the order of the user's text",
                got="the question before the context",
                next_step="use a tokenizer with a plain user/assistant template",
            )
        prefix, rest = rendered.split(_CONTEXT)
        middle, after = rest.split(_QUESTION)
        prefix_ids = _encode(tokenizer, prefix, special=True)
        if len(prefix_ids) < MIN_PREFIX_TOKENS:
            raise BadInput(
                expected=f"a constant prefix of at least {MIN_PREFIX_TOKENS} tokens (the anchors)",
                got=f"{len(prefix_ids)} tokens: {prefix!r}",
                next_step="give the layout a longer instruction or a system message",
            )
        _require_plain_pieces(tokenizer)
        return BoundLayout(self, tokenizer, prefix, middle, after, tuple(prefix_ids))

    def _render(self, tokenizer: Any) -> str:
        user = f"{self.instruction}{_CONTEXT}{self.before_question}{_QUESTION}"
        if not getattr(tokenizer, "chat_template", None):
            start = tokenizer.bos_token or ""
            return f"{start}{user}\n\nAnswer:{' ' + self.cue if self.cue else ''}"
        messages = [{"role": "user", "content": user}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            date_string="01 Jan 2026",  # templates that print today's date would move the prefix
            enable_thinking=False,
        )
        return str(text) + self.cue


@dataclass(frozen=True)
class BoundLayout:
    """A layout in a tokenizer's ids.

    Attributes:
        layout: the layout.
        tokenizer: the tokenizer it was rendered with.
        prefix_text: constant text before the context.
        middle_text: between context and question.
        after_text: after the question: end of turn, answer header, cue.
        prefix_ids: the anchors' token ids.
    """

    layout: PromptLayout
    tokenizer: Any
    prefix_text: str
    middle_text: str
    after_text: str
    prefix_ids: tuple[int, ...]

    @property
    def identity(self) -> str:
        """Hash of everything constant: two equal identities give equal prompts."""
        ids = ",".join(map(str, self.prefix_ids))
        return sha256_text("\x00".join((ids, self.prefix_text, self.middle_text, self.after_text)))

    def prefix(self) -> Tensor:
        """``[P]`` int64."""
        return torch.tensor(self.prefix_ids, dtype=torch.int64)

    def context(self, text: str) -> Tensor:
        """``[T]`` int64, whatever the question.

        Raises:
            BadInput: an empty context.
        """
        _require_text("context", text)
        if not text.strip():
            raise BadInput(
                expected="a context with some text",
                got="an empty context" if not text else "a context of white space only",
                next_step="give a text to read; to ask without one use --arm no_context",
            )
        return _tensor(_encode(self.tokenizer, text, special=False))

    def tail(self, question: str, *, cue: str | None = None) -> Tensor:
        """Question and cue, ``[Q]`` int64.

        Args:
            question: the question's text.
            cue: other first words of the answer than the layout's.

        Raises:
            BadInput: an empty question.
        """
        _require_text("question", question)
        if not question.strip():
            raise BadInput(
                expected="a question",
                got="an empty question",
                next_step='give one, e.g. --question "Who wrote it?"',
            )
        return _tensor(
            [
                *_encode(self.tokenizer, self.middle_text, special=True),
                *_encode(self.tokenizer, question, special=False),
                *_encode(self.tokenizer, self._after(cue), special=True),
            ]
        )

    def _after(self, cue: str | None) -> str:
        if cue is None or cue == self.layout.cue:
            return self.after_text
        return replace(self.layout, cue=cue).bind(self.tokenizer).after_text

    def continuation(self, text: str) -> Tensor:
        """An answer to be scored after the cue, ``[n]`` int64."""
        return _tensor(_encode(self.tokenizer, text, special=False))

    def text(self, context: str, question: str) -> str:
        """The whole prompt as text."""
        return self.prefix_text + context + self.middle_text + question + self.after_text

    def require_same(self, identity: str, what: str) -> None:
        """Refuse a map, capture or record made with another layout.

        Raises:
            WrongPair: the identities differ.
        """
        if identity != self.identity:
            raise WrongPair(
                expected=f"the prompt layout of {what} ({identity[:16]})",
                got=f"this layout ({self.identity[:16]})",
                next_step="use the layout stored with the map, or fit a map for this one",
            )


def _require_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise BadInput(
            expected=f"a {what} that is a string",
            got=type(text).__name__,
            next_step="give the text itself",
        )


def _require_plain_pieces(tokenizer: Any) -> None:
    """Refuse tokenizers that put a blank before whatever they are given."""
    pieces = [*_encode(tokenizer, "a:", special=False), *_encode(tokenizer, "b", special=False)]
    if (joined := tokenizer.decode(pieces)) != "a:b":
        raise BadInput(
            expected="a tokenizer whose pieces join to the text they came from",
            got=f"{joined!r} for the pieces 'a:' and 'b'",
            next_step="use a tokenizer that adds no blank before a text",
        )


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    if not text:
        return []
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            expected="text that UTF-8 can hold",
            got=f"half of a surrogate pair at character {error.start}",
            next_step="decode the text again; JSON can carry such halves",
        ) from error
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special)
    return [int(i) for i in ids]


def _tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)
