"""In what precision a model is served: its weights and its cache, by name; imports no torch.

Owns the names and their combination; refuses others. What is left open (``None``) is filled in by
``or_else``: by what a map was fitted at, or by what the model computes in. One call:
``Precision("int8", "fp8")``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import BadInput

FLOATS = ("float32", "bfloat16", "float16")
WEIGHTS = (*FLOATS, "int8", "int4")
CACHES = (*FLOATS, "int8", "fp8", "fp8_per_token_head")


@dataclass(frozen=True)
class Precision:
    """How a model's weights and cache are held.

    Attributes:
        weights: of ``WEIGHTS``, or ``None`` for left open.
        cache: of ``CACHES``, or ``None``: as the model computes it.
    """

    weights: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weights", self.weights, WEIGHTS),
            ("a cache", self.cache, CACHES),
        ):
            if value is not None and value not in known:
                raise BadInput(
                    expected=f"a precision for {name} among {', '.join(known)}",
                    got=repr(value),
                    next_step="choose one of them, or leave it out",
                )

    @property
    def plain(self) -> bool:
        """Float32 throughout, as models are run where nothing is said."""
        return (self.weights, self.cache) == ("float32", "float32")

    def or_else(self, other: Precision) -> Precision:
        """This one, with what is left open taken from another."""
        return Precision(self.weights or other.weights, self.cache or other.cache)

    def __str__(self) -> str:
        return f"{self.weights or 'unsaid'} weights, {self.cache or 'unsaid'} cache"
