"""The loop that trains a corrector through the frozen receiver: resumable, judged while it runs.

The mapped cache is an input of the receiver, so a step is one short pass over the continuations
and back. What a step reads follows from seed and step number alone, so that a killed run resumes
to the same result. Every few steps the corrector is judged on held-out texts by accuracy, beside
the wrong document's; of those within a standard error of the best, the lowest loss is kept.
One call: ``tune(ferry, texts, held_out, settings, folder)``.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.errors import BadInput, CorruptFile, NotFinite, OutOfSpace, WrongPair
from kvferry.fitting.objectives import OBJECTIVES, Batch
from kvferry.maps.corrector import Corrector, CorrectorConfig, CorrectorShape
from kvferry.maps.linear import cache_features
from kvferry.provenance import (
    atomic_path,
    code_version,
    machine,
    sha256_text,
    sole_writer,
    sorted_json,
    write_json,
)
from kvferry.running.choices import Asked, answer_all, likeliest, match_attention, option_scores
from kvferry.running.handoff import Handoff
from kvferry.terminal import progress, say

Watch = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TuneText:
    """A context, what is asked about it, how often it is drawn beside others, and where from."""

    text_id: str
    body: Tensor
    asked: tuple[Asked, ...]
    weight: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class TuneSettings:
    """How a corrector is trained.

    Attributes:
        corrector: its kind, rank and placement.
        objectives: name -> weight, from ``OBJECTIVES``.
        steps: optimiser steps.
        batch: questions a step, all about one text.
        accumulate: texts whose gradients are added up before a step.
        learning_rate: of AdamW at its highest, after ``warmup`` steps; then a cosine to a tenth.
        clip: greatest gradient norm.
        seed: of the first factors and of what each step reads.
        judge_every: steps between judgements on held-out texts.
        patience: judgements without a better one before stopping; 0 never stops early.
        checkpoint_every: steps between checkpoints.
        curriculum: read short contexts first, all lengths from half of the steps on.
        warm_start: steps at the beginning that match attention outputs alone.
        match_layers: receiver layers whose attention outputs are matched; ``None`` for all.
    """

    corrector: CorrectorConfig = field(default_factory=CorrectorConfig)
    objectives: dict[str, float] = field(default_factory=lambda: {"answers": 1.0})
    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 1.5e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    judge_every: int = 50
    patience: int = 0
    checkpoint_every: int = 20
    curriculum: bool = False
    warm_start: int = 0
    match_layers: tuple[int, ...] | None = None

    def objectives_at(self, step: int) -> dict[str, float]:
        """What a step is trained for, name -> weight."""
        return {"attention": 1.0} if step < self.warm_start else self.objectives


def tune(
    ferry: Handoff,
    texts: Sequence[TuneText],
    held_out: Sequence[TuneText],
    settings: TuneSettings,
    folder: Path,
    *,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train a corrector beside the handoff's map; resumes what it finds in ``folder``.

    Args:
        watch: told each step's number and figures, for a logger.

    A corrector that the map has is where it starts. On return the handoff's map carries the best.

    Raises:
        BadInput: no texts, an unknown objective, texts that are held out and trained on.
        WrongPair: the folder holds a run with other settings or data.
        NotFinite: the loss is NaN.
    """
    _require_sound(texts, held_out, settings)
    require_layers(ferry, settings)
    for text in (*texts, *held_out):
        ferry.require_asked(int(text.body.numel()), text.asked)
    identity = _identity(ferry, texts, held_out, settings)
    with sole_writer(folder, "tuning"):
        return _Run(ferry, texts, held_out, settings, folder, identity, watch).go()


