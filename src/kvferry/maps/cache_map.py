"""The map artifact: safetensors + sorted JSON + a card; save, load, push.

Owns what a map is on disk and what it refuses: another format, a changed file, other models, the
opposite direction. Weights are stored as float32, bfloat16, float16 or int8 (a scale for each
output), and used in float32. One call: ``CacheMap.from_pretrained("maps/NAME")``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.errors import BadInput, CorruptFile, HashMismatch, NotFinite, Unreachable, WrongPair
from kvferry.maps.corrector import Corrector, CorrectorConfig, CorrectorShape
from kvferry.maps.linear import GroupedProducts, LinearTarget, cache_features, fold
from kvferry.models.cache import CanonicalCache, LayerKV
from kvferry.models.geometry import Geometry
from kvferry.models.precision import Precision
from kvferry.provenance import (
    atomic_path,
    read_json,
    sha256_file,
    sha256_text,
    sorted_json,
    write_json,
    write_text,
)

FORMAT = "kvferry-map-1"
UNSAVED = "0" * 64
"""``weights_sha256`` of a map that is only in memory; its identity then hashes the weights."""
CONFIG_NAME = "map.json"
WEIGHTS_NAME = "map.safetensors"
CORRECTOR_NAME = "corrector.safetensors"
CARD_NAME = "README.md"
FILES = (WEIGHTS_NAME, CONFIG_NAME, CORRECTOR_NAME, CARD_NAME)

Stored = Literal["float32", "bfloat16", "float16", "int8"]


class MapSide(BaseModel):
    """One of the two models a map stands between.

    Attributes:
        dtype: it computed in.
        weights: ``int8`` or ``int4``; ``None`` for the dtype.
        cache: how its cache was rounded; ``None`` for the dtype.
        packed: what its file was packed as before it was unpacked for loading, e.g. ``q4_k_m``.
    """

    model_config = ConfigDict(extra="forbid")
    spec: str
    revision: str
    dtype: str
    geometry: dict[str, Any]
    weights: str | None = None
    cache: str | None = None
    packed: str | None = None

    @property
    def precision(self) -> Precision:
        """Of weights and cache, nothing left open."""
        return Precision(self.weights or self.dtype, self.cache or self.dtype)

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not said: maps keep the hashes they had before there were precisions."""
        said: dict[str, Any] = handler(self)
        absent = [n for n in ("weights", "cache", "packed") if said[n] is None]
        return {name: value for name, value in said.items() if name not in absent}


class MapConfig(BaseModel):
    """Everything about a map but its weights; unknown keys are refused.

    Attributes:
        k_key: source layers for each key target.
        k_value: source layers for each value target.
        stored: dtype of the weights on disk.
        layout: the prompt layout it was fitted with.
        fitted: on what, how many rows, which code.
        quality: figures on select and test documents, each with its n.
        corrector: the residual trained beside the ridge, if there is one.
        corrector_sha256: of its file.
        tuned: what it was trained for and on, and by which run.
        config_sha256: of the config itself, to notice a changed file.
    """

    model_config = ConfigDict(extra="forbid")
    format: str
    source: MapSide
    receiver: MapSide
    k_key: int
    k_value: int
    stored: Stored
    layers: dict[str, list[int]]
    layout: dict[str, Any]
    layout_identity: str
    fitted: dict[str, Any]
    quality: dict[str, Any]
    weights_sha256: str
    corrector: CorrectorConfig | None = None
    corrector_sha256: str | None = None
    tuned: dict[str, Any] | None = None
    config_sha256: str | None = None

    @property
    def digest(self) -> str:
        """sha256 of all the rest, quality left out: it stands in the file as ``config_sha256``."""
        return sha256_text(sorted_json(self.model_dump(exclude={"quality", "config_sha256"})))


