"""Merge rules by name, for configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowcomm_jax.merge.align import Align
from lowcomm_jax.merge.base import Merge
from lowcomm_jax.merge.isotropic import Isotropic
from lowcomm_jax.merge.radial_directional import RadialDirectional
from lowcomm_jax.refused import is_unknown

RULES: dict[str, type[Merge]] = {
    "align": Align,
    "isotropic": Isotropic,
    "radial_directional": RadialDirectional,
}


def make(spec: str | Mapping[str, Any] | Merge) -> Merge:
    """A merge rule from its name, or from a mapping with `name` and its settings.

    Args:
      spec: `"isotropic"`, `{"name": "align", "turn": 0.5}`, or a rule, which is returned.

    Raises:
      ValueError: an unknown name, or unknown settings, which are all listed.
    """
    if isinstance(spec, Merge):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if name not in RULES:
        raise ValueError(f"merge={name!r} {is_unknown(name, RULES)}")
    known = RULES[name].__dataclass_fields__
    unknown = [f"{k}={v!r}" for k, v in settings.items() if k not in known]
    if unknown:
        fix = f"use {', '.join(known)}" if known else "it has none"
        raise ValueError(f"merge: {name} has no such setting as {', '.join(unknown)}: {fix}")
    return RULES[name](**settings)
