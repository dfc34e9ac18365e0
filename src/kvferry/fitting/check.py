"""Will a pair work, and what will it take: from configs and tokenizers, before anything heavy.

Owns the verdict and its reasons. Refuses nothing itself: what is not run is a reason in the report.
One call: ``check_pair(read_light(a), read_light(b), CaptureSettings())``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvferry.errors import BadInput
from kvferry.fitting import estimate
from kvferry.fitting.capture import CaptureSettings
from kvferry.fitting.check_costs import CaptureEstimate, MapRow, estimate_capture, map_rows
from kvferry.fitting.check_reasons import (
    Reason,
    length_reasons,
    memory_reasons,
    note,
    shared_layout,
    side_reasons,
    tokenizer_reasons,
)
from kvferry.fitting.estimate import Rates
from kvferry.models.alignment import compare_tokenizers
from kvferry.models.geometry import unsupported_reasons
from kvferry.models.light import LightModel
from kvferry.provenance import code_version

Verdict = Literal["ready", "ready with limits", "unsupported"]
_SHOWN = 5


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SideReport(_Row):
    """One model in brief; sizes are 0 where the config tells none."""

    spec: str
    model_type: str
    parameters: int
    layers: int
    geometry: list[str]
    max_positions: int
    vocab_size: int
    cache_bytes_per_token: int


class TokenizerReport(_Row):
    """How the two tokenizers compare; ``differing`` are (token, id in source, id in receiver)."""

    agree: bool
    common: int
    only_source: int
    only_receiver: int
    differing: list[tuple[str, int | None, int | None]]
    reason: str


class CheckReport(_Row):
    """The whole answer of ``kvferry check``."""

    format: Literal["kvferry-check-1"] = "kvferry-check-1"
    verdict: Verdict
    reasons: list[Reason]
    source: SideReport
    receiver: SideReport
    tokenizers: TokenizerReport
    settings: dict[str, Any]
    maps: list[MapRow]
    capture: CaptureEstimate | None
    code: dict[str, Any]


def check_pair(
    source: LightModel,
    receiver: LightModel,
    settings: CaptureSettings,
    *,
    device: str = "cpu",
    rates: Rates | None = None,
    free_bytes: int | None = None,
) -> CheckReport:
    """Compare two models and estimate what a map between them takes.

    Args:
        source: the model that reads.
        receiver: the model that answers.
        settings: as for the capture to come.
        device: where the models will run; bfloat16 off the CPU.
        rates: how fast that machine multiplies; ``None`` measures this CPU for a second.
        free_bytes: main memory that is free; ``None`` asks the system.

    Raises:
        BadInput: a device that is neither cpu nor cuda, or cuda without rates.
    """
    _require_device(device, rates)
    reasons: list[Reason] = []
    for side, model in (("source", source), ("receiver", receiver)):
        reasons += side_reasons(side, model)
    agreement = compare_tokenizers(source.tokenizer, receiver.tokenizer, show=1 << 20)
    reasons += tokenizer_reasons(agreement, source, receiver)
    layout, layout_reasons = shared_layout(source, receiver)
    reasons += layout_reasons
    maps: list[MapRow] = []
    capture = None
    ours, theirs = source.geometry, receiver.geometry
    if ours and theirs and not (unsupported_reasons(ours) or unsupported_reasons(theirs)):
        prefix = len(layout.prefix_ids) if layout else 0
        reasons += length_reasons(ours, theirs, settings, prefix)
        maps = map_rows(ours, theirs, settings)
        free = _free_bytes() if free_bytes is None else free_bytes
        on_device = _device_free_bytes(device)
        capture = estimate_capture(
            source, receiver, settings, prefix, rates or estimate.measure_rates(), device
        ).model_copy(update={"memory_free_bytes": free, "device_free_bytes": on_device})
        reasons += memory_reasons(capture, maps, settings, device)
    if source.path.resolve() == receiver.path.resolve():
        reasons.append(note("source and receiver are one model: the map is near the identity"))
    levels = {reason.level for reason in reasons}
    verdict: Verdict = "ready"
    if "unsupported" in levels:
        verdict = "unsupported"
    elif "limit" in levels:
        verdict = "ready with limits"
    return CheckReport(
        verdict=verdict,
        reasons=sorted(reasons, key=lambda r: ("unsupported", "limit", "note").index(r.level)),
        source=_side(source),
        receiver=_side(receiver),
        tokenizers=TokenizerReport(
            agree=agreement.agree,
            common=agreement.common,
            only_source=agreement.only_source,
            only_receiver=agreement.only_receiver,
            differing=list(agreement.differing[:_SHOWN]),
            reason=agreement.reason,
        ),
        settings={
            "tokens": settings.tokens,
            "chunk_tokens": settings.chunk_tokens,
            "k_max": settings.k_max,
            "probe_texts": settings.probe_texts,
            "memory_bytes": settings.memory_bytes,
            "both_directions": settings.both_directions,
            "device": device,
        },
        maps=maps,
        capture=capture,
        code=code_version(),
    )


def _side(model: LightModel) -> SideReport:
    shape = model.geometry
    return SideReport(
        spec=model.spec,
        model_type=shape.model_type if shape else "unknown",
        parameters=model.parameters,
        layers=shape.depth if shape else 0,
        geometry=shape.brief() if shape else [],
        max_positions=shape.max_positions if shape else 0,
        vocab_size=shape.vocab_size if shape else 0,
        cache_bytes_per_token=shape.bytes_per_token() if shape else 0,
    )


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _require_device(device: str, rates: Rates | None) -> None:
    if device != "cpu" and not device.startswith("cuda"):
        raise BadInput(
            expected="a device: cpu, cuda or cuda:N",
            got=repr(device),
            next_step="correct the name",
        )
    if device != "cpu" and rates is None:
        raise BadInput(
            expected="--rates beside --device cuda: this CPU's speed says nothing about a GPU",
            got="no rates",
            next_step="give what that machine reaches in GFLOP/s, models and float64, "
            "e.g. --rates 400000,1000",
        )


def _device_free_bytes(device: str) -> int | None:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(torch.device(device))[0])
