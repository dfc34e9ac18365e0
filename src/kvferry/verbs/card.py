"""``kvferry card``: put what held-out runs gave into a map's card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.verbs.options import Json


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("card")(card)


def card(
    map: Annotated[Path, typer.Argument(help="Map folder; its map.json and README.md change.")],
    run: Annotated[
        list[Path],
        typer.Option(
            help="Folder of bench facts, bench questions, measure or compare; repeat for several. "
            "They replace what the card had."
        ),
    ],
    json: Json = False,
) -> None:
    """Put what held-out runs gave into a map's card: every arm and control with n, in and out of
    what the map was made from."""
    from kvferry.judging.held_out import held_out_results
    from kvferry.maps.cache_map import CacheMap
    from kvferry.maps.card import held_out_lines
    from kvferry.terminal import print_json

    loaded = CacheMap.from_pretrained(map)
    rows = [row for folder in run for row in held_out_results(folder, loaded)]
    loaded.save_quality(map, {"held_out": rows})
    if json:
        print_json({"map": str(map), "identity": loaded.identity, "held_out": rows})
        return
    print("\n".join(held_out_lines(rows)))
    print(f"written: {map / 'README.md'}")
