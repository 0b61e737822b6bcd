"""Abstract parameters: shapes and shardings of a model, no weights allocated."""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowcomm_jax.refused import whole

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


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer.

    Attributes:
        layers, width, mlp, heads, vocab: usual sizes.
        kv_heads: None = heads.
        gated: three MLP matrices (SwiGLU) instead of two.
        tied: one table for embedding and head.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    gated: bool = True
    tied: bool = False

    def violations(self) -> list[str]:
        """List the violations of the sizes, each with its fix."""
        found = []
        for field in ("layers", "width", "mlp", "heads", "vocab"):
            found += whole(field, getattr(self, field))
        if self.kv_heads is not None:
            found += whole("kv_heads", self.kv_heads)
        found += [
            f"{field} is {getattr(self, field)!r}: use True or False"
            for field in ("gated", "tied")
            if not isinstance(getattr(self, field), bool)
        ]
        if found:
            return found
        kv = self.kv_heads or self.heads
        if self.width % self.heads:
            found.append(f"width {self.width} does not divide into {self.heads} heads: make it so")
        if self.heads % kv:
            found.append(f"heads {self.heads} is no multiple of kv_heads {kv}: make it so")
        return found

    def shapes(self) -> "Shapes":
        """Give the model as the planner needs it."""
        return Shapes(tuple(self.params()), self.layers, self.width, self.vocab)

    def params(self) -> list[Param]:
        """List the abstract parameters, sharded over axes "fsdp" and "tensor".

        Tables and the final norm are cut over "stage", too, as `models.pipeline.layout` does.
        """
        kv = self.width // self.heads * (self.kv_heads or self.heads)
        column, row = ("fsdp", "tensor"), ("tensor", "fsdp")
        block = {
            "attention/query": ((self.width, self.width), column),
            "attention/key": ((self.width, kv), column),
            "attention/value": ((self.width, kv), column),
            "attention/out": ((self.width, self.width), row),
            "mlp/up": ((self.width, self.mlp), column),
            "mlp/down": ((self.mlp, self.width), row),
            "norm/attention": ((self.width,), (None,)),
            "norm/mlp": ((self.width,), (None,)),
        }
        if self.gated:
            block["mlp/gate"] = ((self.width, self.mlp), column)
        vocab = ("stage", "tensor")
        out = [Param("embedding", (self.vocab, self.width), (vocab, "fsdp"))]
        for layer in range(self.layers):
            out += [
                Param(f"blocks/{name}/{layer}", shape, spec, layer)
                for name, (shape, spec) in block.items()
            ]
        out.append(Param("norm/final", (self.width,), ("stage",)))
        if not self.tied:
            out.append(Param("head", (self.width, self.vocab), ("fsdp", vocab)))
        return out


# MLP widths, heads and depths of arXiv 2503.09799 (ungated, vocabulary 32 768), whose names are the
# counts with one table for embedding and head; the 107B model is
# Qwen1.5 cut to 78 layers (recalled from arXiv 2506.21263, not checked) with that family's public
# configuration.
MODELS = {
    "35m": Decoder(6, 512, 2048, 8, 32768, tied=True, gated=False),
    "90m": Decoder(9, 768, 3072, 12, 32768, tied=True, gated=False),
    "180m": Decoder(12, 1024, 4096, 16, 32768, tied=True, gated=False),
    "335m": Decoder(15, 1280, 5120, 20, 32768, tied=True, gated=False),
    "550m": Decoder(18, 1536, 6144, 24, 32768, tied=True, gated=False),
    "1.3b": Decoder(24, 2048, 8192, 32, 32768, tied=True, gated=False),
    "2.4b": Decoder(30, 2560, 10240, 40, 32768, tied=True, gated=False),
    "4b": Decoder(36, 3072, 12288, 48, 32768, tied=True, gated=False),
    "10b": Decoder(48, 4096, 16384, 64, 32768, tied=True, gated=False),
    "100b": Decoder(108, 8704, 34816, 68, 32768, gated=False),
    "qwen_107b": Decoder(78, 8192, 49152, 64, 152064, kv_heads=8),
    "1t": Decoder(160, 22528, 90112, 176, 131072, gated=False),
}


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
