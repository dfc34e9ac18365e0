"""The error tree. Every error says what was expected, what came, and what to do next.

KvferryError
├── BadInput            an argument, a document or a question that can't be used
├── ContextTooLong      more tokens than the receiver's limit; never truncated silently
├── UnsupportedGeometry a layer kind, rope or class that is not run yet
├── WrongPair           a map, capture or cache that belongs to other models or another direction
├── TokenizerMismatch   source and receiver number the same text differently
├── CorruptFile         a file that is truncated, damaged or not of the stated format
│   └── HashMismatch    a file whose sha256 is not the one on record
├── NotFinite           NaN or infinity where a number was expected
├── OutOfSpace          too little disk or memory for what was asked
└── Unreachable         nothing could be downloaded from any source

The command line prints these without a traceback and exits with code 2.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of the tree.

    Args:
        expected: what would have been right, as a short phrase.
        got: what came instead.
        next_step: what the user can do now.
    """

    def __init__(self, *, expected: str, got: str, next_step: str) -> None:
        self.expected = expected
        self.got = got
        self.next_step = next_step
        super().__init__(f"expected {expected}; got {got}. Next: {next_step}")

    def lines(self) -> list[str]:
        """The three lines that a terminal shows."""
        return [
            f"expected  {self.expected}",
            f"got       {self.got}",
            f"next      {self.next_step}",
        ]


class BadInput(KvferryError):
    """An argument, a document or a question that can't be used."""


class ContextTooLong(KvferryError):
    """More tokens than the receiver's limit."""


class UnsupportedGeometry(KvferryError):
    """A layer kind, rope or model class that is not run yet."""


class WrongPair(KvferryError):
    """A map, capture or cache that belongs to other models or another direction."""


class TokenizerMismatch(KvferryError):
    """Source and receiver number the same text differently."""


class CorruptFile(KvferryError):
    """A file that is truncated, damaged or not of the stated format."""


class HashMismatch(CorruptFile):
    """A file whose sha256 is not the one on record."""


class NotFinite(KvferryError):
    """NaN or infinity where a number was expected."""


class OutOfSpace(KvferryError):
    """Too little disk or memory for what was asked."""


class Unreachable(KvferryError):
    """Nothing could be downloaded from any source."""
