"""The model of a plan: a size of the planner, a preset, given sizes, or a model of one's own.

Presets of `lowcomm_jax.models` and models of one's own are planned with their exact parameter tree
(shapes and shardings); nothing is allocated.
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
      name: of the planner or of `lowcomm_jax.models.PRESETS`, or `module:factory`; None for a model
        given by its sizes.
      settings: of a model of one's own, as its factory takes them; None for every other model.
      flops: floating-point operations of a training step for each token; None = unknown, 6 for each
        parameter.
    """

    shapes: Shapes
    name: str | None = None
    settings: Mapping[str, Any] | None = None
    flops: float | None = None


def read_model(spec: Any, seq_len: int = 2048, mesh: Any = None) -> PlanModel:
    """Look a model up, or build it from its sizes.

    Args:
      spec: a name out of `planner.shapes.MODELS` or `models.PRESETS`, or the fields of a
        `planner.shapes.Decoder`; or `module:factory`, alone or as `name` beside its settings.
      seq_len: tokens of a sequence.
      mesh: sizes of the axes inside a region; only layouts of models of one's own depend on it.

    Raises:
      Refused: everything that is wrong with it.
    """
    if isinstance(spec, str) and ":" in spec:
        return _own({"name": spec}, seq_len, mesh)
    if isinstance(spec, Mapping) and "name" in spec:
        return _own(spec, seq_len, mesh)
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


def _own(spec: Mapping[str, Any], seq_len: int, mesh: Any) -> PlanModel:
    """A model of one's own, as its `init` and `specs` describe it, in as many layers as arrays."""
    import jax

    from experiments.train.model import build, described
    from lowcomm_jax.models.protocol import abstract_params, flops_per_token
    from lowcomm_jax.params.fragments import path_name
    from lowcomm_jax.params.sharding import fsdp_specs

    own, settled, found = described({"model": dict(spec), "data": {"seq_len": seq_len}})
    if not (found or settled):
        found = [f"{spec['name']} takes vocab_size: give {{name: {spec['name']}, vocab_size: 258}}"]
    refuse("model", found)
    model, axes = build(own), dict(mesh) if isinstance(mesh, Mapping) else {}
    abstract = abstract_params(model)
    if hasattr(model, "specs"):
        specs = model.specs(abstract, axes)
    else:
        cut = fsdp_specs(axes.get("fsdp", 1))  # the engine's own layout
        specs = jax.tree.map_with_path(lambda path, leaf: cut(path_name(path), leaf), abstract)
    params = from_tree(abstract, specs)
    shapes = Shapes(tuple(params), len(params), width=0, vocab=0)
    settings = {key: value for key, value in spec.items() if key != "name"}
    return PlanModel(shapes, own.name, settings, flops_per_token(model, seq_len))


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
