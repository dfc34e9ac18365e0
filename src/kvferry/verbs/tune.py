"""``kvferry tune``: a corrector beside a map, trained through the frozen receiver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.errors import BadInput
from kvferry.models.precision import Precision
from kvferry.verbs.options import (
    AllowOtherPrecision,
    Device,
    Json,
    ReceiverAt,
    ReceiverCache,
    ReceiverPrecision,
    SourceAt,
    SourceCache,
    SourcePrecision,
)

if TYPE_CHECKING:
    from kvferry.fitting.tune_data import TuneData
    from kvferry.maps.cache_map import CacheMap
    from kvferry.running.handoff import Handoff


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("tune")(tune)


def tune(
    context: typer.Context,
    map: Annotated[Path, typer.Argument(help="Map folder.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="SPEC",
            help="facts:TEXTS[:SEED], recite:TEXTS[:SEED], text:CORPUS, rows:FILE, source:FILE or "
            "source:CORPUS; "
            "=RATIO behind it weighs several.",
            rich_help_panel="Data",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the tuned map.")],
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help="answers, receiver_kl, source_kl, hidden or attention; =WEIGHT behind it.",
            rich_help_panel="Training",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="features, output, per_head or trunk.", rich_help_panel="Corrector")
    ] = "features",
    rank: Annotated[int, typer.Option(min=1, rich_help_panel="Corrector", metavar="N")] = 32,
    gate: Annotated[
        bool, typer.Option("--gate", help="A learned factor a target.", rich_help_panel="Corrector")
    ] = False,
    place: Annotated[
        str, typer.Option(help="keys, values or both.", rich_help_panel="Corrector")
    ] = "both",
    layers: Annotated[
        str | None, typer.Option(help="Receiver layers, e.g. 0,1,2.", rich_help_panel="Corrector")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, rich_help_panel="Training", metavar="N")] = 200,
    batch: Annotated[
        int,
        typer.Option(
            help="Questions a step, on one text.", min=1, rich_help_panel="Training", metavar="N"
        ),
    ] = 8,
    accumulate: Annotated[
        int, typer.Option(help="Texts a step.", min=1, rich_help_panel="Training", metavar="N")
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, rich_help_panel="Training", metavar="N")
    ] = 1.5e-3,
    warmup: Annotated[int, typer.Option(min=1, rich_help_panel="Training", metavar="N")] = 10,
    clip: Annotated[float, typer.Option(min=0.0, rich_help_panel="Training", metavar="N")] = 1.0,
    seed: Annotated[int, typer.Option(rich_help_panel="Training")] = 0,
    judge_every: Annotated[int, typer.Option(min=1, rich_help_panel="Training", metavar="N")] = 50,
    patience: Annotated[
        int,
        typer.Option(help="0 never stops early.", min=0, rich_help_panel="Training", metavar="N"),
    ] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, rich_help_panel="Training", metavar="N")
    ] = 20,
    curriculum: Annotated[
        bool, typer.Option("--curriculum", help="Short texts first.", rich_help_panel="Training")
    ] = False,
    warm_start: Annotated[
        int,
        typer.Option(
            help="First steps, which match attention outputs alone.",
            min=0,
            rich_help_panel="Training",
            metavar="N",
        ),
    ] = 0,
    match_layers: Annotated[
        str | None,
        typer.Option(
            help="Receiver layers for `attention`, e.g. 0,1,2.", rich_help_panel="Training"
        ),
    ] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--go-on", help="Start from the map's own corrector.", rich_help_panel="Corrector"
        ),
    ] = False,
    held_out: Annotated[
        int,
        typer.Option(
            help="Texts to judge on, a source.", min=2, rich_help_panel="Data", metavar="N"
        ),
    ] = 8,
    context_tokens: Annotated[
        int, typer.Option(help="Of running text.", min=8, rich_help_panel="Data", metavar="N")
    ] = 256,
    target_tokens: Annotated[
        int, typer.Option(help="Of running text.", min=8, rich_help_panel="Data", metavar="N")
    ] = 64,
    texts: Annotated[
        int,
        typer.Option(
            help="Pieces of running text, spread over the corpus; 0 for all.",
            min=0,
            rich_help_panel="Data",
            metavar="N",
        ),
    ] = 0,
    section_chars: Annotated[
        int | None,
        typer.Option(
            help="Cut running text at blank lines into documents of this size.",
            min=1,
            rich_help_panel="Data",
            metavar="N",
        ),
    ] = None,
    keep_readings: Annotated[
        int,
        typer.Option(
            help="Native readings kept in memory between steps.",
            min=0,
            rich_help_panel="Training",
            metavar="N",
        ),
    ] = 64,
    answer_tokens: Annotated[
        int,
        typer.Option(help="Of the source's answers.", min=1, rich_help_panel="Data", metavar="N"),
    ] = 48,
    cue: Annotated[
        str, typer.Option(help="Before the answers of rows.", rich_help_panel="Data")
    ] = "The answer is",
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Folder for TensorBoard's event files.", rich_help_panel="Training"),
    ] = None,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    source_precision: SourcePrecision = None,
    receiver_precision: ReceiverPrecision = None,
    source_cache: SourceCache = None,
    receiver_cache: ReceiverCache = None,
    allow_other_precision: AllowOtherPrecision = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Train a residual beside the ridge and write a map that carries it. Judged while it runs by
    accuracy on held-out texts beside the wrong document's; a stopped run resumes."""
    from kvferry.fitting.train import TuneSettings, require_layers
    from kvferry.fitting.train import tune as run
    from kvferry.maps.cache_map import CacheMap
    from kvferry.maps.corrector import KINDS, CorrectorConfig
    from kvferry.provenance import code_version
    from kvferry.running.handoff import Handoff
    from kvferry.running.readings import Readings
    from kvferry.terminal import print_json

    if kind not in KINDS or place not in ("keys", "values", "both"):
        raise BadInput(
            expected=f"--kind among {', '.join(KINDS)} and --place keys, values or both",
            got=f"{kind}, {place}",
            next_step="choose from these",
        )
    specs = [weighted(spec) for spec in data]
    for spec, _ in specs:
        split_spec(spec)
    asked_for = [weighted(o) for o in objective or ["answers"]]
    for what, names in (
        ("objective", [name for name, _ in asked_for]),
        ("source of data", [named_data(spec, seed) for spec, _ in specs]),
    ):
        if len(set(names)) < len(names):
            raise BadInput(
                expected=f"each {what} once, by a name of its own",
                got=", ".join(names),
                next_step="add up the weights, or rename a file, so that the card can tell them",
            )
    if (out / "map").resolve() == map.resolve():
        raise BadInput(
            expected="an --out whose map isn't the one that is tuned",
            got=str(out),
            next_step="choose another --out; the tuned map is written to OUT/map",
        )
    cache_map = CacheMap.from_pretrained(map)
    _require_start(cache_map, go_on)
    if go_on:
        _require_own_settings(context)
    own = cache_map.corrector
    settings = TuneSettings(
        corrector=own.config
        if own is not None
        else CorrectorConfig(
            kind=kind,
            rank=rank,
            keys=place != "values",
            values=place != "keys",
            layers=parse_layers(layers),
            gate=gate,
        ),
        objectives=dict(asked_for),
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        learning_rate=learning_rate,
        warmup=warmup,
        clip=clip,
        seed=seed,
        judge_every=judge_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        curriculum=curriculum,
        warm_start=warm_start,
        match_layers=parse_layers(match_layers),
    )
    before = cache_map.identity
    ferry = Handoff.from_map(
        cache_map,
        source=source,
        receiver=receiver,
        source_precision=Precision(source_precision, source_cache),
        receiver_precision=Precision(receiver_precision, receiver_cache),
        allow_other_precision=allow_other_precision,
        device=device,
        readings=Readings(keep_readings),
    )
    require_layers(ferry, settings)
    options = {
        "seed": seed,
        "held_out": held_out,
        "context_tokens": context_tokens,
        "target_tokens": target_tokens,
        "texts": texts,
        "section_chars": section_chars,
        "answer_tokens": answer_tokens,
        "cue": cue,
    }
    sources = [read_data(ferry, spec, out, options).weighted(ratio) for spec, ratio in specs]
    watch = None if tensorboard is None else board(tensorboard)
    summary = run(
        ferry,
        [text for source in sources for text in source.train],
        [text for source in sources for text in source.held_out],
        settings,
        out / "run",
        watch=watch,
    )
    kinds = {source.task for source in sources}
    ferry.map.config = ferry.map.config.model_copy(
        update={
            **ferry.served_sides(),
            "tuned": {
                "scope": "mixed" if len(kinds) > 1 else "task" if kinds == {True} else "generic",
                "data": {
                    source.name: ratio for source, (_, ratio) in zip(sources, specs, strict=True)
                },
                "objectives": settings.objectives,
                "steps": summary["best"]["step"],
                "held_out": {
                    key: summary["best"][key] for key in ("correct", "wrong_document_correct", "n")
                },
                "run": summary["identity"],
                "from_map": before,
                "code": code_version(),
            },
        }
    )
    ferry.map.save_pretrained(out / "map")
    if json:
        print_json({"out": str(out / "map"), **summary})
        return
    best = summary["best"]
    print(
        f"best at step {best['step']}: held-out {best['correct']}/{best['n']}, wrong document "
        f"{best['wrong_document_correct']}/{best['n']}"
    )
    print(f"{out / 'map'}: {summary['parameters'] / 1e6:.2f} M parameters beside the ridge")


