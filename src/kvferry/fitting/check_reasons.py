"""Why a pair is ready, ready with limits, or unsupported; one function a question.

Owns the wording of every reason that ``kvferry check`` gives. Only ``unsupported`` and ``limit``
move the verdict. One call: ``side_reasons("source", model)``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from kvferry.fitting import estimate
from kvferry.fitting.capture import CaptureSettings
from kvferry.fitting.check_costs import CaptureEstimate, MapRow
from kvferry.models.alignment import TokenizerAgreement
from kvferry.models.geometry import Geometry, unsupported_reasons
from kvferry.models.light import LightModel
from kvferry.running.prompt import BoundLayout, PromptLayout

MAP_BUDGET_BYTES = 20_000_000
"""A map that is small beside its models; above it in every form, the report says so."""


class Reason(BaseModel):
    """One reason; only ``unsupported`` and ``limit`` move the verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    level: Literal["unsupported", "limit", "note"]
    text: str


def unsupported(text: str) -> Reason:
    """What this release doesn't run."""
    return Reason(level="unsupported", text=text)


def limit(text: str) -> Reason:
    """What runs, but less than asked for."""
    return Reason(level="limit", text=text)


def note(text: str) -> Reason:
    """Worth knowing; doesn't move the verdict."""
    return Reason(level="note", text=text)


def side_reasons(side: str, model: LightModel) -> list[Reason]:
    """Geometry, class, quantised weights and notes of one model."""
    found = []
    if model.geometry is not None:
        found = [unsupported(f"{side}: {text}") for text in unsupported_reasons(model.geometry)]
    if model.refusal is not None and not found:
        found.append(unsupported(f"{side}: {model.refusal}"))
    if model.quantised is not None:
        found.append(
            limit(
                f"{side}: weights quantised with {model.quantised}; loading needs that library, "
                "and the map belongs to these weights alone"
            )
        )
    return found + [note(f"{side}: {text}") for text in model.notes]


def tokenizer_reasons(
    agreement: TokenizerAgreement, source: LightModel, receiver: LightModel
) -> list[Reason]:
    """Whether ids mean the same on both sides, and have an embedding."""
    if not agreement.agree:
        shown = "; ".join(f"{t!r} {a} / {b}" for t, a, b in agreement.differing[:3])
        return [
            unsupported(
                f"the tokenizers disagree: {agreement.reason}; {agreement.common} entries in "
                f"common, {len(agreement.differing)} not ({shown}). Choose a pair of one family"
            )
        ]
    found = []
    added = {*source.tokenizer.get_added_vocab(), *receiver.tokenizer.get_added_vocab()}
    plain = [t for t, _, _ in agreement.differing if t not in added]
    if plain:
        found.append(
            limit(
                f"{len(plain)} ordinary entries have other ids, e.g. {plain[0]!r}: texts with "
                "them are read differently by the two models"
            )
        )
    elif agreement.differing:
        found.append(note(f"{len(agreement.differing)} special tokens have other ids"))
    sizes = [m.geometry.vocab_size for m in (source, receiver) if m.geometry]
    used = max(max(m.tokenizer.get_vocab().values()) for m in (source, receiver))
    if sizes and used >= min(sizes):
        found.append(
            limit(
                f"ids {min(sizes)} to {used} have no embedding in one model; texts with them fail"
            )
        )
    elif len(set(sizes)) > 1:
        found.append(note(f"embeddings are padded differently ({sizes[0]} and {sizes[1]} rows)"))
    return found


def shared_layout(
    source: LightModel, receiver: LightModel
) -> tuple[BoundLayout | None, list[Reason]]:
    """The prompt both read (the receiver's), and whether the source's own differs."""
    try:
        bound = PromptLayout().bind(receiver.tokenizer)
    except Exception as error:  # a chat template may raise anything at all
        got = " ".join(str(error).split())[:200]
        return None, [unsupported(f"the receiver's chat template can't hold the prompt: {got}")]
    found = []
    if not getattr(receiver.tokenizer, "chat_template", None):
        found.append(note("the receiver has no chat template: prompts are plain text"))
    try:
        same = PromptLayout().bind(source.tokenizer).identity == bound.identity
    except Exception:  # as above; such a template is another one
        same = False
    if not same:
        found.append(
            limit(
                "the chat templates differ: both models read the receiver's, which the source "
                "was not tuned on"
            )
        )
    return bound, found


