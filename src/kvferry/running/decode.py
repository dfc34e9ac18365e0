"""Generate and score from a given cache, through transformers' own ``generate``.

Owns batching several questions on one handed-over context, streaming, and log-likelihoods. The
cache given is never changed. Positions are explicit: a question's first token stands where the
cache ends, padded or not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from kvferry.errors import BadInput, NotFinite
from kvferry.models.cache import cache_argument, extend, fork
from kvferry.models.load import LoadedModel
from kvferry.running.timing import Spans, now

_SAMPLING = threading.Lock()


MIN_TEMPERATURE = 1e-3
"""Below it logits over temperature overflow; 0 is greedy."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: at most this many.
        temperature: 0 for greedy.
        top_p: nucleus mass, with temperature above 0.
        seed: of the sampling.
        min_new_tokens: at least this many (timing of fixed lengths).
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not 0.0 < self.top_p <= 1.0:
            raise BadInput(
                expected="at least one new token, and a top_p above 0 and up to 1",
                got=f"max_new_tokens {self.max_new_tokens}, top_p {self.top_p}",
                next_step="choose e.g. 64 tokens and top_p 1",
            )
        warm = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf
        if not (warm and 0 <= self.seed < 2**63):
            raise BadInput(
                expected=f"temperature 0, or a finite one of {MIN_TEMPERATURE} or more, and a "
                "seed from 0 to 2^63 - 1",
                got=f"temperature {self.temperature}, seed {self.seed}",
                next_step="choose e.g. temperature 0 for greedy, seed 0",
            )

    def arguments(self) -> dict[str, Any]:
        """Arguments for ``generate``; the model's own sampling defaults are switched off."""
        greedy = self.temperature == 0
        return {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens or None,
            "do_sample": not greedy,
            "temperature": None if greedy else self.temperature,
            "top_p": None if greedy else self.top_p,
            "top_k": None if greedy else 0,
            "repetition_penalty": 1.0,
        }