class CacheMap:
    """A learned map from a source's canonical cache to a receiver's.

    Attributes:
        config: what it is.
        targets: ``"layer.K"`` and ``"layer.V"`` -> the linear map of that target, float32.
        corrector: the residual beside it, float32, or ``None``.
    """

    def __init__(
        self,
        config: MapConfig,
        targets: dict[str, LinearTarget],
        corrector: Corrector | None = None,
    ) -> None:
        self.config = config
        self.targets = targets
        self.corrector = corrector
        self.receiver_geometry = Geometry.from_dict(config.receiver.geometry)
        self._grouped: GroupedProducts | None = None
        self._packed: dict[str, Tensor] | None = None

    @property
    def identity(self) -> str:
        """Hash of weights and config: names this map in records and cache salts.

        Figures measured later don't change it.
        """
        named = self.config.model_dump(exclude={"quality", "config_sha256"})
        for name in ("corrector", "corrector_sha256", "tuned"):
            if named[name] is None:  # as before there were correctors
                del named[name]
        if self.config.weights_sha256 == UNSAVED:
            digest = hashlib.sha256()
            for name in sorted(self.targets):
                digest.update(self.targets[name].weight.detach().cpu().numpy().tobytes())
            named["weights_sha256"] = digest.hexdigest()
        if self.corrector is not None and self.config.corrector_sha256 is None:
            digest = hashlib.sha256()
            for _, tensor in sorted(self.corrector.state_dict().items()):
                digest.update(tensor.detach().cpu().numpy().tobytes())
            named["corrector_sha256"] = digest.hexdigest()
        return sha256_text(sorted_json(named))

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token, corrector included."""
        ridge = sum(target.multiply_adds for target in self.targets.values())
        return ridge + (self.corrector.multiply_adds if self.corrector is not None else 0)

    @property
    def shape(self) -> CorrectorShape:
        """What a corrector beside this map has to fit."""
        source = Geometry.from_dict(self.config.source.geometry)
        layer = self.receiver_geometry.layers[0]
        return CorrectorShape(
            sources={name: target.layers for name, target in self.targets.items()},
            depth=source.depth,
            features=2 * source.layers[0].width,
            width=layer.width,
            heads=layer.num_kv_heads,
        )

    def to(self, device: torch.device) -> CacheMap:
        """The same map on another device; saved again, its weights keep their bytes."""
        corrector = None if self.corrector is None else self.corrector.to(device)
        moved = CacheMap(self.config, {n: t.to(device) for n, t in self.targets.items()}, corrector)
        moved._packed = self._packed
        return moved

    def without_corrector(self) -> CacheMap:
        """The ridge alone."""
        bare = {"corrector": None, "corrector_sha256": None, "tuned": None}
        ridge = CacheMap(self.config.model_copy(update=bare), self.targets)
        ridge._packed = self._packed
        return ridge

    def apply(self, cache: CanonicalCache, *, positions: Tensor) -> CanonicalCache:
        """Map a whole cache.

        Args:
            cache: what the source holds, ``[T, H, D]`` a layer, keys un-rotated.
            positions: ``[T]`` int64, where the entries shall stand in the receiver.

        Returns:
            the receiver's canonical cache, marked lossy.
        """
        features = cache_features(cache)
        values = self.correct(features, self.ridge(features))
        return self.shaped(cache, values, positions)

    def ridge(self, features: list[Tensor]) -> dict[str, Tensor]:
        """Every target ``[T, W]`` by the linear map alone, from features ``[T, F]`` a layer."""
        if self._grouped is None:
            self._grouped = GroupedProducts.of(self.targets)
        return self._grouped.apply(features)

    def correct(self, features: list[Tensor], mapped: dict[str, Tensor]) -> dict[str, Tensor]:
        """The linear map's targets with the corrector's residuals added, if there is one."""
        if self.corrector is None:
            return mapped
        residuals = self.corrector(features, mapped)
        return {n: v + residuals[n] if n in residuals else v for n, v in mapped.items()}

    def shaped(
        self, cache: CanonicalCache, values: dict[str, Tensor], positions: Tensor
    ) -> CanonicalCache:
        """Targets ``[T, W]`` as the receiver's canonical cache at ``positions``, marked lossy."""
        layers = tuple(
            self._shaped(index, values[f"{index}.K"], values[f"{index}.V"])
            for index in range(self.receiver_geometry.depth)
        )
        return CanonicalCache(layers, positions, cache.token_ids, self.identity, lossy=True)

    def layer(self, index: int, features: list[Tensor]) -> LayerKV:
        """Map one receiver layer alone, for maps that stream.

        Args:
            index: receiver layer.
            features: per source layer ``[T, F]``; only this layer's sources are looked at.

        Raises:
            BadInput: the map has a corrector, which looks at more.
        """
        if self.corrector is not None:
            raise BadInput(
                expected="a map without a corrector, to map one layer alone",
                got=f"a corrector of kind {self.corrector.config.kind}",
                next_step="map the whole cache with apply()",
            )
        return self._shaped(
            index,
            self.targets[f"{index}.K"].apply(features),
            self.targets[f"{index}.V"].apply(features),
        )

    def _shaped(self, index: int, keys: Tensor, values: Tensor) -> LayerKV:
        shape = self.receiver_geometry.layers[index]
        size = (-1, shape.num_kv_heads, shape.head_dim)
        return LayerKV(keys.reshape(size), values.reshape(size))

    def require_pair(
        self, source_revision: str, receiver_revision: str, *, allow_other_revision: bool = False
    ) -> None:
        """Refuse models this map was not fitted for.

        Raises:
            WrongPair: swapped direction, or another revision (unless allowed).
        """
        want = (self.config.source.revision, self.config.receiver.revision)
        got = (source_revision, receiver_revision)
        names = f"{self.config.source.spec} -> {self.config.receiver.spec}"
        if want == got:
            return
        if want == got[::-1]:
            raise WrongPair(
                expected=f"a map for this direction; this one goes {names}",
                got="the two models the other way round",
                next_step="swap source and receiver, or load the map of the other direction",
            )
        if not allow_other_revision:
            side = "source" if want[0] != got[0] else "receiver"
            index = 0 if side == "source" else 1
            raise WrongPair(
                expected=f"{side} revision {want[index][:16]} ({names})",
                got=f"revision {got[index][:16]}",
                next_step="use the models named in the map's card, or allow another revision "
                "explicitly (--allow-other-revision) and judge the result anew",
            )

    def require_precision(
        self, source: Precision, receiver: Precision, *, allow_other_precision: bool = False
    ) -> None:
        """Refuse models that are served in another precision than this map was made for.

        Raises:
            WrongPair: another precision of weights or cache (unless allowed).
        """
        for name, side, found in (
            ("source", self.config.source, source),
            ("receiver", self.config.receiver, receiver),
        ):
            if side.precision != found and not allow_other_precision:
                raise WrongPair(
                    expected=f"a {name} with {side.precision}, as this map was made for",
                    got=f"{found} ({side.spec})",
                    next_step="leave the precision out to take the map's, capture and fit anew, or "
                    "allow another (--allow-other-precision) and judge the result anew",
                )

    def save_pretrained(self, folder: str | Path, *, stored: Stored | None = None) -> None:
        """Write weights, config and card; each file whole or not at all.

        Args:
            folder: where; made if absent.
            stored: dtype on disk; ``None`` keeps the config's.

        Raises:
            NotFinite: NaN or infinity in the weights, or too large for the dtype.
        """
        folder = Path(folder)
        kind = stored or self.config.stored
        tensors = self._packed if kind == self.config.stored and self._packed else {}
        for name, target in self.targets.items() if not tensors else ():
            packed = _pack(name, target, kind)
            if not all(bool(torch.isfinite(tensor).all()) for tensor in packed.values()):
                raise NotFinite(
                    expected=f"finite weights for {name} as {kind}",
                    got="NaN or infinity",
                    next_step="fit the map again, or store it as float32 or bfloat16",
                )
            tensors.update(packed)
        path = folder / WEIGHTS_NAME
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"format": FORMAT})
        self.config = self.config.model_copy(
            update={"stored": kind, "weights_sha256": sha256_file(path)}
        )
        if self.corrector is not None:
            self._save_corrector(folder / CORRECTOR_NAME)
        # From here on this map is what was written, so that its identity stays true.
        self._packed = tensors
        self.targets = {
            name: _unpack(name, target.layers, tensors, kind)
            for name, target in self.targets.items()
        }
        self._grouped = None
        self.config = self.config.model_copy(update={"config_sha256": self.config.digest})
        self._save_config(folder)

    def save_quality(self, folder: str | Path, figures: dict[str, Any]) -> None:
        """Add figures to a saved map's config and card; its weights and identity stay.

        Args:
            folder: where this map lies.
            figures: what was measured, by name; these replace what stood under the same name.
        """
        quality = self.config.quality | figures
        self.config = self.config.model_copy(update={"quality": quality})
        self._save_config(Path(folder))

    def _save_config(self, folder: Path) -> None:
        from kvferry.maps.card import card_text

        write_json(folder / CONFIG_NAME, self.config.model_dump())
        size = (folder / WEIGHTS_NAME).stat().st_size
        write_text(folder / CARD_NAME, card_text(self.config, size))

    def _save_corrector(self, path: Path) -> None:
        """As bfloat16; from then on the corrector is what was written."""
        assert self.corrector is not None
        state = {k: v.detach().cpu() for k, v in self.corrector.state_dict().items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            raise NotFinite(
                expected="finite corrector weights",
                got="NaN or infinity",
                next_step="tune again with a lower learning rate",
            )
        packed = {
            name: tensor if name in ("center", "scale", "size") else tensor.to(torch.bfloat16)
            for name, tensor in state.items()
        }
        with atomic_path(path) as temporary:
            save_file({k: v.contiguous() for k, v in packed.items()}, temporary, {"format": FORMAT})
        self.corrector.load_state_dict({k: v.float() for k, v in packed.items()})
        self.config = self.config.model_copy(
            update={
                "corrector": self.corrector.config,
                "corrector_sha256": sha256_file(path),
            }
        )

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision: str | None = None) -> CacheMap:
        """Read a map from a folder or a hub repository, checking its hash.

        Raises:
            CorruptFile: not a map, damaged or truncated.
            HashMismatch: the weights are not those of the config.
            Unreachable: no such folder, and the hub can't be asked.
        """
        folder = _local_folder(str(source), revision)
        config = _read_config(folder / CONFIG_NAME)
        path = folder / WEIGHTS_NAME
        if not path.is_file():
            raise CorruptFile(
                expected=f"{WEIGHTS_NAME} beside {CONFIG_NAME} in {folder}",
                got="no such file",
                next_step="restore the file or fit the map again",
            )
        if (found := sha256_file(path)) != config.weights_sha256:
            raise HashMismatch(
                expected=f"sha256 {config.weights_sha256} of {path}",
                got=found,
                next_step="restore the file or fit the map again; nothing was deleted",
            )
        try:
            with safe_open(path, framework="pt") as stream:
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            targets = {
                name: _unpack(name, tuple(layers), tensors, config.stored)
                for name, layers in config.layers.items()
            }
            cache_map = cls(config, targets)
            cache_map._packed = tensors
            _check_shapes(cache_map)
            if config.corrector is not None:
                cache_map.corrector = _read_corrector(folder / CORRECTOR_NAME, cache_map)
        except (
            OSError,
            SafetensorError,
            LookupError,
            ValueError,
            TypeError,
            RuntimeError,  # scales and weights of unequal sizes
        ) as error:
            raise CorruptFile(
                expected=f"map weights in {path}",
                got=f"{type(error).__name__}: {error}",
                next_step="restore the file or fit the map again",
            ) from error
        return cache_map

    def push_to_hub(self, repo_id: str, *, private: bool = False, folder: Path) -> str:
        """Save to ``folder`` and upload it to a model repository of the hub.

        Returns:
            the address of the commit.

        Raises:
            Unreachable: no network or no right to write there.
        """
        from huggingface_hub import HfApi

        self.save_pretrained(folder)
        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            info = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=list(FILES),
                commit_message="Upload a kvferry cache map",
            )
        except Exception as error:  # the hub client raises many kinds
            raise Unreachable(
                expected=f"to write to {repo_id}",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
                next_step="check the network and log in with `hf auth login`",
            ) from error
        return str(info.commit_url)