class _Run:
    """One training run and its folder."""

    def __init__(
        self,
        ferry: Handoff,
        texts: Sequence[TuneText],
        held_out: Sequence[TuneText],
        settings: TuneSettings,
        folder: Path,
        identity: str,
        watch: Watch | None,
    ) -> None:
        self.ferry, self.settings, self.folder = ferry, settings, folder
        self.watch = watch
        self.texts, self.held_out = list(texts), list(held_out)
        self.identity = identity
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.corrector = _made(settings.corrector, ferry.map.shape)
        self.start = ferry.map.corrector
        if self.start is not None:
            self.corrector.load_state_dict(self.start.state_dict())
        self.corrector.to(ferry.source.device)
        self.optimiser = torch.optim.AdamW(
            self.corrector.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self.step, self.log = 0, []  # type: int, list[dict[str, Any]]

    def go(self) -> dict[str, Any]:
        self._resume()
        settings = self.settings
        if self.step == 0 and self.start is None:
            rows = [cache_features(self._canonical(text)) for text in self.texts[:16]]
            features = [torch.cat(layer) for layer in zip(*rows, strict=True)]
            self.corrector.standardise(features, self.ferry.map.ridge(features))
        self.ferry.map.corrector = self.corrector
        if not self.log:
            self._judge()
        with progress("tune", total=settings.steps, unit="steps", done=float(self.step)) as advance:
            while self.step < settings.steps and not self._patience_spent():
                self._one_step()
                self.step += 1
                if self.step % settings.judge_every == 0 or self.step == settings.steps:
                    self._judge()
                if (
                    self.step % settings.checkpoint_every == 0
                    or self.step == settings.steps
                    or self._patience_spent()
                ):
                    self._save(self.folder / "checkpoint.safetensors")
                self._watch()
                advance(1, f"loss {self.last_loss:.2f}")
        best = self._load(self.folder / "best.safetensors")
        if best["identity"] != self.identity:
            raise self._damaged(self.folder / "best.safetensors", "that of another run")
        self.corrector.requires_grad_(False)  # trained; from here on it only serves
        summary = {
            "identity": self.identity,
            "settings": _plain(settings),
            "log": self.log,
            "best": kept(self.log),
            "parameters": self.corrector.parameter_count,
            "code": code_version(),
            "machine": machine(),
        }
        write_json(self.folder / "tune.json", summary)
        return summary

    def _watch(self) -> None:
        """Tell a watcher what the last step gave."""
        if self.watch is None:
            return
        values = {"loss": self.last_loss}
        if self.log[-1]["step"] == self.step:
            judged = ("correct", "wrong_document_correct", "held_out_loss")
            values |= {name: self.log[-1][name] for name in judged}
        self.watch(self.step, values)

    def _one_step(self) -> None:
        settings = self.settings
        generator = random.Random(f"{settings.seed} {self.step}")
        pool = self.texts
        if settings.curriculum and self.step < settings.steps // 2:
            pool = sorted(pool, key=lambda text: text.body.numel())
            share = 0.25 + 1.5 * self.step / settings.steps
            pool = pool[: max(int(len(pool) * share), 1)]
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * schedule(self.step, settings)
        self.optimiser.zero_grad(set_to_none=True)
        total = 0.0
        weights = [text.weight for text in pool]
        for text in generator.choices(pool, weights, k=settings.accumulate):
            asked = generator.sample(text.asked, min(settings.batch, len(text.asked)))
            loss = self._loss(text, asked) / settings.accumulate
            if not bool(torch.isfinite(loss)):
                raise NotFinite(
                    expected="a finite loss",
                    got=f"{loss.item()} at step {self.step + 1} on text {text.text_id}",
                    next_step="lower the learning rate, or load the models in float32",
                )
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.corrector.parameters(), settings.clip)
        self.optimiser.step()
        self.last_loss = total

    def _loss(self, text: TuneText, asked: list[Asked]) -> Tensor:
        rows = [one.continuation for one in asked]
        ferry = self.ferry
        weights = self.settings.objectives_at(self.step)
        objectives = {name: OBJECTIVES[name] for name in weights}
        cache = ferry.inject(ferry.map_cache(self._canonical(text)))
        student = receiver = source = None
        matched: tuple[tuple[Tensor, Tensor], ...] = ()
        if any(o.needs_student for o in objectives.values()):
            student = answer_all(ferry.receiver, cache, rows)
        if any(o.needs_attention for o in objectives.values()):
            matched = match_attention(
                ferry.receiver,
                ferry.read(ferry.receiver, text.body).cache,
                cache,
                rows,
                self.settings.match_layers,
            )
        with torch.no_grad():
            if any(o.needs_receiver for o in objectives.values()):
                native = ferry.read(ferry.receiver, text.body).cache
                receiver = answer_all(ferry.receiver, native, rows)
            if any(o.needs_source for o in objectives.values()):
                source = answer_all(ferry.source, ferry.read(ferry.source, text.body).cache, rows)
        targets = torch.cat([row.targets for row in rows]).to(ferry.receiver.device)
        batch = Batch(targets, student, receiver, source, matched)
        return torch.stack([w * objectives[name].loss(batch) for name, w in weights.items()]).sum()

    def _canonical(self, text: TuneText) -> Any:
        with torch.no_grad():
            reading = self.ferry.read(self.ferry.source, text.body)
            return self.ferry.canonical(reading.cache, text.body)

    def _judge(self) -> None:
        """Accuracy on held-out texts against the wrong document's; see ``kept``."""
        started = time.perf_counter()
        by_source = judge_each(self.ferry, self.held_out)
        found = together(by_source.values())
        row = {
            "step": self.step,
            "loss": round(self.last_loss, 5) if self.step else None,
            **found.figures(),
        }
        if len(by_source) > 1:
            row["by_source"] = {name: one.figures() for name, one in by_source.items()}
        self.log.append(row)
        if kept(self.log) is row:
            self._save(self.folder / "best.safetensors", optimiser=False)
        say(
            f"step {self.step}: held-out {found.correct}/{found.n}, wrong document "
            f"{found.wrong_document_correct}/{found.n}, held-out loss {found.loss:.3f}"
            + (f", loss {self.last_loss:.3f}" if self.step else "")
            + f" ({time.perf_counter() - started:.0f} s)"
        )

    def _patience_spent(self) -> bool:
        patience = self.settings.patience
        if not patience or len(self.log) <= patience:
            return False
        return kept(self.log) is kept(self.log[:-patience])

    last_loss = math.nan

    def _save(self, path: Path, *, optimiser: bool = True) -> None:
        tensors = {f"corrector.{k}": v for k, v in self.corrector.state_dict().items()}
        if optimiser:
            for index, state in self.optimiser.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value)
        entry = {
            "state": json.dumps(
                {
                    "identity": self.identity,
                    "step": self.step,
                    "log": self.log,
                    "loss": None if math.isnan(self.last_loss) else self.last_loss,
                },
                sort_keys=True,
            )
        }
        with atomic_path(path) as temporary:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary, entry
            )

    def _load(self, path: Path) -> dict[str, Any]:
        """Take up a file's state; one of another run is only looked at."""
        try:
            with safe_open(path, framework="pt") as stream:
                entry: dict[str, Any] = json.loads((stream.metadata() or {})["state"])
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            if entry["identity"] == self.identity:
                self._take(tensors)
        except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:
            raise self._damaged(path, f"{type(error).__name__}: {error}") from error
        return entry

    def _damaged(self, path: Path, got: str) -> CorruptFile:
        return CorruptFile(
            expected=f"what this tuning wrote to {path}",
            got=got,
            next_step=f"remove the folder {self.folder} and run again from the start",
        )

    def _take(self, tensors: dict[str, Tensor]) -> None:
        own = {k.removeprefix("corrector."): v for k, v in tensors.items() if k.startswith("corr")}
        self.corrector.load_state_dict(own)
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, index, key = name.split(".")
                states.setdefault(int(index), {})[key] = value
        if states:
            whole = self.optimiser.state_dict()
            self.optimiser.load_state_dict({**whole, "state": states})

    def _resume(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        entry = self._load(path)
        if entry["identity"] != self.identity:
            raise WrongPair(
                expected=f"an empty folder, or this run ({self.identity[:16]}) in {self.folder}",
                got=f"a run with another map, data or settings ({entry['identity'][:16]})",
                next_step="choose another --out, or remove that folder",
            )
        self.step, self.log = entry["step"], entry["log"]
        self.last_loss = math.nan if entry["loss"] is None else entry["loss"]
        say(f"going on from step {self.step}")


def _made(config: CorrectorConfig, shape: CorrectorShape) -> Corrector:
    try:
        return Corrector(config, shape)
    except (RuntimeError, TypeError) as error:  # torch's, for sizes beyond memory or 64 bits
        raise OutOfSpace(
            expected="memory for the corrector",
            got=f"rank {config.rank}: {str(error).partition(chr(10))[0][:120]}",
            next_step="choose a smaller --rank",
        ) from error


@dataclass(frozen=True)
class Judged:
    """How held-out questions were answered.

    Attributes:
        correct: right choices after the handoff.
        wrong_document_correct: after the wrong document's.
        n: asked.
        nats: cross-entropy of the right answers' tokens after the handoff, summed.
        tokens: of the right answers.
    """

    correct: int
    wrong_document_correct: int
    n: int
    nats: float
    tokens: int

    @property
    def margin(self) -> float:
        """What reading gave: the share of right choices above the wrong document's."""
        return (self.correct - self.wrong_document_correct) / self.n

    @property
    def loss(self) -> float:
        """Cross-entropy, nats a token."""
        return self.nats / self.tokens

    def figures(self) -> dict[str, Any]:
        """For a record."""
        return {
            "correct": self.correct,
            "wrong_document_correct": self.wrong_document_correct,
            "n": self.n,
            "margin": self.margin,
            "held_out_loss": round(self.loss, 5),
        }


def judge(ferry: Handoff, texts: Sequence[TuneText]) -> Judged:
    """Choices on held-out texts, after the handoff and after the wrong document's."""
    return together(judge_each(ferry, texts).values())


def judge_each(ferry: Handoff, texts: Sequence[TuneText]) -> dict[str, Judged]:
    """The same for each source of texts, by its name."""
    found: dict[str, list[Judged]] = {}
    with torch.no_grad():
        for place, text in enumerate(texts):
            found.setdefault(text.source, []).append(_judged(ferry, text, texts[place - 1]))
    return {name: together(each) for name, each in found.items()}


def together(each: Iterable[Judged]) -> Judged:
    """Sums of one judgement or more."""
    rows = list(each)
    return Judged(
        sum(row.correct for row in rows),
        sum(row.wrong_document_correct for row in rows),
        sum(row.n for row in rows),
        sum(row.nats for row in rows),
        sum(row.tokens for row in rows),
    )


def _judged(ferry: Handoff, text: TuneText, wrong: TuneText) -> Judged:
    hits = [0, 0]
    tokens, nats = 0, 0.0
    for which, read in enumerate((text, wrong)):
        held = ferry.hand_over_ids(read.body, arm="transfer")
        found = option_scores(held.loaded, held.cache, text.asked)
        for scores, one in zip(found, text.asked, strict=True):
            hits[which] += likeliest(scores) == one.right
            if which == 0:
                nats -= float(scores[one.right].sum())
                tokens += int(scores[one.right].numel())
    return Judged(hits[0], hits[1], len(text.asked), nats, tokens)


def kept(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The judgement whose corrector is kept: going through them in turn, a later one takes over
    if it has the lower loss, or if the kept one has fallen behind; only one whose margin over the
    wrong document is within one standard error of the best margin so far may be kept.

    The standard error is that of the best one's right choices, sqrt(p (1 - p) / n): a few
    questions more or fewer are noise, and the loss then tells more. Within one step's judgement
    nothing later is looked at, so that one file holds what is kept.
    """
    best = held = log[0]
    for row in log[1:]:
        best = max(best, row, key=lambda r: r["margin"])
        share = best["correct"] / best["n"]
        least = best["margin"] - math.sqrt(share * (1.0 - share) / best["n"])
        behind = held["margin"] < least
        if row["margin"] >= least and (behind or row["held_out_loss"] < held["held_out_loss"]):
            held = row
    return held


def schedule(step: int, settings: TuneSettings) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine to a tenth."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def _require_sound(
    texts: Sequence[TuneText], held_out: Sequence[TuneText], settings: TuneSettings
) -> None:
    if unknown := [name for name in settings.objectives if name not in OBJECTIVES]:
        raise BadInput(
            expected=f"objectives among {', '.join(OBJECTIVES)}",
            got=", ".join(unknown),
            next_step="choose from these; several can be weighted",
        )
    if not settings.objectives or min(settings.objectives.values()) <= 0:
        raise BadInput(
            expected="one objective or more, each with a weight above zero",
            got=str(settings.objectives),
            next_step="e.g. --objective answers=1",
        )
    _require_numbers(settings)
    if not texts or len(held_out) < 2:
        raise BadInput(
            expected="texts to train on and two or more held out (one is another's wrong document)",
            got=f"{len(texts)} and {len(held_out)}",
            next_step="give more texts",
        )
    trained = {tuple(text.body.tolist()) for text in texts}
    if twice := [t.text_id for t in held_out if tuple(t.body.tolist()) in trained]:
        raise BadInput(
            expected="held-out texts that are not trained on",
            got=f"{len(twice)} that are, such as {twice[0]}",
            next_step="split by text before tuning",
        )


def _require_numbers(settings: TuneSettings) -> None:
    for name, value in (("learning rate", settings.learning_rate), ("clip", settings.clip)):
        if not 0.0 < value < math.inf:
            raise BadInput(
                expected=f"a {name} above zero",
                got=str(value),
                next_step="with this nothing would be learned; a large --clip cuts off nothing",
            )
    if not -(2**63) <= settings.seed < 2**63:
        raise BadInput(
            expected="a seed of 64 bits", got=str(settings.seed), next_step="choose e.g. 0"
        )


def require_layers(ferry: Handoff, settings: TuneSettings) -> None:
    """Refuse layers that the receiver has not, and a corrector that is not the map's own.

    Raises:
        BadInput: see above.
    """
    depth = ferry.map.receiver_geometry.depth
    for what, layers in (
        ("match", settings.match_layers),
        ("correct", settings.corrector.layers),
    ):
        if beyond := [i for i in layers or () if not 0 <= i < depth]:
            raise BadInput(
                expected=f"layers to {what} from 0 to {depth - 1}",
                got=", ".join(map(str, beyond)),
                next_step="choose among the receiver's layers",
            )
    own = ferry.map.corrector
    if own is not None and own.config != settings.corrector:
        raise BadInput(
            expected=f"the settings of the map's own corrector: {own.config}",
            got=str(settings.corrector),
            next_step="go on with these, or tune the map it was tuned from",
        )


def _identity(
    ferry: Handoff,
    texts: Sequence[TuneText],
    held_out: Sequence[TuneText],
    settings: TuneSettings,
) -> str:
    """Hash of everything that decides the result."""
    data = [
        [text.text_id, text.weight, text.body.tolist(), [_plain_asked(o) for o in text.asked]]
        for text in (*texts, *held_out)
    ]
    named = [
        ferry.map.config.weights_sha256,
        *([] if ferry.map.corrector is None else [ferry.map.identity]),
        ferry.layout.identity,
        _plain(settings),
        data,
    ]
    if ferry.rounding:
        named.append(ferry.rounding)
    return sha256_text(sorted_json(named))


def _plain_asked(asked: Asked) -> list[Any]:
    scored = [] if asked.scored is None else [asked.scored.tolist()]
    return [asked.tail.tolist(), [x.tolist() for x in asked.options], asked.right, *scored]


def _plain(settings: TuneSettings) -> dict[str, Any]:
    return {**asdict(settings), "corrector": settings.corrector.model_dump(mode="json")}
