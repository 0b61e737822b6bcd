"""Abstract parameters: shapes of a model and how devices hold them, no weights allocated."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.regions import axis_names
from lowcomm_jax.mesh.stages import STAGE, stage_axis
from lowcomm_jax.params.fragments import is_stacked, layer_stacks, path_name

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig

Layout = Callable[[Mapping[str, int]], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Shapes:
    """A model as the planner needs it.

    Attributes:
        tree: shapes of its parameters, such as `jax.eval_shape(model.init, rng)`.
        layout: (shapes as they are held, a `PartitionSpec` for each leaf) on a region of the mesh
            axes {name: size}; missing trailing dimensions are not cut. None = every leaf is whole
            on every device.
        layers: steps the model is cut into for overlap.
        stacked: path prefixes of leaves with a leading axis of layers or experts.
        width, vocab: for the activation estimate; 0 = unknown.
    """

    tree: Any
    layout: Layout | None
    layers: int
    stacked: tuple[str, ...] = ()
    width: int = 0
    vocab: int = 0

    @classmethod
    def of(
        cls,
        tree: Any,
        layout: Layout | None = None,
        stacked: Sequence[str] = (),
        otherwise: int = 1,
    ) -> "Shapes":
        """A model of which nothing else is known; its layers are the rows of stacks of layers.

        Args:
            tree, layout, stacked: see the class.
            otherwise: layers of a model without such a stack.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        layered = layer_stacks(stacked)
        rows = [x.shape[0] for path, x in leaves if is_stacked(path_name(path), layered)]
        return cls(tree, layout, max(rows, default=otherwise), tuple(stacked))

    @functools.cached_property
    def size(self) -> int:
        """Count all elements."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.tree))

    def in_stages(self, mesh: Mapping[str, int]) -> bool:
        """Whether stages of this mesh hold parts of the model."""
        if self.layout is None:
            return False
        specs = jax.tree.leaves(self.layout(mesh)[1], is_leaf=lambda x: isinstance(x, P))
        return any(stage_axis(spec) is not None for spec in specs)

    def held(self, mesh: Mapping[str, int]) -> int:
        """Count the elements that one device of a region of this mesh holds."""
        if self.layout is None:
            return self.size
        parts = jax.tree.map(functools.partial(_part, mesh), *self.layout(mesh))
        return sum(jax.tree.leaves(parts))


def _part(mesh: Mapping[str, int], leaf: jax.ShapeDtypeStruct, spec: P) -> int:
    """Elements of one device's part of a leaf; a dimension that does not divide is rounded up."""
    devices = (math.prod(mesh.get(axis, 1) for axis in axis_names(entry)) for entry in spec)
    dimensions = itertools.zip_longest(leaf.shape, devices, fillvalue=1)
    return math.prod(-(-size // parts) for size, parts in dimensions)


def decoder_shapes(config: "TransformerConfig") -> Shapes:
    """A model of `lowcomm_jax.models`, its layers stacked, laid out over a region as it trains."""
    from lowcomm_jax.models import build  # with Flax, which only decoders need
    from lowcomm_jax.models.pipeline.layout import StageLayout
    from lowcomm_jax.models.protocol import abstract_params

    model = build(dataclasses.replace(config, layer_loop="scan"))
    abstract = abstract_params(model)

    def layout(mesh):
        stages = StageLayout(model, mesh.get(STAGE, 1))
        cut = jax.eval_shape(stages.cut, abstract)
        return cut, stages.specs(cut, mesh)

    sizes = config.layers, tuple(model.stacked), config.width, config.vocab_size
    return Shapes(abstract, layout, *sizes)
