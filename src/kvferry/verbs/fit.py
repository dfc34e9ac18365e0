"""``kvferry fit``: a map from a finished capture, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.errors import BadInput
from kvferry.verbs.options import Json, ReceiverAt, SourceAt

if TYPE_CHECKING:
    from kvferry.fitting.corpus import Document


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("fit")(fit)


def fit(
    capture: Annotated[Path, typer.Argument(help="Folder of a finished capture.")],
    out: Annotated[Path, typer.Option(help="Folder for the map.")],
    k: Annotated[
        int | None, typer.Option(help="Source layers a target; default all captured.", min=1)
    ] = (None),
    k_key: Annotated[int | None, typer.Option(help="The same for keys alone.", min=1)] = None,
    k_value: Annotated[int | None, typer.Option(help="The same for values alone.", min=1)] = None,
    ridge: Annotated[
        list[float] | None, typer.Option("--lambda", help="Candidates; chosen on select documents.")
    ] = None,
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    stored: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="The capture's texts: adds figures on its test documents."),
    ] = None,
    section_chars: Annotated[int | None, typer.Option(help="As in the capture.", min=1)] = None,
    test_texts: Annotated[int, typer.Option(help="Test documents to measure on.", min=2)] = 8,
    source: SourceAt = None,
    receiver: ReceiverAt = None,
    push: Annotated[str | None, typer.Option(help="Hub repository to upload the map to.")] = None,
    json: Json = False,
) -> None:
    """Solve the ridge problems of a capture and write a map. R^2 needs no model; attention-output
    cosine and top-1 agreement on the test documents need --corpus and both models."""
    from kvferry.fitting.build import build_map
    from kvferry.fitting.ridge import LAMBDAS, FitSettings
    from kvferry.fitting.ridge import fit as solve
    from kvferry.terminal import print_json, print_table, say

    if stored not in ("float32", "bfloat16", "float16", "int8"):
        raise BadInput(
            expected="--stored float32, bfloat16, float16 or int8",
            got=stored,
            next_step="choose one; int8 is a quarter of float32",
        )
    settings = FitSettings(
        k_key=k_key or k,
        k_value=k_value or k,
        lambdas=tuple(ridge or LAMBDAS),
        direction=direction,
    )
    documents = _test_documents(capture, corpus, section_chars) if corpus else []
    result = solve(capture, settings)
    cache_map = build_map(result, stored=stored)  # type: ignore[arg-type]
    cache_map.save_pretrained(out)
    if corpus:
        _add_test_figures(out, documents, test_texts, source, receiver)
    else:
        say("no --corpus: attention-output cosine and top-1 agreement are not measured")
    if push:
        from kvferry.maps.cache_map import CacheMap

        say(f"pushed: {CacheMap.from_pretrained(out).push_to_hub(push, folder=out)}")
    config = _read(out)
    size = (out / "map.safetensors").stat().st_size
    if json:
        print_json({"out": str(out), "bytes": size, **config})
        return
    rows = [
        (s, f"{q['K']:.3f}", f"{q['V']:.3f}", str(q["rows"]))
        for s, q in ((s, config["quality"][f"r2_{s}"]) for s in ("fit", "select", "test"))
    ]
    print_table("R2 (a diagnostic, no evidence)", ("documents", "K", "V", "rows"), rows)
    for name, value in sorted(config["quality"].items()):
        if not name.startswith("r2_"):
            print(f"{name}: {value}")
    print(f"{out}: {size / 1e6:.1f} MB, {config['source']} -> {config['receiver']}")


def _test_documents(capture: Path, corpus: list[str], section_chars: int | None) -> list[Document]:
    """The capture's test documents, found again in its texts."""
    from kvferry.fitting.corpus import read_corpus
    from kvferry.provenance import read_object

    header = read_object(capture / "capture.json", "items")
    wanted = {item["doc_id"] for item in header["items"] if item["split"] == "test"}
    documents = [
        d for d in read_corpus(corpus, section_chars=section_chars).documents if d.doc_id in wanted
    ]
    if not documents:
        raise BadInput(
            expected="the capture's own texts in --corpus",
            got="none of its test documents",
            next_step="give the same --corpus (and --section-chars) as the capture had",
        )
    return documents


def _add_test_figures(
    out: Path, documents: list[Document], count: int, source: str | None, receiver: str | None
) -> None:
    import tempfile

    from kvferry.fitting.fidelity import FidelitySettings, measure, pick
    from kvferry.running.handoff import Handoff
    from kvferry.running.readings import Readings

    ferry = Handoff.from_pretrained(out, source=source, receiver=receiver, readings=Readings(4))
    settings = FidelitySettings()
    texts = pick(ferry, documents, count, settings)
    with tempfile.TemporaryDirectory() as scratch:
        summary = measure(
            {"map": ferry},
            texts,
            settings,
            Path(scratch),
            label="the capture's test documents",
            arguments={},
        )
    figures = summary["maps"]["map"]
    quality = {
        "test_documents": figures["n"],
        "attention_cosine": round(figures["attention_cosine"]["transfer"], 4),
        "top1_agreement": round(figures["top1_agreement"]["transfer"], 4),
        "recovered": {k: round(v, 4) for k, v in figures["recovered"]["transfer"].items()},
        "recovered_wrong_document": round(figures["recovered"]["wrong_document"]["value"], 4),
    }
    ferry.map.config.quality.update(quality)
    ferry.map.save_pretrained(out)


def _read(out: Path) -> dict:  # type: ignore[type-arg]
    from kvferry.provenance import read_json

    config = read_json(out / "map.json")
    return {
        "source": config["source"]["spec"],
        "receiver": config["receiver"]["spec"],
        "k_key": config["k_key"],
        "k_value": config["k_value"],
        "stored": config["stored"],
        "weights_sha256": config["weights_sha256"],
        "quality": config["quality"],
    }