def _pack(name: str, target: LinearTarget, kind: Stored) -> dict[str, Tensor]:
    weight = target.weight.detach().float()
    bias = target.bias.detach().float()
    if target.center is None:
        named = {f"{name}.bias": bias.contiguous()}
    else:
        # The output at the features' mean is stored, and the bias follows from the rounded weights.
        center = target.center.detach().float()
        named = {
            f"{name}.center": center.contiguous(),
            f"{name}.mean": fold(weight.double(), -center.double(), bias.double()).float(),
        }
    if kind == "int8":
        # Rows are scaled to equal influence first, so that one scale an output serves them all.
        rows = weight.abs().mean(1).clamp_min(1e-12)
        even = weight / rows[:, None]
        columns = even.abs().amax(0).clamp_min(1e-12) / 127.0
        named[f"{name}.weight"] = (even / columns).round().to(torch.int8).contiguous()
        named[f"{name}.row_scale"] = rows.contiguous()
        named[f"{name}.column_scale"] = columns.contiguous()
    else:
        named[f"{name}.weight"] = weight.to(getattr(torch, kind)).contiguous()
    return named


def _unpack(
    name: str, layers: tuple[int, ...], tensors: dict[str, Tensor], kind: Stored
) -> LinearTarget:
    weight = tensors[f"{name}.weight"].float()
    if kind == "int8":
        weight = weight * tensors[f"{name}.row_scale"][:, None] * tensors[f"{name}.column_scale"]
    center = tensors.get(f"{name}.center")
    if center is None:
        return LinearTarget(layers, weight, tensors[f"{name}.bias"])
    bias = fold(weight.double(), center.double(), tensors[f"{name}.mean"].double()).float()
    return LinearTarget(layers, weight, bias, center)