class _Clock(LogitsProcessor):
    """Notes when the first logits and each token came; stops when asked to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.logits_at: float | None = None
        self.tokens_at: list[float] = []
        self.cancelled = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.logits_at is None:
            if bool(torch.isnan(scores).any()):
                raise nan_logits()
            self.logits_at = now(self.device)
        return scores


class _TokenClock(StoppingCriteria):
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.clock.tokens_at.append(now(self.clock.device))
        stop = self.clock.cancelled
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)


@contextmanager
def _seeded(sampling: Sampling) -> Iterator[None]:
    """torch's generator is the process's own: sampled answers take turns, greedy ones need none."""
    if sampling.temperature <= 0:
        yield
        return
    with _SAMPLING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(sampling.seed)
        yield


def generate(
    loaded: LoadedModel,
    cache: DynamicCache,
    tails: list[Tensor],
    sampling: Sampling,
    spans: Spans,
    *,
    streamer: Any = None,
    clock: _Clock | None = None,
) -> list[Tensor]:
    """Answer several tails on one cache.

    Args:
        cache: layers of ``[1, H, T, D]``; left as it is.
        tails: per question ``[Q]`` int64.
        spans: gets ``tail``, ``first_token`` and ``decode``.

    Returns:
        per question the new token ids ``[n]`` int64, without what follows the end of turn.
    """
    held = cache.get_seq_length()
    width = max(int(tail.numel()) for tail in tails)
    pad = loaded.tokenizer.pad_token_id
    pad = pad if pad is not None else loaded.tokenizer.eos_token_id or 0
    ids = torch.full((len(tails), width), pad, dtype=torch.int64)
    mask = torch.ones((len(tails), held + width), dtype=torch.int64)
    for row, tail in enumerate(tails):
        gap = width - int(tail.numel())
        ids[row, gap:] = tail
        mask[row, held : held + gap] = 0
    clock = clock or _Clock(loaded.device)
    started = now(loaded.device)
    model: Any = loaded.model
    with _seeded(sampling):
        output = model.generate(
            input_ids=ids.to(loaded.device),
            attention_mask=mask.to(loaded.device),
            **{cache_argument(model): fork(model, cache, batch=len(tails))},
            logits_processor=LogitsProcessorList([clock]),
            stopping_criteria=StoppingCriteriaList([_TokenClock(clock)]),
            pad_token_id=pad,
            streamer=streamer,
            **sampling.arguments(),
        )
    if clock.logits_at is not None and clock.tokens_at:
        spans.add("tail", clock.logits_at - started)
        spans.add("first_token", clock.tokens_at[0] - clock.logits_at)
        spans.add("decode", clock.tokens_at[-1] - clock.tokens_at[0])
    ends = _end_ids(loaded)
    return [_until_end(row[width:].cpu(), ends) for row in output]


def stream(
    loaded: LoadedModel, cache: DynamicCache, tail: Tensor, sampling: Sampling, spans: Spans
) -> Iterator[str]:
    """The same answer piece by piece; closing the iterator stops the generation."""
    streamer: Any = TextIteratorStreamer(
        loaded.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=None
    )
    clock = _Clock(loaded.device)
    failure: list[BaseException] = []

    def work() -> None:
        try:
            generate(loaded, cache, [tail], sampling, spans, streamer=streamer, clock=clock)
        except BaseException as error:
            failure.append(error)
            streamer.end()

    thread = threading.Thread(target=work, name="kvferry-stream", daemon=True)
    thread.start()
    try:
        for piece in streamer:
            if piece:
                yield piece
    finally:
        clock.cancelled = True
        thread.join()
    if failure:
        raise failure[0]


def score(
    loaded: LoadedModel, cache: DynamicCache, tail: Tensor, continuations: list[Tensor]
) -> list[Tensor]:
    """Log-likelihoods of given continuations after one tail.

    Args:
        cache: layers of ``[1, H, T, D]``; left as it is.
        tail: ``[Q]`` int64.
        continuations: each ``[n]`` int64, n >= 1.

    Returns:
        per continuation the log-probability of each token, ``[n]`` float32.
    """
    model = loaded.model
    with torch.no_grad():
        logits, read = extend(model, cache, tail[None], logits=1)
        assert logits is not None
        first = logits[0, -1].float().log_softmax(-1)
        results = []
        longest = max(int(c.numel()) for c in continuations) - 1
        steps = None
        if longest:
            # One batch, padded behind: what stands behind a token can't change it.
            ids = torch.zeros((len(continuations), longest), dtype=torch.int64)
            for row, continuation in enumerate(continuations):
                ids[row, : continuation.numel() - 1] = continuation[:-1]
            steps, _ = extend(model, read, ids, logits=0)
        for row, continuation in enumerate(continuations):
            ids = continuation.to(loaded.device)
            parts = [first[ids[:1]]]
            if ids.numel() > 1:
                assert steps is not None
                found = steps[row, : ids.numel() - 1].float().log_softmax(-1)
                parts.append(found.gather(1, ids[1:, None])[:, 0])
            results.append(torch.cat(parts).cpu())
    if any(bool(torch.isnan(found).any()) for found in results):
        raise nan_logits()
    return results


def nan_logits() -> NotFinite:
    """The error for logits that are no numbers."""
    return NotFinite(
        expected="finite logits",
        got="NaN after the question",
        next_step="check the map and load the models in float32",
    )


def _end_ids(loaded: LoadedModel) -> set[int]:
    config = loaded.model.generation_config.eos_token_id
    ends = {config} if isinstance(config, int) else set(config or ())
    if loaded.tokenizer.eos_token_id is not None:
        ends.add(loaded.tokenizer.eos_token_id)
    return ends


def _until_end(ids: Tensor, ends: set[int]) -> Tensor:
    for place, token in enumerate(ids.tolist()):
        if token in ends:
            return ids[:place]
    return ids
