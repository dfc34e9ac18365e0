"""What a variant is: its name says everything.

``FEATURES[/CHANGE...]``. Features, joined by ``+``:

| item | features |
|---|---|
| ``kvN``, ``kvN-M`` | K/V of N source layers, chosen for K and for V apart (N for K, M for V) |
| ``jointN`` | K/V of N source layers, one choice for both |
| ``headN`` | as ``kvN``, but a head takes the same head's features alone |
| ``all`` | K/V of every source layer, each reduced to 128 principal components |
| ``resN`` | the residual stream entering N source layers |
| ``emb`` | the residual stream entering layer 0 |

Changes: ``normed`` (the target is the receiver's normed layer input, then its own W_k and W_v),
``rankN`` (reduced-rank regression), ``rankNq`` (the same in the metric of the receiver's queries
for K and of its output projection for V), ``attention`` or ``norm`` (rows weighted by received
attention, or by the inverse of the token's norm), ``rowsN`` (the first N rows only), ``lambdaX``
(one lambda for all targets). One call: ``parse("kv4+res1/rank64")``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import BadInput

ITEM = re.compile(r"(kv|joint|head|res)([1-9]\d*)(?:-([1-9]\d*))?|(all|emb)")
CHANGE = re.compile(
    r"(normed)|rank([1-9]\d*)(q?)|(attention|norm)|rows([1-9]\d*)|lambda(\d+(?:\.\d+)?(?:e-?\d+)?)"
)


@dataclass(frozen=True)
class Variant:
    """One way to fit; see the module.

    Attributes:
        name: as given.
        key_layers: K/V source layers for key targets.
        value_layers: for value targets.
        joint: one choice of layers for both.
        same_head: a head takes the same head's features alone.
        all_layers: reduced K/V of every layer.
        residuals: residual streams.
        embedding: the residual entering layer 0.
        normed: the target is the normed layer input.
        rank: of a low-rank map.
        rank_weighted: whether outputs are weighted for it.
        weighting: ``attention``, ``norm`` or none.
        rows: of the fit, ``None`` for all.
        lam: the one lambda, ``None`` to choose.
    """

    name: str
    key_layers: int = 0
    value_layers: int = 0
    joint: bool = False
    same_head: bool = False
    all_layers: bool = False
    residuals: int = 0
    embedding: bool = False
    normed: bool = False
    rank: int | None = None
    rank_weighted: bool = False
    weighting: str | None = None
    rows: int | None = None
    lam: float | None = None

    @property
    def slug(self) -> str:
        """A folder's name."""
        return self.name.replace("/", "_")

    @property
    def targets(self) -> tuple[str, ...]:
        """What is fitted: K and V, or the normed input H."""
        return ("H",) if self.normed else ("K", "V")


def parse(name: str) -> Variant:
    """A variant from its name.

    Raises:
        BadInput: a name that says none.
    """
    features, *changes = name.split("/")
    found: dict[str, object] = {}
    for item in features.split("+"):
        match = ITEM.fullmatch(item)
        if not match:
            raise _unknown(name, item)
        kind = match[1] or match[4]
        new: dict[str, object]
        if kind in ("kv", "joint", "head"):
            count = int(match[2])
            new = {"key_layers": count, "value_layers": int(match[3] or count)}
            new |= {"joint": True} if kind == "joint" else {}
            new |= {"same_head": True} if kind == "head" else {}
        else:
            new = {
                "res": {"residuals": int(match[2] or 0)},
                "all": {"all_layers": True},
                "emb": {"embedding": True},
            }[kind]
        if (match[3] and kind != "kv") or found.keys() & new.keys():
            raise _unknown(name, item)
        found |= new
    for change in changes:
        match = CHANGE.fullmatch(change)
        if not match:
            raise _unknown(name, change)
        if match[1]:
            new = {"normed": True}
        elif match[2]:
            new = {"rank": int(match[2]), "rank_weighted": bool(match[3])}
        elif match[4]:
            new = {"weighting": match[4]}
        elif match[5]:
            new = {"rows": int(match[5])}
        else:
            new = {"lam": float(match[6])}
        if found.keys() & new.keys() or not all(v or v is False for v in new.values()):
            raise _unknown(name, change)
        found |= new
    variant = Variant(name, **found)  # type: ignore[arg-type]
    if variant.normed and (
        variant.rank_weighted or variant.same_head or (variant.key_layers and not variant.joint)
    ):
        raise BadInput(
            expected="jointN, resN, emb or all as features of the normed input, and a plain rank",
            got=name,
            next_step="K and V share this target, so write e.g. joint4/normed/rank64",
        )
    alone = not (variant.all_layers or variant.residuals or variant.embedding or variant.rank)
    if variant.same_head and not alone:
        raise BadInput(
            expected="headN with no other features and no rank",
            got=name,
            next_step="write e.g. head4",
        )
    return variant


def _unknown(name: str, part: str) -> BadInput:
    return BadInput(
        expected="a variant such as kv4, kv2-6, head4, joint4+res1/normed or kv4/rank64",
        got=f"{part!r} in {name!r}",
        next_step="see the module variants.py for the words",
    )


def default_variants(*, width: int, same_heads: bool, rows: int, k: int = 4) -> list[Variant]:
    """The ablation's list.

    Args:
        width: floats a target has a token; ranks below it are tried.
        same_heads: whether both models have as many key/value heads.
        rows: of the fit; halves and quarters of it are tried.
        k: source layers of the map that changes are tried on.
    """
    names = [f"kv{n}" for n in range(1, 7)]
    names += ["kv2-6", "kv6-2", "all"]
    names += [f"head{k}", f"head{k + 2}"] if same_heads else []
    names += ["res1", "res2", f"kv{k}+res1", "kv2+res1", f"kv{k}+res2", f"kv{k}+emb"]
    names += [f"joint{k}", f"joint{k}/normed", "res1/normed", f"joint{k}+res1/normed"]
    names += [f"joint{k}/normed/rank{r}" for r in (64, 128, 256)]
    names += [f"kv{k}/attention", f"kv{k}/norm", f"kv{k}+res1/attention"]
    names += [f"kv{k}/rank{r}" for r in (32, 64, 128) if r < width]
    names += [f"kv{k}/rank{r}q" for r in (32, 64) if r < width]
    names += [f"{f}/rows{n}" for n in (rows // 4, rows // 2) for f in (f"kv{k}", f"kv{k}+res1")]
    names += [f"kv{k}/lambda0.01", f"joint{k}/lambda0.01", f"joint{k}/normed/lambda0.01"]
    return [parse(name) for name in names]
