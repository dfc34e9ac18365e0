"""Does a map give the losses that are on record for another one? A short check, transfer only.

    python benchmarks/same_losses.py MAP RECORD CORPUS --out FILE.json

Reads every document of a ``kvferry measure`` record again, hands it over by MAP and compares the
loss with the record's. Used where an artifact was written anew with the same parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.fitting.corpus import read_corpus
from kvferry.fitting.fidelity import score_tail, tail_loss
from kvferry.provenance import code_version, machine, read_json, read_records, write_json
from kvferry.running.handoff import Handoff
from kvferry.terminal import progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("map")
    parser.add_argument("record", type=Path)
    parser.add_argument("corpus")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    header = read_json(given.record / "header.json")
    settings = header["settings"]
    texts = {d.doc_id: d.text for d in read_corpus([given.corpus]).documents}
    ferry = Handoff.from_pretrained(given.map)
    rows = read_records(given.record / "records.jsonl")
    differences = []
    with progress("losses", total=len(rows), unit="texts") as advance:
        for row in rows:
            ids = ferry.layout.context(texts[row["doc_id"]])
            end = settings["context_tokens"] + settings["target_tokens"] + 1
            held = ferry.hand_over_ids(ids[: settings["context_tokens"]], arm="transfer")
            tail = ids[settings["context_tokens"] : end]
            log_probs, _ = score_tail(held, tail)
            differences.append(tail_loss(log_probs, tail) - row["nll"]["transfer"])
            advance(1)
    write_json(
        given.out,
        {
            "map": ferry.map.identity,
            "record": given.record.name,
            "record_maps": {name: m["identity"] for name, m in header["maps"].items()},
            "n": len(differences),
            "mean_difference_nats": sum(differences) / len(differences),
            "max_abs_difference_nats": max(map(abs, differences)),
            "code": code_version(),
            "machine": machine(),
        },
    )
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
