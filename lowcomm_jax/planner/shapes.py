"""Abstract parameters: shapes and shardings of a model, no weights allocated."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from lowcomm_jax.mesh.regions import axis_names
from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.params.fragments import is_stacked, layer_stacks, path_name

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig


@dataclass(frozen=True, eq=False)
class Shapes:
    """A model as the planner needs it.

    Attributes:
        tree: shapes of its parameters, such as `jax.eval_shape(model.init, rng)`.
        specs: a `PartitionSpec` inside a region for each leaf; missing trailing dimensions are not
            cut. None = every leaf is whole on every device.
        layers: steps the model is cut into for overlap.
        stacked: path prefixes of leaves with a leading axis of layers or experts.
        width, vocab: for the activation estimate; 0 = unknown.

    Raises:
        ValueError: the specs have another structure than the tree.
    """

    tree: Any
    specs: Any
    layers: int
    stacked: tuple[str, ...] = ()
    width: int = 0
    vocab: int = 0

    def __post_init__(self) -> None:
        if self.specs is not None and self._flat_specs[1] != jax.tree.structure(self.tree):
            raise ValueError(
                "specs have another structure than the abstract parameters: give one spec for each "
                "leaf"
            )

    @classmethod
    def of(
        cls, tree: Any, specs: Any = None, stacked: Sequence[str] = (), otherwise: int = 1
    ) -> "Shapes":
        """A model of which nothing else is known; its layers are the rows of stacks of layers.

        Args:
            tree, specs, stacked: see the class.
            otherwise: layers of a model without such a stack.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        layered = layer_stacks(stacked)
        rows = [x.shape[0] for path, x in leaves if is_stacked(path_name(path), layered)]
        return cls(tree, specs, max(rows, default=otherwise), tuple(stacked))

    @property
    def _flat_specs(self) -> tuple[list, Any]:
        return jax.tree.flatten(
            self.specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )

    @functools.cached_property
    def size(self) -> int:
        """Count all elements."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.tree))

    def held(self, mesh: Mapping[str, int]) -> int:
        """Count the elements that one device holds.

        As `models.pipeline.layout` does it, every one of S stages holds ceil(L / S) rows of a
        stack of layers (`layer_stacks`), those missing at the end filled up. It holds its part of
        what is outside the layers, or the whole where the spec does not name "stage". This is
        assumed of every model.
        Dimensions that do not divide are padded up, as XLA does.

        Args:
            mesh: sizes of the axes inside a region: "stage" cuts the model by depth, others shard
                dimensions.
        """
        leaves = jax.tree_util.tree_leaves_with_path(self.tree)
        specs = [()] * len(leaves) if self.specs is None else self._flat_specs[0]
        total, layered = 0, layer_stacks(self.stacked)
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            rows, shape, axes = 1, leaf.shape, tuple(spec)
            if is_stacked(path_name(path), layered):
                rows, shape, axes = -(-shape[0] // mesh.get(STAGE, 1)), shape[1:], axes[1:]
            total += rows * _shard_size(shape, axes, mesh)
        return total


def _shard_size(shape: tuple[int, ...], axes: tuple, mesh: Mapping[str, int]) -> int:
    """Elements of one device's part; vectors that do not divide over "stage" are not cut."""
    size = math.prod(shape[len(axes) :])
    for dimension, names in zip(shape, map(axis_names, axes)):
        parts = math.prod(mesh.get(name, 1) for name in names)
        if len(shape) == 1 and STAGE in names and dimension % parts:
            parts = 1
        size *= -(-dimension // parts)
    return size


def decoder_shapes(config: "TransformerConfig") -> Shapes:
    """A model of `lowcomm_jax.models`, its layers stacked, laid out over a region as it trains."""
    from lowcomm_jax.models import build  # with Flax, which only decoders need
    from lowcomm_jax.models.pipeline.layout import StageLayout
    from lowcomm_jax.models.protocol import abstract_params

    model = build(dataclasses.replace(config, layer_loop="scan"))
    abstract = abstract_params(model)
    specs = StageLayout(model, stages=1).specs(abstract, {})  # every axis that a leaf may have
    sizes = config.layers, tuple(model.stacked), config.width, config.vocab_size
    return Shapes(abstract, specs, *sizes)
