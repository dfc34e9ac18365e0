"""Several maps' handoffs, with each model loaded once and native readings shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry.errors import BadInput
from kvferry.models.precision import Precision

if TYPE_CHECKING:
    from kvferry.running.handoff import Handoff


def load_handoffs(
    folders: Sequence[Path],
    *,
    device: str,
    keep: int,
    source: str | None = None,
    receiver: str | None = None,
    source_precision: Precision | None = None,
    receiver_precision: Precision | None = None,
    ridge: bool = False,
    **options: Any,
) -> dict[str, Handoff]:
    """Load maps and their models.

    Args:
        folders: map folders; their last names are the handoffs' names, with the folder above
            where two have the same (``tune`` calls each of its maps ``map``).
        source: where the source lies, if not by the name in the map; for maps of one direction.
        receiver: where the receiver lies, likewise.
        source_precision: of weights and cache; what it leaves open is the map's.
        receiver_precision: likewise.
        keep: native readings to keep.
        ridge: also each map without its corrector, named ``NAME (ridge)``.
        options: as for ``Handoff``.

    Raises:
        BadInput: a folder twice, or two of one name in folders of one name.
    """
    from kvferry.maps.cache_map import CacheMap
    from kvferry.models.load import LoadedModel
    from kvferry.running.handoff import Handoff, load_side
    from kvferry.running.readings import Readings

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        raise BadInput(
            expected="map folders of different names",
            got=", ".join(names),
            next_step="rename one, so that records can tell them apart",
        )
    maps: dict[str, CacheMap] = {}
    for name, folder in zip(names, folders, strict=True):
        maps[name] = CacheMap.from_pretrained(folder)
        if ridge and maps[name].corrector is not None:
            maps[f"{name} (ridge)"] = maps[name].without_corrector()
    loaded: dict[tuple[str, Precision], LoadedModel] = {}

    def side(cache_map: CacheMap, which: Literal["source", "receiver"]) -> LoadedModel:
        given = source if which == "source" else receiver
        config = cache_map.config.source if which == "source" else cache_map.config.receiver
        asked = source_precision if which == "source" else receiver_precision
        # Maps of one direction or both may have been made for models served differently.
        key = (given or config.spec, (asked or Precision()).or_else(config.precision))
        if key not in loaded:
            loaded[key] = load_side(cache_map, which, given, device=device, precision=asked)
        return loaded[key]

    readings = Readings(keep)
    handoffs = {}
    for name, cache_map in maps.items():
        handoffs[name] = Handoff(
            side(cache_map, "source"),
            side(cache_map, "receiver"),
            cache_map,
            readings=readings,
            **options,
        )
    return handoffs
