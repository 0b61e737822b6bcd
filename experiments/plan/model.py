"""The model of a plan, described as the `model` section of a training config describes it.

It is planned with its exact parameter tree (shapes and shardings); nothing is allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowcomm_jax.planner.shapes import Shapes, decoder_shapes
from lowcomm_jax.refused import Refused, is_unknown, refuse

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig


@dataclasses.dataclass(frozen=True)
class PlanModel:
    """The model of a plan.

    Attributes:
      shapes: its arrays, as the planner needs them.
      section: fields of the `model` section of a training config.
      flops: floating-point operations of a training step for each token; None = the model does not
        say.
      decoder: the built-in decoder; None for a model of one's own.
    """

    shapes: Shapes
    section: Mapping[str, Any]
    flops: float | None
    decoder: TransformerConfig | None = None


def read_model(spec: Any, seq_len: int = 2048) -> PlanModel:
    """Look a model up, or build it from its fields.

    Args:
      spec: a name out of `models.PRESETS`; or fields of `models.TransformerConfig`, which change
        those of a `preset` where one is named; or `module:factory`, alone or as `name` beside its
        settings.
      seq_len: tokens of a sequence.

    Raises:
      Refused: everything that is wrong with it.
    """
    if isinstance(spec, str):
        spec = {"name" if ":" in spec else "preset": spec}
    if not isinstance(spec, Mapping):
        raise Refused("model", [f"{spec!r} is no model: name a preset, or give its fields"])
    return _own(spec, seq_len) if "name" in spec else _decoder(spec, seq_len)


def _decoder(spec: Mapping[str, Any], seq_len: int) -> PlanModel:
    from lowcomm_jax.models import TransformerConfig, build, preset  # with Flax: slow to import

    changes, fields = dict(spec), {f.name: f for f in dataclasses.fields(TransformerConfig)}
    known = ("preset", *sorted(fields))
    found = [f"field {k!r} {is_unknown(k, known)}" for k in changes if k not in known]
    if "preset" not in spec:
        needed = [k for k, f in fields.items() if f.default is dataclasses.MISSING]
        missing = [k for k in needed if k not in changes]
        found += [f"fields {', '.join(missing)} are missing: give them, or a preset"] * bool(
            missing
        )
    refuse("model", found)
    try:
        name = changes.pop("preset", None)
        config = TransformerConfig(**changes) if name is None else preset(name, **changes)
    except ValueError as error:
        raise Refused("model", str(error).splitlines()) from None
    scanned = build(dataclasses.replace(config, layer_loop="scan"))  # in no time, for any depth
    return PlanModel(decoder_shapes(config), spec, scanned.flops_per_token(seq_len), config)


def _own(spec: Mapping[str, Any], seq_len: int) -> PlanModel:
    """A model of one's own, as its `init`, `specs` and `stacked` describe it.

    Without a stack of layers it has as many layers as arrays.
    """
    import jax

    from experiments.train.model import build, described
    from lowcomm_jax.models.protocol import abstract_params, flops_per_token, stacked_prefixes
    from lowcomm_jax.params.fragments import path_name
    from lowcomm_jax.params.sharding import fsdp_specs

    own, settled, found = described({"model": dict(spec), "data": {"seq_len": seq_len}})
    if not (found or settled):
        found = [f"{spec['name']} takes vocab_size: give {{name: {spec['name']}, vocab_size: 258}}"]
    refuse("model", found)
    model = build(own)
    abstract = abstract_params(model)

    def layout(mesh):
        if hasattr(model, "specs"):
            return abstract, model.specs(abstract, mesh)
        cut = fsdp_specs(mesh.get("fsdp", 1))  # the engine's own layout
        specs = jax.tree.map_with_path(lambda path, leaf: cut(path_name(path), leaf), abstract)
        return abstract, specs

    arrays = len(jax.tree.leaves(abstract))
    shapes = Shapes.of(abstract, layout, stacked_prefixes(model), otherwise=arrays)
    return PlanModel(shapes, spec, flops_per_token(model, seq_len))
