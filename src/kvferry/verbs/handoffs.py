"""Several maps' handoffs, with each model loaded once and native readings shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import BadInput

if TYPE_CHECKING:
    from kvferry.running.handoff import Handoff


def load_handoffs(
    folders: Sequence[Path],
    *,
    device: str,
    keep: int,
    ridge: bool = False,
    **options: Any,
) -> dict[str, Handoff]:
    """Load maps and their models.

    Args:
        folders: map folders; their last names are the handoffs' names.
        keep: native readings to keep.
        ridge: also each map without its corrector, named ``NAME (ridge)``.
        options: as for ``Handoff``.

    Raises:
        BadInput: two folders of one name.
    """
    from kvferry.maps.cache_map import CacheMap
    from kvferry.models.load import LoadedModel, load_model
    from kvferry.running.handoff import Handoff
    from kvferry.running.readings import Readings

    names = [folder.resolve().name for folder in folders]
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
    loaded: dict[str, LoadedModel] = {}
    readings = Readings(keep)
    handoffs = {}
    for name, cache_map in maps.items():
        source, receiver = cache_map.config.source.spec, cache_map.config.receiver.spec
        for spec in (source, receiver):
            if spec not in loaded:
                loaded[spec] = load_model(spec, device=device)
        handoffs[name] = Handoff(
            loaded[source], loaded[receiver], cache_map, readings=readings, **options
        )
    return handoffs
