"""``kvferry demo``: real passages, a question each, all arms and controls, a table and a page."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.errors import BadInput
from kvferry.verbs.options import Device, Json

if TYPE_CHECKING:
    from kvferry.maps.cache_map import CacheMap
    from kvferry.report.demo_result import ArmRow, DemoResult, Direction
    from kvferry.running.handoff import Arm, Handoff

FORWARD, BACKWARD = "qwen-0.5b-to-1.5b", "qwen-1.5b-to-0.5b"
PAIR = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
ARM_ORDER: tuple[Arm, ...] = (
    "source_native",
    "transfer",
    "receiver_native",
    "no_context",
    "wrong_document",
)
CUE = "The answer is"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the record and the page.")] = Path(
        "runs/demo"
    ),
    passages: Annotated[int, typer.Option(help="How many passages.", min=2)] = 12,
    minutes: Annotated[
        float, typer.Option(help="Start no further passage after this long; n is shown.")
    ] = 7.0,
    refit: Annotated[
        Path | None,
        typer.Option(help="Fit the maps anew from this capture, or from these texts (slow)."),
    ] = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Pull the Qwen pair, let one model read real passages and the other answer, in both
    directions, beside both models' own reading and the controls."""
    from kvferry.models.load import load_model, locate
    from kvferry.provenance import write_json, write_text
    from kvferry.report.demo_page import demo_page
    from kvferry.terminal import print_json, say

    if out.exists() and not out.is_dir():
        raise BadInput(expected="--out FOLDER", got=f"a file, {out}", next_step="name a folder")
    for name in PAIR:
        locate(name)
    say("loading both models in " + ("float32" if device == "cpu" else "bfloat16"))
    small, large = (load_model(name, device=device) for name in PAIR)
    folders = {name: map_folder(name) for name in (FORWARD, BACKWARD)}
    if refit:
        folders = refitted(refit, out, small, large)
    ferries = make_ferries(folders, small, large)
    result = run(ferries, folders, passages, minutes)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "demo.json", result.model_dump())
    write_text(out / "demo.html", demo_page(result))
    if json:
        print_json(result.model_dump())
        return
    show(result)
    print(f"page:   {out / 'demo.html'}")
    print(f"record: {out / 'demo.json'}")


def map_folder(name: str) -> Path:
    """A map that ships in the package."""
    return Path(str(resources.files("kvferry").joinpath("shipped_maps", name)))


def make_ferries(folders: dict[str, Path], small: Any, large: Any) -> dict[str, Handoff]:
    """One handoff a direction; both share their native readings."""
    from kvferry.maps.cache_map import CacheMap
    from kvferry.running.handoff import Handoff
    from kvferry.running.readings import Readings

    readings = Readings(4)
    ferries = {}
    for name, folder in folders.items():
        cache_map = CacheMap.from_pretrained(folder)
        pair = (small, large) if name == FORWARD else (large, small)
        # On a GPU the models run in bfloat16, as the demo says; the shipped maps are of float32.
        ferries[name] = Handoff(*pair, cache_map, readings=readings, allow_other_precision=True)
    return ferries


def run(
    ferries: dict[str, Handoff], folders: dict[str, Path], count: int, minutes: float
) -> DemoResult:
    """Ask every passage's question of every arm and control, in both directions."""
    from kvferry.demo_data import passages
    from kvferry.provenance import code_version, machine
    from kvferry.report.demo_result import DemoResult
    from kvferry.running.decode import Sampling
    from kvferry.terminal import progress, say

    rows = passages()[:count]
    sampling = Sampling(max_new_tokens=8)
    items: dict[str, list[dict[str, Any]]] = {name: [] for name in ferries}
    # A wrong document is the passage before (the last for the first).
    known: dict[tuple[str, str], Any] = {}
    started = time.monotonic()
    caveats = []
    with progress("demo", total=len(rows) * len(ferries), unit="questions") as advance:
        for index, row in enumerate(rows):
            if time.monotonic() - started > 60 * minutes:
                caveats.append(f"Stopped after {index} of {len(rows)} passages: out of time.")
                say(caveats[-1])
                break
            other = rows[index - 1]
            for name, ferry in ferries.items():
                items[name].append(_item(ferry, row, other, sampling, known))
                advance(1)
    n = len(items[FORWARD])
    caveats += [
        f"n = {n} questions: enough to see that it runs, too few to rank arms that are close.",
        *(_about_the_map(name, ferry.map) for name, ferry in ferries.items()),
        f"Every arm goes on from the words {CUE!r}; free text is its first 8 tokens.",
        "A native reading is timed once and its time used for every arm that starts from it.",
    ]
    return DemoResult(
        title="One model reads, another answers",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        code=code_version(),
        machine=machine(),
        command=f"kvferry demo --passages {count}",
        directions=[_direction(name, ferries[name], folders[name], items[name]) for name in items],
        caveats=caveats,
    )


def _about_the_map(name: str, cache_map: CacheMap) -> str:
    """What a map was made from, in a line."""
    if cache_map.corrector is None:
        return f"{name} is ridge only, fitted on running text; it carries the gist and loses facts."
    data = ", ".join((cache_map.config.tuned or {}).get("data", {}))
    return f"{name} has a corrector beside its ridge, tuned on {data or 'data it does not name'}."