def _read_corrector(path: Path, cache_map: CacheMap) -> Corrector:
    config = cache_map.config
    assert config.corrector is not None
    if (found := sha256_file(path)) != config.corrector_sha256:
        raise HashMismatch(
            expected=f"sha256 {config.corrector_sha256} of {path}",
            got=found,
            next_step="restore the file or tune the map again; nothing was deleted",
        )
    corrector = Corrector(config.corrector, cache_map.shape)
    with safe_open(path, framework="pt") as stream:
        state = {name: stream.get_tensor(name).float() for name in stream.keys()}  # noqa: SIM118
    if "size" not in state:  # made before residuals had units
        state["size"] = torch.ones_like(corrector.size)
    corrector.load_state_dict(state)
    corrector.requires_grad_(False)
    return corrector


def _check_shapes(cache_map: CacheMap) -> None:
    config = cache_map.config
    source = Geometry.from_dict(config.source.geometry)
    for index, layer in enumerate(cache_map.receiver_geometry.layers):
        for kind in ("K", "V"):
            target = cache_map.targets[f"{index}.{kind}"]
            if not all(0 <= i < source.depth for i in target.layers):
                raise ValueError(f"{index}.{kind} takes layers {target.layers} of {source.depth}")
            rows = sum(2 * source.layers[i].width for i in target.layers)
            if tuple(target.bias.shape) != (layer.width,):
                raise ValueError(f"bias of {index}.{kind} is {tuple(target.bias.shape)}")
            if tuple(target.weight.shape) != (rows, layer.width):
                raise ValueError(
                    f"weight of {index}.{kind} is {tuple(target.weight.shape)}, "
                    f"not {(rows, layer.width)}"
                )


def _read_config(path: Path) -> MapConfig:
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CorruptFile(
            expected=f"a map of format {FORMAT} in {path}",
            got=str(value.get("format") if isinstance(value, dict) else type(value).__name__),
            next_step="use the version of kvferry that wrote it, or fit the map again",
        )
    try:
        config = MapConfig.model_validate(value)
        if config.config_sha256 is not None and config.config_sha256 != config.digest:
            raise HashMismatch(
                expected=f"sha256 {config.config_sha256} over {path}",
                got=config.digest,
                next_step="restore the file or fit the map again; nothing was deleted",
            )
        return config
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptFile(
            expected=f"a complete {CONFIG_NAME} with no unknown key",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            next_step="restore the file or fit the map again",
        ) from error


def _local_folder(source: str, revision: str | None) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or source.count("/") != 1 or source.startswith((".", "/")):
        raise BadInput(
            expected="a map's folder, or a hub repository OWNER/NAME",
            got=source,
            next_step="check the path; `kvferry fit` writes such a folder",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # the hub client raises many kinds
        raise Unreachable(
            expected=f"a folder {source}, or that repository on the hub",
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}",
            next_step="check the name and the network",
        ) from error