def length_reasons(
    ours: Geometry, theirs: Geometry, settings: CaptureSettings, prefix: int
) -> list[Reason]:
    """The longest prompt, and whether the capture's texts fit into it.

    Args:
        prefix: tokens of the constant prefix.
    """
    lengths = [g.max_positions for g in (ours, theirs)]
    if not all(lengths):
        return [note("a config doesn't say how long a prompt may be")]
    found = []
    if lengths[0] != lengths[1]:
        found.append(
            limit(
                f"prompts up to {min(lengths)} tokens, the smaller of {lengths[0]} (source) and "
                f"{lengths[1]} (receiver)"
            )
        )
    if settings.chunk_tokens + prefix > min(lengths):
        found.append(
            limit(
                f"texts of {settings.chunk_tokens} tokens after a prefix of {prefix} don't fit "
                f"in {min(lengths)}: capture with --chunk-tokens {max(min(lengths) - prefix, 0)}"
            )
        )
    return found


def memory_reasons(
    need: CaptureEstimate, maps: list[MapRow], settings: CaptureSettings, device: str
) -> list[Reason]:
    """What doesn't fit: ``--memory``, the machine, the device, a small map."""
    found = []
    asked = min(settings.k_max, len(maps))
    memory = f"--memory {_gb(settings.memory_bytes)}"
    if not maps[need.k - 1].fits_memory:
        found.append(
            limit(
                f"{memory} may not hold even k = 1: raise it to "
                f"{_gb(maps[0].moments_bytes)} to be sure"
            )
        )
    elif need.k < asked:
        found.append(
            limit(
                f"{memory} is sure to hold k up to {need.k} of {asked}; capture chooses the "
                f"layers first and shortens its lists to fit "
                f"(k = {asked} takes {_gb(maps[asked - 1].moments_bytes)} at most)"
            )
        )
    found += _machine_reasons(need, maps, need.models_bytes if device == "cpu" else 0)
    if device != "cpu":
        if need.device_free_bytes is None:
            found.append(limit("no CUDA device here: the estimate is for another machine"))
        elif need.models_bytes > need.device_free_bytes:
            found.append(
                limit(
                    f"the models take {_gb(need.models_bytes)} in bfloat16, "
                    f"{_gb(need.device_free_bytes)} is free on {device}"
                )
            )
    small = estimate.largest_k(MAP_BUDGET_BYTES, len(maps), lambda k: maps[k - 1].int8_bytes)
    if small == 0:
        found.append(
            limit(
                f"no map of this pair is below {MAP_BUDGET_BYTES // 1_000_000} MB: "
                f"k = 1 in int8 takes {maps[0].int8_bytes / 1e6:.0f} MB"
            )
        )
    elif small < asked:
        found.append(
            note(
                f"maps below {MAP_BUDGET_BYTES // 1_000_000} MB: int8 (fit --stored int8) "
                f"up to k = {small}"
            )
        )
    return found


def _machine_reasons(need: CaptureEstimate, maps: list[MapRow], models: int) -> list[Reason]:
    """Main memory: models (where they run there), then the choice of layers, then the moments."""
    free = need.memory_free_bytes
    if models + need.peak_bytes <= free:
        return []
    if models > free:
        advice = f"the models alone take {_gb(models)}; free memory or use smaller ones"
    elif models + need.probe_bytes > free:
        advice = (
            f"choosing layers alone takes {_gb(models + need.probe_bytes)}; free memory or lower "
            "--chunk-tokens"
        )
    else:
        room = free - models - (need.peak_bytes - need.moments_bytes)
        k = estimate.largest_k(room, need.k, lambda k: maps[k - 1].moments_bytes)
        advice = "not even k = 1 fits; free memory or use another pair"
        if k:
            advice = f"--k-max {k} fits, and so does --memory {room // 1_000_000}MB"
    return [
        limit(
            f"capture may take {_gb(models + need.peak_bytes)} of memory (k = {need.k}), "
            f"{_gb(free)} is free now: {advice}"
        )
    ]


def _gb(size_bytes: int) -> str:
    return f"{max(size_bytes, 0) / 1e9:.1f} GB"
