"""Abstract parameters: shapes and shardings of a model, no weights allocated."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig

Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Param:
    """One abstract parameter.

    Attributes:
        path: name; of one in a layer it starts with "blocks" and ends with the layer.
        shape: global shape.
        spec: mesh axis (or axes, or None) of each dimension. One outside the layers that does not
            name "stage" is on every pipeline stage whole.
        layer: index of the layer it belongs to, which one stage holds; None = outside the layers.
    """

    path: str
    shape: tuple[int, ...]
    spec: tuple[Axis, ...]
    layer: int | None = None

    @property
    def size(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)

    def shard_size(self, mesh: Mapping[str, int]) -> int:
        """Count the elements one device holds.

        Dimensions that do not divide are padded up, as XLA does. A vector that does not divide over
        "stage" is not cut, as `models.pipeline.layout` has it.
        """
        size = 1
        for dimension, axes in zip(self.shape, self.spec, strict=True):
            names = () if axes is None else (axes,) if isinstance(axes, str) else axes
            parts = math.prod(mesh.get(name, 1) for name in names)
            if len(self.shape) == 1 and "stage" in names and dimension % parts:
                parts = 1
            size *= -(-dimension // parts)
        return size


@dataclass(frozen=True)
class Shapes:
    """A model as the planner needs it.

    Attributes:
        params: abstract parameters.
        layers: steps the model is cut into for overlap.
        width, vocab: for the activation estimate; 0 = unknown.
    """

    params: tuple[Param, ...]
    layers: int
    width: int
    vocab: int

    @functools.cached_property
    def size(self) -> int:
        """Count all elements."""
        return sum(p.size for p in self.params)

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """Shapes as a model has them: the layers' arrays are stacked under "blocks"."""
        import jax

        def leaf(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, "float32")

        found: dict[str, Any] = {p.path: leaf(*p.shape) for p in self.params if p.layer is None}
        layers: dict[str, list[Param]] = {}
        for param in self.params:
            if param.layer is not None:
                layers.setdefault(param.path.rpartition("/")[0], []).append(param)
        for name, rows in layers.items():
            if len({row.shape for row in rows}) == 1:
                found[name] = leaf(len(rows), *rows[0].shape)
            else:
                found |= {row.path: leaf(*row.shape) for row in rows}
        return found

    @property
    def stacked(self) -> tuple[str, ...]:
        """Path prefixes of the leaves of `tree` with a leading layer axis."""
        layered = (p.path.partition("/")[0] for p in self.params if p.layer is not None)
        return tuple(dict.fromkeys(layered))


def from_tree(abstract: Any, specs: Any, stacked: Collection[str] = ()) -> list[Param]:
    """List the abstract parameters of any JAX model.

    Args:
        abstract: pytree of ShapeDtypeStruct or arrays, for example `jax.eval_shape(model.init,
            rng)`.
        specs: pytree of PartitionSpec of the same structure (missing trailing dimensions are
            unsharded). Leaves that do not name "stage" are on every pipeline stage whole.
        stacked: names of top-level entries whose leaves have a leading layer axis; stages cut it.

    Raises:
        ValueError: the structures differ.
    """
    import jax  # the rest of the network room needs no JAX

    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    spec_leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
    if [path for path, _ in leaves] != [path for path, _ in spec_leaves]:
        raise ValueError(
            "specs have another structure than the abstract parameters: give one spec for each leaf"
        )
    out = []
    for (path, leaf), (_, spec) in zip(leaves, spec_leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        full = tuple(spec) + (None,) * (len(leaf.shape) - len(spec))
        if name.partition("/")[0] in stacked:
            out += [
                Param(f"{name}/{i}", tuple(leaf.shape[1:]), full[1:], i)
                for i in range(leaf.shape[0])
            ]
        else:
            out.append(Param(name, tuple(leaf.shape), full))
    return out


def shapes_of(abstract: Any, specs: Any = None, stacked: Collection[str] = ()) -> Shapes:
    """Any model as the planner needs it; its width is unknown.

    Args: as for `from_tree`; `specs` None = every leaf is whole on every device.
    """
    import jax

    if specs is None:
        specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), abstract)
    params = tuple(from_tree(abstract, specs, stacked))
    layers = 1 + max((p.layer for p in params if p.layer is not None), default=0)
    return Shapes(params, layers, 0, 0)


def decoder_shapes(config: "TransformerConfig") -> Shapes:
    """A model of `lowcomm_jax.models`, its layers stacked, laid out over a region as it trains."""
    from lowcomm_jax.models import build  # with Flax, which only decoders need
    from lowcomm_jax.models.pipeline.layout import StageLayout
    from lowcomm_jax.models.protocol import abstract_params

    model = build(dataclasses.replace(config, layer_loop="scan"))
    abstract = abstract_params(model)
    specs = StageLayout(model, stages=1).specs(abstract, {})  # every axis that a leaf may have
    params = from_tree(abstract, specs, model.stacked)
    return Shapes(tuple(params), config.layers, config.width, config.vocab_size)
