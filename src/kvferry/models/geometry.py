"""What a model's cache looks like, layer by layer, from its config alone.

Owns the layer kinds and the one place where a kind, a rope or a class that is not run yet is
refused (``require_supported``). One call: ``Geometry.from_config(config)``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvferry.errors import UnsupportedGeometry

LayerKind = Literal["full", "sliding", "linear", "mla"]

RUN_KINDS: frozenset[str] = frozenset({"full"})
"""Layer kinds that maps and handoff run today."""

RUN_MODEL_TYPES: frozenset[str] = frozenset({"llama", "qwen2", "qwen3", "mistral", "stablelm"})
"""Model classes whose cache has been compared with transformers, position by position."""

RUN_ROPES: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose frequencies don't depend on the length read."""

_KIND_OF_LAYER_TYPE: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
}


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's cache.

    Attributes:
        kind: full | sliding | linear | mla.
        num_kv_heads: key/value heads (0 for linear layers).
        head_dim: width of a head, for keys and values alike.
        rotary_dim: leading dims of a key head that rope turns.
        window_tokens: the sliding window, ``None`` where there is none.
    """

    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    window_tokens: int | None = None

    @property
    def width(self) -> int:
        """Floats a token for the keys (the values take as many)."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Geometry:
    """A model's cache, from its config alone.

    Attributes:
        model_type: the config's class name, e.g. ``qwen2``.
        layers: one entry a layer, in order.
        rope_type: e.g. ``default``, ``yarn``.
        rope_theta: base of the rotary frequencies.
        max_positions: the longest prompt the model was made for, in tokens.
        qk_norm: whether keys are normed before rope.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    rope_type: str
    rope_theta: float
    max_positions: int
    qk_norm: bool
    parameters: int

    @classmethod
    def from_config(cls, config: Any) -> Geometry:
        """Read a transformers config; no weights are needed.

        Raises:
            UnsupportedGeometry: the config is not that of a decoder with attention heads.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = getattr(text, "num_attention_heads", None)
        depth = getattr(text, "num_hidden_layers", None)
        if not heads or not depth:
            raise UnsupportedGeometry(
                expected="a decoder config with num_attention_heads and num_hidden_layers",
                got=f"model_type {getattr(config, 'model_type', '?')!r}",
                next_step="choose a causal language model",
            )
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        rope = _rope_parameters(text)
        rotary_dim = int(head_dim * float(rope.get("partial_rotary_factor") or 1.0))
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        kinds = _kinds(text, depth)
        window = getattr(text, "sliding_window", None)
        layers = tuple(
            LayerGeometry(
                kind=kind,
                num_kv_heads=0 if kind == "linear" else kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                window_tokens=window if kind == "sliding" else None,
            )
            for kind in kinds
        )
        return cls(
            model_type=str(text.model_type),
            layers=layers,
            num_attention_heads=heads,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            rope_type=str(rope.get("rope_type", "default")),
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
            qk_norm=str(text.model_type) == "qwen3"
            or bool(getattr(text, "qk_layernorm", False) or getattr(text, "use_qk_norm", False)),
            parameters=_parameter_count(text, head_dim, kv_heads),
        )

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Cache bytes a token, keys and values of every layer."""
        return sum(2 * layer.width for layer in self.layers) * dtype_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Geometry:
        """The inverse of ``to_dict``."""
        layers = tuple(LayerGeometry(**layer) for layer in value["layers"])
        return cls(**{**value, "layers": layers})

    def brief(self) -> list[str]:
        """Runs of equal layers, a line each: ``layers 0-23  full  2 KV heads x 64``."""
        lines, start = [], 0
        for index in range(1, self.depth + 1):
            if index < self.depth and self.layers[index] == self.layers[start]:
                continue
            layer = self.layers[start]
            span = f"{start}-{index - 1}" if index - 1 > start else f"{start}"
            text = f"layers {span}: {layer.kind}, {layer.num_kv_heads} KV heads x {layer.head_dim}"
            if layer.rotary_dim != layer.head_dim:
                text += f", rope on {layer.rotary_dim} dims"
            if layer.window_tokens:
                text += f", window {layer.window_tokens}"
            lines.append(text)
            start = index
        return lines


def unsupported_reasons(geometry: Geometry) -> list[str]:
    """Why this geometry is not run yet; empty when it is."""
    reasons = []
    if geometry.model_type not in RUN_MODEL_TYPES:
        reasons.append(f"class {geometry.model_type!r} is not run yet")
    for kind in sorted({layer.kind for layer in geometry.layers} - RUN_KINDS):
        where = [i for i, layer in enumerate(geometry.layers) if layer.kind == kind]
        reasons.append(f"{kind} layers are not run yet (layers {_spans(where)})")
    if geometry.rope_type not in RUN_ROPES:
        reasons.append(f"rope {geometry.rope_type!r} is not run yet")
    return reasons


def require_supported(geometry: Geometry, name: str) -> None:
    """Refuse by name what is not run yet; the only place that does.

    Raises:
        UnsupportedGeometry: with every reason.
    """
    if reasons := unsupported_reasons(geometry):
        raise UnsupportedGeometry(
            expected=f"full attention of {', '.join(sorted(RUN_MODEL_TYPES))} "
            f"with rope {', '.join(sorted(RUN_ROPES))}",
            got=f"{name}: " + "; ".join(reasons),
            next_step="run `kvferry check SOURCE RECEIVER` on another pair",
        )


def _rope_parameters(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one rope per layer type
        rope = rope.get("full_attention") or next(iter(rope.values()))
    factor = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    return {**rope, "partial_rotary_factor": factor}


def _kinds(config: Any, depth: int) -> list[LayerKind]:
    if getattr(config, "kv_lora_rank", None):
        return ["mla"] * depth
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        unknown = sorted({t for t in layer_types if t not in _KIND_OF_LAYER_TYPE})
        if unknown:
            raise UnsupportedGeometry(
                expected=f"layer types among {', '.join(sorted(_KIND_OF_LAYER_TYPE))}",
                got=", ".join(unknown),
                next_step="choose another model",
            )
        return [_KIND_OF_LAYER_TYPE[t] for t in layer_types]
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return ["sliding"] * depth
    return ["full"] * depth


def _parameter_count(config: Any, head_dim: int, kv_heads: int) -> int:
    """Parameters by the usual decoder's matrices (biases and norms left out)."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * (getattr(config, "intermediate_size", None) or 4 * hidden)
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return int(config.num_hidden_layers * (attention + mlp) + embeddings)


def _spans(indices: list[int]) -> str:
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)
