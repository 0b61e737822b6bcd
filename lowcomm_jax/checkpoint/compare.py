"""What a checkpoint says about its origin, and how that differs from the engine at hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import optax

from lowcomm_jax.checkpoint.leaves import ANCHORED, field_of, region_axis
from lowcomm_jax.methods.base import Method

FORMAT = 1
"""Version of the layout and of the meaning of every entry; another one is refused."""

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
SHOWN = 20
MISSING = "missing"


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def describe(value: Any) -> Any:
    """Describe a method (or a part of one) in JSON.

    Optax transforms are closures: only their presence is recorded, their numbers belong into the
    config.
    """
    if isinstance(value, optax.GradientTransformation):
        return "transform"
    if dataclasses.is_dataclass(value):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def describe_method(method: Method | None) -> dict | None:
    """JSON description of a method, without what was wrong with it."""
    if method is None:
        return None
    described = describe(method)
    if method.trainers is None:
        del described["trainers"]  # older checkpoints know of none either
    return {k: v for k, v in described.items() if k not in ("type", "problems")}


def dotted(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists stay whole."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    flat = {}
    for key, item in value.items():
        flat |= dotted(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differing_fields(old: dict, new: dict, ignore: Sequence[str] = (), prefix: str = "") -> list:
    """One line `name: old -> new` for each field that differs.

    Args:
      ignore: dotted names that may differ, with everything below them.
    """
    old, new = dotted(old, prefix), dotted(new, prefix)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        texts = [json.dumps(d[name]) if name in d else MISSING for d in (old, new)]
        ignored = any(name == field or name.startswith(f"{field}.") for field in ignore)
        if texts[0] != texts[1] and not ignored:
            lines.append(f"{name}: {texts[0]} -> {texts[1]}")
    return lines


def differing_leaves(old: dict, new: dict, regions: tuple[int, int]) -> list[str]:
    """Lines for arrays that are missing, new, or of another shape or type.

    Args:
      old, new: name -> array or shape of the whole state.
      regions: number of regions of each; the length of region axes is not compared.
    """
    lines = []
    for name in sorted(old.keys() | new.keys()):
        texts = [_leaf_text(name, tree) for tree in (old, new)]
        if name in old and name in new and field_of(name) in ANCHORED:
            axes = old[name].shape[0], new[name].shape[0]
            if axes not in ((1, 1), regions):
                texts = [f"{text} in {count} anchors" for text, count in zip(texts, axes)]
        if texts[0] != texts[1]:
            lines.append(f"{name}: {texts[0]} -> {texts[1]}")
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN} more arrays"]
    return lines


def _leaf_text(name: str, tree: dict) -> str:
    """`float32[3, 5]` for one region or anchor."""
    if name not in tree:
        return MISSING
    leaf = tree[name]
    axis = 0 if field_of(name) in ANCHORED else region_axis(name)
    shape = [n for i, n in enumerate(leaf.shape) if i != axis]
    return f"{leaf.dtype.name}{shape}"