def _require_start(cache_map: CacheMap, go_on: bool) -> None:
    own = cache_map.corrector
    if own is not None and not go_on:
        raise BadInput(
            expected="a map without a corrector",
            got=f"one with a corrector of kind {own.config.kind}",
            next_step="tune the map it was tuned from, or go on from this one with --go-on",
        )
    if own is None and go_on:
        raise BadInput(
            expected="a map with a corrector, to go on from",
            got="one without",
            next_step="leave --go-on out",
        )


def _require_own_settings(context: typer.Context) -> None:
    """A corrector that is gone on from stays what it is."""
    names = ("kind", "rank", "gate", "place", "layers")
    sources = {name: context.get_parameter_source(name) for name in names}
    said = [n for n, where in sources.items() if where and where.name == "COMMANDLINE"]
    if said:
        raise BadInput(
            expected="--go-on with the corrector that the map has",
            got=", ".join(f"--{name}" for name in said),
            next_step="leave these out, or tune the map it was tuned from",
        )


def named_data(spec: str, seed: int) -> str:
    """What a spec is called in the map's card: no path, and facts with their seed."""
    from kvferry.judging.tasks.facts import data_name

    kind, rest = split_spec(spec)
    if kind in ("facts", "recite"):
        return data_name(*_texts_and_seed(spec, seed), recited=kind == "recite")
    return f"{kind}:{Path(rest).name}"


