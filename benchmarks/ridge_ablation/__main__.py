"""Raw paired readings once, then any variant of the ridge from them; and the table.

    python -m benchmarks.ridge_ablation read SOURCE RECEIVER --train A.jsonl --train B.jsonl \
        --test C.jsonl --out runs/readings
    python -m benchmarks.ridge_ablation fit runs/readings --direction forward --losses \
        --out runs/ridge-forward
    python -m benchmarks.ridge_ablation table runs/ridge-forward
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvferry.errors import BadInput, KvferryError
from kvferry.terminal import print_json, say

from .table import table_lines, table_rows


def read(given: argparse.Namespace) -> None:
    from kvferry.fitting.corpus import read_corpus
    from kvferry.models.load import load_model
    from kvferry.running.prompt import PromptLayout

    from .pieces import ReadSettings, plan_pieces
    from .reading import read_pieces

    settings = ReadSettings(
        given.tokens,
        given.chunk_tokens,
        given.per_document,
        given.texts,
        given.context_tokens,
        given.target_tokens,
    )
    books = {
        Path(spec).name: read_corpus([spec], section_chars=given.section_chars)
        for spec in given.train
    }
    if len(books) < len(given.train):
        raise BadInput(
            expected="training books with names of their own",
            got=", ".join(given.train),
            next_step="rename one, or give them as one folder",
        )
    test = read_corpus(given.test, section_chars=given.section_chars)
    source = load_model(given.source, device=given.device)
    receiver = load_model(given.receiver, device=given.device)
    bound = PromptLayout().bind(receiver.tokenizer)
    pieces = plan_pieces(books, test, bound, settings)
    header = read_pieces(source, receiver, pieces, bound, settings, given.out)
    rows = {
        split: sum(p["tokens"] for p in header["pieces"] if p["split"] == split)
        for split in ("fit", "select", "test")
    }
    if given.json:
        print_json({"out": str(given.out), "pieces": len(header["pieces"]), "rows": rows})
    else:
        print(f"{given.out}: {len(header['pieces'])} pieces, rows {rows}")


def fit(given: argparse.Namespace) -> None:
    from .fitting import asked_variants, fit_variants
    from .pieces import READS, Readings
    from .variants import parse

    readings = Readings.open(given.readings)
    variants = asked_variants(readings, given.direction, given.k)
    if given.variants:
        variants = [parse(name) for name in given.variants.split(",")]
    say(f"{len(variants)} variants: {', '.join(v.name for v in variants)}")
    plan = fit_variants(readings, given.direction, variants, given.out, k_max=given.k_max)
    if given.losses:
        from kvferry.models.load import load_model

        from .losses import measure_losses

        answers = readings.header["models"][READS[given.direction][1]]["spec"]
        receiver = load_model(given.answering or answers, device=given.device)
        measure_losses(readings, plan, variants, receiver, given.out / "losses")
    show(given)


def show(given: argparse.Namespace) -> None:
    if given.json:
        print_json({"out": str(given.out), "rows": table_rows(given.out)})
    else:
        print("\n".join(table_lines(given.out)))


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="ridge_ablation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = whole.add_subparsers(required=True)
    one = verbs.add_parser("read", help="both models over all texts, raw readings on disk")
    one.set_defaults(run=read)
    one.add_argument("source")
    one.add_argument("receiver")
    one.add_argument("--train", action="append", required=True, help="a book; repeat")
    one.add_argument("--test", action="append", required=True, help="another book; repeat")
    one.add_argument("--tokens", type=int, default=20_000, help="rows for the fit")
    one.add_argument("--chunk-tokens", type=int, default=512)
    one.add_argument("--per-document", type=int, default=2)
    one.add_argument("--texts", type=int, default=12, help="test texts")
    one.add_argument("--context-tokens", type=int, default=447)
    one.add_argument("--target-tokens", type=int, default=64)
    one.add_argument("--section-chars", type=int)
    two = verbs.add_parser("fit", help="every variant of one direction")
    two.set_defaults(run=fit)
    two.add_argument("readings", type=Path)
    two.add_argument("--direction", choices=("forward", "backward"), default="forward")
    two.add_argument("--variants", help="names, joined by commas; left out: the whole list")
    two.add_argument("--k", type=int, default=4, help="layers of the map that changes are tried on")
    two.add_argument("--k-max", type=int, default=6, help="source layers kept a target")
    two.add_argument("--losses", action="store_true", help="measure through the receiver as well")
    two.add_argument("--answering", help="where the answering model lies, if not by its name")
    three = verbs.add_parser("table", help="the table of a finished fit")
    three.set_defaults(run=show)
    three.add_argument("out", type=Path)
    for verb in (one, two):
        verb.add_argument("--out", type=Path, required=True)
        verb.add_argument("--device", default="cpu")
    for verb in (one, two, three):
        verb.add_argument("--json", action="store_true", help="one JSON line on stdout")
    return whole


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        given.run(given)
    except KvferryError as error:
        say("\n".join(error.lines()))
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
