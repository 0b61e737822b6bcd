"""Which codec an engine's payloads are made with: the method's, laid out for its mesh."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from lowcomm_jax.compression import Codec, PerTensor, Staged, integrates, route
from lowcomm_jax.compression.base import Wrapper
from lowcomm_jax.methods.base import Method
from lowcomm_jax.stages import STAGE, stage_axis

if TYPE_CHECKING:
    from lowcomm_jax.programs import Recipe

PyTree = Any
log = logging.getLogger(__name__)


def coded(recipe: Recipe, likes: Sequence[PyTree]) -> Codec | None:
    """The method's codec as the exchange uses it: in slices where a two-shot sends less.

    `likes`: shapes of every fragment, or of a stage's part of it.
    """
    method, carrier, lies = recipe.method, recipe.carrier, recipe.regions.mesh.shape
    if method.codec is None or not method.reduces_all:
        return method.codec
    # Jobs of different meshes exchange the same slices.
    devices = 1 if carrier.always else lies["fsdp"] * lies["tensor"]
    return route(method.codec, likes, carrier.total, devices).codec


def in_stages(recipe: Recipe, shapes: dict[str, jax.ShapeDtypeStruct], likes) -> Codec | None:
    """The method's codec, at work in every pipeline stage on its own.

    Raises:
      ValueError: no leaf is cut over the stages.
    """
    regions, method = recipe.regions, recipe.method
    specs = {name: recipe.spec_fn(name, x) for name, x in shapes.items()} if recipe.spec_fn else {}
    if all(stage_axis(spec) is None for spec in specs.values()):
        raise ValueError(
            f"the mesh has {regions.mesh.shape[STAGE]} stages, but specs cut no leaf over them: "
            "train a models.Pipeline with its specs, or use stage=1"
        )
    if method.codec is None:
        return None
    staged = Staged(method.codec, regions.mesh, specs)
    parts = [staged.part(like) for like in likes]
    return dataclasses.replace(staged, codec=coded(recipe, parts))


def check_increments(method: Method, like: PyTree) -> None:
    """Refuse increments (`Codec.increments`) that the outer rule would take for the mean itself.

    Raises:
      ValueError: with the fix.
    """
    if method.codec is None or not method.codec.increments:
        return
    outer = method.outer
    if outer is None or not integrates(jax.eval_shape(outer.init, like)):
        raise ValueError(
            f"codec {method.codec.name}: its payloads are increments, and nothing sums them up; "
            "use outer=optax.chain(lowcomm_jax.compression.integrate(), your outer rule)"
        )


def warn_of_whole(method: Method, likes: Sequence[PyTree]) -> None:
    """Say which matrices a sparse codec does not shrink: a silent loss of all compression."""
    codec = method.codec
    while isinstance(codec, Wrapper):
        codec = codec.codec
    known = isinstance(codec, PerTensor)
    whole = [path for like in likes for path in codec.sent_whole(like)] if known else []
    if whole:
        log.warning(
            "codec %s sends all of %s: no divisors up to 64 of their sides make chunks of more "
            "than k values; pad a dimension to a multiple of 64, or give them a codec by rules",
            codec.name,
            ", ".join(dict.fromkeys(whole)),
        )