def _texts_and_seed(spec: str, seed: int) -> tuple[int, int]:
    """Of ``facts:TEXTS[:SEED]`` or ``recite:TEXTS[:SEED]``; ``seed`` where the spec has none."""
    kind, rest = split_spec(spec)
    count, _, tail = rest.partition(":")
    try:
        texts, own = int(count), int(tail or seed)
        if texts < 1:
            raise ValueError(rest)
    except ValueError as error:
        raise BadInput(
            expected=f"{kind}:TEXTS[:SEED] with whole numbers",
            got=rest,
            next_step=f"e.g. {kind}:24",
        ) from error
    return texts, own


def board(folder: Path) -> Callable[[int, dict[str, float]], None]:
    """A watcher that writes each figure as a TensorBoard scalar.

    Raises:
        BadInput: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput(
            expected="TensorBoard for --tensorboard",
            got=str(error),
            next_step="pip install 'kvferry[tensorboard]', or leave the option out",
        ) from error
    writer = SummaryWriter(str(folder))

    def watch(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return watch


def weighted(text: str) -> tuple[str, float]:
    """``NAME=WEIGHT`` -> (NAME, WEIGHT); the weight is 1 if there is none.

    Raises:
        BadInput: a weight that is not above zero.
    """
    name, mark, tail = text.rpartition("=")
    if not mark:
        return text, 1.0
    try:
        weight = float(tail)
    except ValueError:
        weight = -1.0
    if not 0.0 < weight < float("inf"):
        raise BadInput(
            expected="a weight above zero behind =", got=text, next_step=f"e.g. {name}=0.5"
        )
    return name, weight


def split_spec(spec: str) -> tuple[str, str]:
    """``KIND:REST``.

    Raises:
        BadInput: another kind.
    """
    kind, _, rest = spec.partition(":")
    if kind not in ("facts", "recite", "text", "rows", "source") or not rest:
        raise BadInput(
            expected="facts:TEXTS[:SEED], recite:TEXTS[:SEED], text:CORPUS, rows:FILE.jsonl or "
            "source:FILE|CORPUS",
            got=spec,
            next_step="e.g. --data facts:24 --data text:books.jsonl=0.5",
        )
    return kind, rest


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """``0,1,2`` -> (0, 1, 2).

    Raises:
        BadInput: not a list of layer numbers.
    """
    if text is None:
        return None
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise BadInput(
            expected="receiver layers such as 0,1,2", got=text, next_step="separate by commas"
        ) from error


def read_data(ferry: Handoff, spec: str, out: Path, options: dict[str, Any]) -> TuneData:
    """One ``--data`` as texts to train and judge on."""
    from kvferry.fitting.corpus import read_corpus
    from kvferry.fitting.tune_data import (
        RunningText,
        holds_rows,
        prompts_for,
        read_rows,
        running_text,
        source_answers,
        task_rows,
    )

    kind, rest = split_spec(spec)
    cut_at = options["section_chars"]
    if kind in ("facts", "recite"):
        return _facts(ferry, kind, rest, options)
    name = f"{kind}:{Path(rest).name}"
    if kind == "text":
        cut = RunningText(
            options["context_tokens"],
            options["target_tokens"],
            held_out=options["held_out"],
            texts=options["texts"],
        )
        return running_text(
            ferry.layout, read_corpus([rest], section_chars=cut_at).documents, cut, name=name
        )
    if kind == "rows":
        return task_rows(
            ferry.layout,
            read_rows(Path(rest)),
            cue=options["cue"],
            held_out=options["held_out"],
            name=name,
        )
    if holds_rows(Path(rest)):
        rows = read_rows(Path(rest))
    else:
        documents = read_corpus([rest], section_chars=cut_at).documents
        rows = prompts_for(documents, chars=4 * options["context_tokens"])
    return source_answers(ferry, rows, out, max_new_tokens=options["answer_tokens"], name=name)


def _facts(ferry: Handoff, kind: str, rest: str, options: dict[str, Any]) -> TuneData:
    from kvferry.judging.facts_data import question_data, recital_data

    texts, seed = _texts_and_seed(f"{kind}:{rest}", options["seed"])
    if kind == "recite":
        return recital_data(ferry, texts, seed=seed)
    return question_data(ferry, texts, seed=seed, held_out=options["held_out"])
