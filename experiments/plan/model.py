"""The model of a plan: a size of the planner, a preset of `lowcomm_jax.models`, or given sizes.

A preset is planned with its exact parameter tree (shapes and shardings); nothing is allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowcomm_jax.planner.shapes import MODELS, Decoder, Shapes, from_tree
from lowcomm_jax.refused import Refused, is_unknown, refuse

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig


@dataclasses.dataclass(frozen=True)
class PlanModel:
    """The model of a plan.

    Attributes:
      shapes: its arrays, as the planner needs them.
      name: of the planner or of `lowcomm_jax.models.PRESETS`; None for a model given by its sizes.
    """

    shapes: Shapes
    name: str | None = None


def read_model(spec: Any) -> PlanModel:
    """Look a model up, or build it from its sizes.

    Args:
      spec: a name out of `planner.shapes.MODELS` or `models.PRESETS`, or the fields of a
        `planner.shapes.Decoder`.

    Raises:
      Refused: everything that is wrong with it.
    """
    if isinstance(spec, str):
        return PlanModel(MODELS[spec].shapes(), spec) if spec in MODELS else _preset(spec)
    known = set(Decoder.__dataclass_fields__)
    needed = {"layers", "width", "mlp", "heads", "vocab"}
    if not isinstance(spec, Mapping) or not needed <= set(spec) <= known:
        given = sorted(spec, key=str) if isinstance(spec, Mapping) else repr(spec)
        fix = f"use a name, or fields: needed {sorted(needed)}, known {sorted(known)}"
        unknown = sorted(set(spec) - known, key=str) if isinstance(spec, Mapping) else []
        wrong = [f"field {k!r} {is_unknown(k, sorted(known))}" for k in unknown]
        raise Refused("model", [*wrong, f"given {given}: {fix}"])
    decoder = Decoder(**spec)
    refuse("model", decoder.violations())
    return PlanModel(decoder.shapes())


def _preset(name: str) -> PlanModel:
    from lowcomm_jax.models import PRESETS  # with JAX and Flax: only models that need it pay

    if name not in PRESETS:
        known = dict.fromkeys((*MODELS, *PRESETS))
        own = "or a mapping with layers, width, mlp, heads, vocab"
        raise Refused("model", [f"{name!r} {is_unknown(name, known)}, {own}"])
    return PlanModel(transformer_shapes(PRESETS[name]), name)


def transformer_shapes(config: TransformerConfig) -> Shapes:
    """The exact arrays of a model of `lowcomm_jax.models`, laid out over a region as it trains."""
    import jax

    from lowcomm_jax.models import build
    from lowcomm_jax.models.pipeline.layout import StageLayout

    config = dataclasses.replace(config, layer_loop="scan")
    abstract = jax.eval_shape(build(config).init, jax.random.key(0))
    specs = StageLayout(config, stages=1).specs(abstract, {})  # every axis that a leaf may have
    params = from_tree(abstract, specs, ["blocks"])
    return Shapes(tuple(params), config.layers, config.width, config.vocab_size)
