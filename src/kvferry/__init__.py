"""One language model reads, another answers: learned maps between key/value caches.

``import kvferry`` loads no torch; the public names below are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.maps.cache_map import CacheMap as CacheMap
    from kvferry.models.cache import CanonicalCache as CanonicalCache
    from kvferry.models.geometry import Geometry as Geometry
    from kvferry.models.load import load_model as load_model
    from kvferry.running.handoff import Handoff as Handoff
    from kvferry.running.prompt import PromptLayout as PromptLayout

__version__ = "0.1.0"

_PUBLIC = {
    "CacheMap": "kvferry.maps.cache_map",
    "CanonicalCache": "kvferry.models.cache",
    "Geometry": "kvferry.models.geometry",
    "Handoff": "kvferry.running.handoff",
    "PromptLayout": "kvferry.running.prompt",
    "load_model": "kvferry.models.load",
}
__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
