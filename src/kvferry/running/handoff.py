"""The arms and controls: who reads, who answers, and what is handed over.

Owns the order of a receiver's cache: anchors (the constant prompt prefix, the receiver's own
KV, computed once), mapped body, tail (the question, and the context's last tokens if asked).
Refuses pairs a map was not fitted for and prompts beyond a model's limit. One call:
``Handoff.from_pretrained("maps/NAME")(context, question, arm="transfer")``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from kvferry.errors import BadInput, ContextTooLong, CorruptFile, WrongPair
from kvferry.maps.cache_map import CacheMap, MapSide
from kvferry.maps.linear import cache_features
from kvferry.models.alignment import require_ids_in_range, require_same_tokens
from kvferry.models.cache import (
    CanonicalCache,
    check_against,
    extend,
    forward,
    from_transformers,
    require_finite,
    rows_from,
    to_transformers,
)
from kvferry.models.geometry import Geometry, require_supported
from kvferry.models.load import LoadedModel, load_model, locate
from kvferry.models.precision import Precision
from kvferry.models.quantise import require_library
from kvferry.provenance import sha256_text
from kvferry.running import decode
from kvferry.running.choices import Asked
from kvferry.running.decode import Sampling
from kvferry.running.prompt import MIN_PREFIX_TOKENS, BoundLayout, PromptLayout
from kvferry.running.readings import Reading, Readings
from kvferry.running.timing import Spans, now, peak_memory_bytes

Arm = Literal["source_native", "transfer", "receiver_native", "no_context", "wrong_document"]
ARMS: tuple[Arm, ...] = ("source_native", "transfer", "receiver_native")
CONTROLS: tuple[Arm, ...] = ("no_context", "wrong_document")


@dataclass(frozen=True)
class Held:
    """A context that has been read and can be asked about, any number of times.

    Attributes:
        arm: how it came about.
        loaded: the model that answers.
        cache: that model's cache, anchors and body, layers of ``[1, H, T, D]``.
        rest: context tokens left for the answering model to read with the question, ``[n]``.
        spans: what it took so far.
        identity: names it: token ids, source revision, map, anchors, tail.
        lossy: mapped; never an answer to an exact-prefix lookup.
        asked: question and cue that are read already, all but the last token; the only ones that
            this can then be asked. ``None``: any.
    """

    arm: Arm
    loaded: LoadedModel
    cache: DynamicCache
    rest: Tensor
    spans: Spans
    identity: str
    lossy: bool
    asked: tuple[str, str | None] | None = None

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self.cache.get_seq_length())


@dataclass(frozen=True)
class Answer:
    """What an arm answered.

    Attributes:
        text: without special tokens.
        token_ids: as generated.
        arm: the arm.
        timings: milliseconds by part.
        ttft_ms: time to first token, from the start of reading.
        decode_tokens_per_s: after the first token; ``None`` with fewer than two tokens.
        peak_memory_bytes: of this process (CPU) or device.
        prompt_tokens: context and question, prefix included.
    """

    text: str
    token_ids: tuple[int, ...]
    arm: Arm
    timings: dict[str, float]
    ttft_ms: float
    decode_tokens_per_s: float | None
    peak_memory_bytes: int
    prompt_tokens: int


@dataclass(frozen=True)
class OptionScores:
    """Log-likelihoods of options.

    Attributes:
        total: summed over an option's tokens.
        per_token: mean over them.
        best: index with the highest mean.
    """

    total: tuple[float, ...]
    per_token: tuple[float, ...]
    best: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "best", max(range(len(self.per_token)), key=lambda i: self.per_token[i])
        )


def load_side(
    cache_map: CacheMap,
    side: Literal["source", "receiver"],
    given: str | None,
    *,
    device: str,
    precision: Precision | None = None,
) -> LoadedModel:
    """One of a map's two models.

    Args:
        given: where it lies; ``None`` for the name in the map.
        precision: of weights and cache; what it leaves open is the map's.

    Raises:
        BadInput: the name in the map is not one that can be loaded here.
    """
    config = cache_map.config.source if side == "source" else cache_map.config.receiver
    made_for = Precision(config.precision.weights, config.cache)
    asked = (precision or Precision()).or_else(made_for)
    require_library(asked.weights)
    if given is None:
        try:
            locate(config.spec)
        except BadInput as error:
            raise BadInput(
                expected=f"the map's {side}, {config.spec!r}: {error.expected}",
                got=error.got,
                next_step=f"say where it lies: --{side} FOLDER (in Python {side}=...)",
            ) from error
    return load_model(
        given or config.spec, precision=asked.weights, cache=asked.cache, device=device
    )


class Handoff:
    """A source, a receiver and the map between them."""

    def __init__(
        self,
        source: LoadedModel,
        receiver: LoadedModel,
        cache_map: CacheMap,
        *,
        layout: PromptLayout | None = None,
        anchors: bool = True,
        tail_tokens: int = 0,
        allow_other_revision: bool = False,
        allow_other_precision: bool = False,
        readings: Readings | None = None,
    ) -> None:
        """Check that the three belong together.

        Args:
            layout: ``None`` takes the map's.
            anchors: ``False`` maps the prefix as well; for comparison, it does harm.
            tail_tokens: last context tokens that the receiver reads itself.
            allow_other_revision: use the map on models it was not fitted for.
            allow_other_precision: use it on models served in another precision of weights or cache.
            readings: keeps native readings with the time they took, so that arms and handoffs
                share them.

        Raises:
            WrongPair, TokenizerMismatch, UnsupportedGeometry, BadInput: see ``errors.py``.
        """
        self.source, self.receiver = source, receiver
        self.map = cache_map.to(source.device)
        self.anchors, self.tail_tokens = anchors, tail_tokens
        if tail_tokens < 0:
            raise BadInput(
                expected="a tail of zero or more context tokens",
                got=str(tail_tokens),
                next_step="choose e.g. 0 or 16",
            )
        self.geometries = {
            id(loaded): Geometry.from_config(loaded.model.config) for loaded in (source, receiver)
        }
        for loaded in (source, receiver):
            require_supported(self.geometries[id(loaded)], loaded.spec)
        require_same_tokens(source.tokenizer, receiver.tokenizer)
        cache_map.require_pair(
            source.revision, receiver.revision, allow_other_revision=allow_other_revision
        )
        cache_map.require_precision(
            source.precision, receiver.precision, allow_other_precision=allow_other_precision
        )
        for loaded, side in (
            (source, cache_map.config.source),
            (receiver, cache_map.config.receiver),
        ):
            wanted, found = Geometry.from_dict(side.geometry), self.geometries[id(loaded)]
            if wanted.layers != found.layers:
                raise WrongPair(
                    expected=f"{wanted.depth} layers as in {side.spec}: {wanted.brief()}",
                    got=f"{found.depth} layers in {loaded.spec}: {found.brief()}",
                    next_step="use the models named in the map's card",
                )
        fitted = PromptLayout.from_dict(cache_map.config.layout).bind(receiver.tokenizer)
        if not allow_other_revision and fitted.identity != cache_map.config.layout_identity:
            raise CorruptFile(
                expected=f"the prompt layout {cache_map.config.layout_identity[:16]} in the map",
                got=f"another one, {fitted.identity[:16]}",
                next_step="restore the map's map.json; it was changed after the fit",
            )
        self.layout: BoundLayout = layout.bind(receiver.tokenizer) if layout else fitted
        if layout is not None and self.layout.prefix_ids != fitted.prefix_ids:
            self.layout.require_same(cache_map.config.layout_identity, "the map")
        if len(self.layout.prefix_ids) < MIN_PREFIX_TOKENS:
            raise BadInput(
                expected=f"at least {MIN_PREFIX_TOKENS} anchors",
                got=str(len(self.layout.prefix_ids)),
                next_step="give the layout a longer instruction",
            )
        self._readings = readings or Readings(0)
        self._prefix_caches: dict[int, DynamicCache] = {}
        self._unanchored: Handoff | None = None

    def without_anchors(self) -> Handoff:
        """The same pair and map with the prefix mapped as well, for comparison."""
        if self._unanchored is None:
            twin = copy.copy(self)
            twin.anchors, twin._unanchored = False, twin
            self._unanchored = twin
        return self._unanchored

    @property
    def rounding(self) -> dict[str, dict[str, str]]:
        """What records say of the pair's precision; nothing where both are plain float32."""
        pair = {"source": self.source.precision, "receiver": self.receiver.precision}
        if all(each.plain for each in pair.values()):
            return {}
        return {"precision": {name: str(each) for name, each in pair.items()}}

    def served_sides(self) -> dict[str, MapSide]:
        """The map's two sides with the precisions that the models have here."""
        sides = {}
        for name, loaded in (("source", self.source), ("receiver", self.receiver)):
            side: MapSide = getattr(self.map.config, name)
            if side.precision != loaded.precision:
                dtype = str(loaded.dtype).removeprefix("torch.")
                found = {"dtype": dtype, "weights": loaded.weights, "cache": loaded.cache}
                sides[name] = side.model_copy(update=found)
        return sides

    @classmethod
    def from_pretrained(
        cls,
        map_source: str | Path,
        *,
        source: str | None = None,
        receiver: str | None = None,
        source_precision: Precision | None = None,
        receiver_precision: Precision | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> Handoff:
        """Load a map and both its models, checking hashes.

        Args:
            map_source: folder or hub repository of the map.
            source: where the source lies, if not by the name in the map.
            receiver: where the receiver lies, likewise.
            source_precision: of weights and cache; what it leaves open is the map's.
            receiver_precision: likewise.
            options: as for ``Handoff``.
        """
        return cls.from_map(
            CacheMap.from_pretrained(map_source),
            source=source,
            receiver=receiver,
            source_precision=source_precision,
            receiver_precision=receiver_precision,
            device=device,
            **options,
        )

    @classmethod
    def from_map(
        cls,
        cache_map: CacheMap,
        *,
        source: str | None = None,
        receiver: str | None = None,
        source_precision: Precision | None = None,
        receiver_precision: Precision | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> Handoff:
        """The same for a map that is loaded already."""
        return cls(
            load_side(cache_map, "source", source, device=device, precision=source_precision),
            load_side(cache_map, "receiver", receiver, device=device, precision=receiver_precision),
            cache_map,
            **options,
        )

    def __call__(
        self,
        context: str,
        question: str,
        *,
        arm: Arm = "transfer",
        sampling: Sampling | None = None,
        other_context: str | None = None,
        cue: str | None = None,
    ) -> Answer:
        """Read a context and answer a question about it."""
        self.layout.tail(question)  # an empty question is refused before the long reading
        held = self.hand_over(context, arm=arm, other_context=other_context)
        return self.answer(held, [question], sampling=sampling, cue=cue)[0]

    def hand_over(
        self, context: str, *, arm: Arm = "transfer", other_context: str | None = None
    ) -> Held:
        """Let the arm's model read a context and put it before the one that answers.

        Args:
            context: the text.
            other_context: what the ``wrong_document`` control reads in its place.

        Raises:
            BadInput: an empty context, an unknown arm, no other document for that control.
            ContextTooLong: beyond a model's limit; both numbers are given.
        """
        if arm == "wrong_document":
            if other_context is None:
                raise BadInput(
                    expected="another document for the wrong_document control",
                    got="none",
                    next_step="give other_context (on the command line --other-context FILE)",
                )
            context = other_context
        body = (
            torch.empty(0, dtype=torch.int64)
            if arm == "no_context"
            else (self.layout.context(context))
        )
        return self.hand_over_ids(body, arm=arm)

    def hand_over_ids(self, body: Tensor, *, arm: Arm) -> Held:
        """The same from the context's token ids, ``[T]`` int64."""
        if arm not in ARMS + CONTROLS:
            raise BadInput(
                expected=f"an arm among {', '.join(ARMS + CONTROLS)}",
                got=repr(arm),
                next_step="choose one of them",
            )
        if arm == "no_context":
            body = body[:0]
        answering = self.source if arm == "source_native" else self.receiver
        reading = (
            self.source if arm in ("source_native", "transfer", "wrong_document") else self.receiver
        )
        self._require_room(reading, int(body.numel()), 1)
        self._require_room(answering, int(body.numel()), 1)
        if arm in ("transfer", "wrong_document"):
            return self._transfer(body, arm)
        spans = Spans(answering.device)
        prefix = self.prefix_cache(answering)
        cache = prefix
        if body.numel():
            native = self.read(answering, body)
            cache = native.cache
            spans.add("prefill", native.seconds)
        empty = torch.empty(0, dtype=torch.int64)
        return Held(arm, answering, cache, empty, spans, self._identity(body, answering), False)

    def prefix_cache(self, loaded: LoadedModel) -> DynamicCache:
        """The constant prefix as a model reads it itself: the anchors; computed once."""
        if id(loaded) not in self._prefix_caches:
            ids = self.layout.prefix().to(loaded.device)
            self._require_in_range(loaded, ids)
            with torch.no_grad():
                positions = torch.arange(ids.numel(), device=loaded.device)
                _, cache = forward(loaded.model, ids[None], positions[None], kind=loaded.cache)
            self._prefix_caches[id(loaded)] = cache
        return self._prefix_caches[id(loaded)]

    def map_cache(self, cache: CanonicalCache) -> CanonicalCache:
        """Map a source's canonical cache to the receiver's, at the same positions.

        Differentiable in the map. Token ids are one to one here, so positions carry over.
        """
        moved = cache.to(dtype=torch.float32)
        return self.map.apply(moved, positions=cache.positions)

    def inject(self, mapped: CanonicalCache) -> DynamicCache:
        """Anchors and mapped body as the receiver's own cache. Differentiable."""
        check_against(mapped, self.map.receiver_geometry, self.receiver.spec)
        moved = mapped.to(dtype=self.receiver.dtype)
        before = self.prefix_cache(self.receiver) if self.anchors else None
        return to_transformers(self.receiver.model, moved, before=before, kind=self.receiver.cache)

    def answer(
        self,
        held: Held,
        questions: Sequence[str],
        *,
        sampling: Sampling | None = None,
        cue: str | None = None,
    ) -> list[Answer]:
        """Answer several questions on one held context, as one batch.

        Timings of a batch are those of the whole batch.
        """
        sampling = sampling or Sampling()
        if not questions:
            raise BadInput(
                expected="at least one question", got="none", next_step="give a question"
            )
        tails = [self._tail(held, q, cue) for q in questions]
        longest = max(int(t.numel()) for t in tails)
        self._require_room(
            held.loaded,
            held.length - len(self.layout.prefix_ids),
            longest + sampling.max_new_tokens,
        )
        spans = held.spans.copy()
        ids = decode.generate(held.loaded, held.cache, tails, sampling, spans)
        return [
            self._answer(held, tail, tokens, spans, len(questions))
            for tail, tokens in zip(tails, ids, strict=True)
        ]

    def with_question(self, held: Held, question: str, *, cue: str | None = None) -> Held:
        """Read a question on a held context, so that answering and scoring share that reading.

        Returns:
            the context with the question behind it, all but its last token; ``held`` stays as it
            was.
        """
        tail = self._tail(held, question, cue)
        self._require_room(
            held.loaded, held.length - len(self.layout.prefix_ids), int(tail.numel())
        )
        spans, model = held.spans.copy(), held.loaded.model
        cache, ids = held.cache, tail[:-1]
        if ids.numel():
            with spans.measure("tail"), torch.no_grad():
                _, cache = extend(model, cache, ids[None])
        identity = sha256_text(f"{held.identity} {tail[:-1].tolist()}")
        return replace(
            held,
            cache=cache,
            rest=tail[-1:],
            spans=spans,
            identity=identity,
            asked=(question, cue),
        )

    def stream(
        self, held: Held, question: str, *, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """Answer one question piece by piece."""
        sampling = sampling or Sampling()
        tail = self._tail(held, question, None)
        self._require_room(
            held.loaded,
            held.length - len(self.layout.prefix_ids),
            int(tail.numel()) + sampling.max_new_tokens,
        )
        return decode.stream(held.loaded, held.cache, tail, sampling, held.spans.copy())

    def score_options(
        self, held: Held, question: str, options: Sequence[str], *, cue: str | None = None
    ) -> OptionScores:
        """Log-likelihood of each option as the answer.

        Raises:
            BadInput: fewer than two options, or an empty one.
        """
        if len(options) < 2 or not all(option.strip() for option in options):
            raise BadInput(
                expected="two or more options with text",
                got=str(list(options)),
                next_step="give the answers to choose from",
            )
        tail = self._tail(held, question, cue)
        ids = [self.layout.continuation(option) for option in options]
        self._require_in_range(held.loaded, torch.cat(ids))
        self._require_room(
            held.loaded,
            held.length - len(self.layout.prefix_ids),
            int(tail.numel()) + max(int(option.numel()) for option in ids),
        )
        scores = decode.score(held.loaded, held.cache, tail, ids)
        return OptionScores(
            tuple(float(s.sum()) for s in scores), tuple(float(s.mean()) for s in scores)
        )

    def _tail(self, held: Held, question: str, cue: str | None) -> Tensor:
        """What the answering model reads itself: the context's last tokens, question, cue."""
        if held.asked is not None:
            if held.asked != (question, cue):
                raise BadInput(
                    expected=f"the question that was read on this context: {held.asked[0]!r}",
                    got=repr(question),
                    next_step="ask on what hand_over() gave, or read this question with it",
                )
            return held.rest
        tail = torch.cat((held.rest, self.layout.tail(question, cue=cue)))
        self._require_in_range(held.loaded, tail)
        return tail

    def _require_in_range(self, loaded: LoadedModel, ids: Tensor) -> None:
        require_ids_in_range(ids, self.geometries[id(loaded)].vocab_size, loaded.spec)

    def _transfer(self, body: Tensor, arm: Arm) -> Held:
        spans = Spans(self.receiver.device)
        keep = max(int(body.numel()) - self.tail_tokens, 0)
        rest = body[keep:]
        if not keep:
            cache = self.prefix_cache(self.receiver)
            return Held(
                arm, self.receiver, cache, rest, spans, self._identity(body, self.receiver), False
            )
        self.prefix_cache(self.receiver)
        reading = self.read(self.source, body[:keep])
        spans.add("source_prefill", reading.seconds)
        with spans.measure("map"):
            read = self.canonical(reading.cache, body[:keep]).to(dtype=torch.float32)
            features = cache_features(read)
            values = self.map.ridge(features)
        if self.map.corrector is not None:
            with spans.measure("correct"):
                values = self.map.correct(features, values)
        with spans.measure("inject"):
            mapped = self.map.shaped(read, values, read.positions)
            mapped = mapped.to(device=self.receiver.device)
            require_finite(mapped, "the mapped cache")
            cache = self.inject(mapped)
        return Held(
            arm,
            self.receiver,
            cache,
            rest,
            spans,
            self._identity(
                body, self.source, f"{self.map.identity} {self.anchors} {int(rest.numel())}"
            ),
            True,
        )

    def canonical(self, cache: DynamicCache, body: Tensor) -> CanonicalCache:
        """What the map takes of a source's cache: the body, and the prefix without anchors."""
        start = len(self.layout.prefix_ids) if self.anchors else 0
        ids = torch.cat((self.layout.prefix(), body)).to(self.source.device)
        positions = torch.arange(ids.numel(), device=self.source.device)
        return from_transformers(
            self.source.model,
            rows_from(self.source.model, cache, start),
            positions[start:],
            ids[start:],
            self.source.revision,
        )

    def read(self, loaded: LoadedModel, body: Tensor) -> Reading:
        """What a model holds after reading the prefix and ``body`` (``[T]`` int64) itself."""
        if (known := self._readings.get(loaded, self.layout, body)) is not None:
            return known
        self._require_in_range(loaded, body)
        before = self.prefix_cache(loaded)
        started = now(loaded.device)
        with torch.no_grad():
            _, cache = extend(loaded.model, before, body[None])
        reading = Reading(cache, now(loaded.device) - started)
        self._readings.put(loaded, self.layout, body, reading)
        return reading

    def require_room(self, context_tokens: int, more_tokens: int) -> None:
        """Refuse what is beyond either model's limit, before any work.

        Args:
            context_tokens: of the context, without the prefix.
            more_tokens: read or generated after it.

        Raises:
            ContextTooLong: with both numbers.
        """
        for loaded in (self.source, self.receiver):
            self._require_room(loaded, context_tokens, more_tokens)

    def require_asked(self, context_tokens: int, asked: Sequence[Asked]) -> None:
        """Refuse questions about a context that are beyond a model's limit or numbering.

        Args:
            context_tokens: of the context, without the prefix.
            asked: each read behind it with the longest of its options.

        Raises:
            ContextTooLong: with both numbers.
        """
        for one in asked:
            longest = max(int(option.numel()) for option in one.options)
            self.require_room(context_tokens, int(one.tail.numel()) + longest)
            for loaded in (self.source, self.receiver):
                self._require_in_range(loaded, torch.cat((one.tail, *one.options)))

    def _require_room(self, loaded: LoadedModel, body_tokens: int, more_tokens: int) -> None:
        limit = self.geometries[id(loaded)].max_positions
        need = len(self.layout.prefix_ids) + body_tokens + more_tokens
        if limit and need > limit:
            raise ContextTooLong(
                expected=f"at most {limit} tokens in all, the limit of {loaded.spec}",
                got=f"{need} (prefix {len(self.layout.prefix_ids)}, context {body_tokens}, "
                f"question and answer {more_tokens})",
                next_step="shorten the context; nothing is cut off silently",
            )

    def _identity(self, body: Tensor, reader: LoadedModel, map_identity: str = "") -> str:
        ids = ",".join(map(str, (*self.layout.prefix_ids, *body.tolist())))
        rounding = [str(self.rounding)] if self.rounding else []
        return sha256_text("\x00".join((ids, reader.revision, map_identity, *rounding)))

    def _answer(self, held: Held, tail: Tensor, tokens: Tensor, spans: Spans, batch: int) -> Answer:
        decode_ms = spans.ms.get("decode", 0.0)
        steps = int(tokens.numel()) - 1
        return Answer(
            text=str(held.loaded.tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
            token_ids=tuple(tokens.tolist()),
            arm=held.arm,
            timings=dict(spans.ms),
            ttft_ms=spans.ttft_ms,
            decode_tokens_per_s=(
                1000.0 * steps / decode_ms if steps > 0 and decode_ms > 0 and batch == 1 else None
            ),
            peak_memory_bytes=peak_memory_bytes(held.loaded.device),
            prompt_tokens=held.length + int(tail.numel()),
        )