def _item(
    ferry: Handoff,
    row: dict[str, Any],
    other: dict[str, Any],
    sampling: Any,
    known: dict[tuple[str, str], Any],
) -> dict[str, Any]:
    """One question to every arm; ``known`` has what the other direction or passage gave already."""
    answers: dict[str, Any] = {}
    for arm in ARM_ORDER:
        native = ferry.source if arm == "source_native" else ferry.receiver
        key = (native.spec, row["id"])
        if arm in ("source_native", "receiver_native") and key in known:
            answers[arm] = known[key]  # the same model on the same text and question
            continue
        mapped = (ferry.map.identity, (other if arm == "wrong_document" else row)["id"])
        if arm == "wrong_document" and mapped in known:
            held = known[mapped]
        else:
            held = ferry.hand_over(row["passage"], arm=arm, other_context=other["passage"])
        asked = ferry.with_question(held, row["question"], cue=CUE)
        answer = ferry.answer(asked, [row["question"]], sampling=sampling, cue=CUE)[0]
        options = [f" {option}" for option in row["options"]]
        scores = ferry.score_options(asked, row["question"], options, cue=CUE)
        answers[arm] = {
            "chosen": scores.best,
            "text": answer.text,
            "text_correct": states(answer.text, row["accept"]),
            "ttft_ms": answer.ttft_ms,
            "parts": answer.timings,
            "tokens_per_s": answer.decode_tokens_per_s,
        }
        if arm in ("source_native", "receiver_native"):
            known[key] = answers[arm]
        elif arm == "transfer":
            known[mapped] = held
    return {"row": row, "answers": answers}


def states(text: str, accept: list[str]) -> bool:
    """Whether an answer has one of the accepted phrases in it, as whole words."""
    return any(
        re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) for phrase in accept
    )


def _direction(name: str, ferry: Handoff, folder: Path, items: list[dict[str, Any]]) -> Direction:
    from kvferry.report.demo_result import Direction, Item, ItemAnswer

    config = ferry.map.config
    return Direction(
        source=config.source.spec,
        receiver=config.receiver.spec,
        map_name=name,
        map_sha256=config.weights_sha256,
        k_key=config.k_key,
        k_value=config.k_value,
        map_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        rows=[_arm_row(arm, items) for arm in ARM_ORDER],
        items=[
            Item(
                id=item["row"]["id"],
                title=item["row"]["title"],
                context=item["row"]["passage"],
                question=item["row"]["question"],
                options=item["row"]["options"],
                answer=item["row"]["answer"],
                answers={
                    arm: ItemAnswer(
                        chosen=a["chosen"],
                        text=a["text"],
                        text_correct=a["text_correct"],
                        ttft_ms=a["ttft_ms"],
                    )
                    for arm, a in item["answers"].items()
                },
            )
            for item in items
        ],
        notes=[],
    )


def _arm_row(arm: str, items: list[dict[str, Any]]) -> ArmRow:
    from statistics import median

    from kvferry.report.demo_result import ArmRow
    from kvferry.running.timing import PARTS

    answers = [item["answers"][arm] for item in items]
    correct = sum(item["answers"][arm]["chosen"] == item["row"]["answer"] for item in items)
    rates = [a["tokens_per_s"] for a in answers if a["tokens_per_s"]]
    return ArmRow(
        arm=arm,
        is_control=arm in ("no_context", "wrong_document"),
        correct_choice=correct,
        correct_text=sum(a["text_correct"] for a in answers),
        n=len(items),
        ttft_ms_median=median(a["ttft_ms"] for a in answers),
        ttft_parts_ms={
            part: median(a["parts"][part] for a in answers)
            for part in PARTS
            if all(part in a["parts"] for a in answers)
        },
        decode_tokens_per_s=median(rates) if rates else None,
    )


def show(result: DemoResult) -> None:
    """The table at the end."""
    from kvferry.terminal import print_table

    for direction in result.directions:
        rows = [
            (
                row.arm,
                f"{row.correct_choice}/{row.n}",
                f"{row.correct_text}/{row.n}",
                "-" if row.ttft_ms_median is None else f"{row.ttft_ms_median:.0f}",
                "-" if row.decode_tokens_per_s is None else f"{row.decode_tokens_per_s:.1f}",
            )
            for row in direction.rows
        ]
        print_table(
            f"{direction.source} reads, {direction.receiver} answers",
            ("arm or control", "options", "free text", "TTFT ms", "tok/s"),
            rows,
        )
        print()
    for caveat in result.caveats:
        print(f"- {caveat}")


def refitted(source: Path, out: Path, small: Any, large: Any) -> dict[str, Path]:
    """Both maps fitted anew, with the shipped maps' own settings.

    Args:
        source: a finished capture, or texts to make one from (it is kept under ``out``).
    """
    from kvferry.fitting.build import build_map
    from kvferry.fitting.capture import CaptureSettings, capture
    from kvferry.fitting.corpus import read_corpus
    from kvferry.fitting.ridge import FitSettings, fit
    from kvferry.maps.cache_map import CacheMap

    folder = source
    if not (source / "identity.json").exists():
        folder = out / "capture"
        settings = CaptureSettings(tokens=64_000, both_directions=True)
        capture(small, large, read_corpus([str(source)]), settings, folder)
    folders = {}
    for name, direction in ((FORWARD, "forward"), (BACKWARD, "backward")):
        shipped = CacheMap.from_pretrained(map_folder(name)).config
        wanted = FitSettings(shipped.k_key, shipped.k_value, direction=direction)
        folders[name] = out / "maps" / name
        build_map(fit(folder, wanted), stored=shipped.stored).save_pretrained(folders[name])
    return folders
