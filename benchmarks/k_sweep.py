"""R^2 of every k from one capture, both directions: the table that k is chosen from.

python benchmarks/k_sweep.py CAPTURE [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kvferry.fitting.ridge import FitSettings, fit
from kvferry.provenance import code_version, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--k", default="1,2,3,4,5,6")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for direction in ("forward", "backward"):
        for k in map(int, arguments.k.split(",")):
            started = time.perf_counter()
            result = fit(arguments.capture, FitSettings(k, k, direction=direction))
            row = {"direction": direction, "k": k, "seconds": time.perf_counter() - started}
            for split in ("fit", "select", "test"):
                row[f"r2_{split}"] = {t: round(result.mean_r2(split, t), 4) for t in ("K", "V")}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.out:
        write_json(arguments.out, {"rows": rows, "code": code_version()})


if __name__ == "__main__":
    main()
