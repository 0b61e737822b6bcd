"""Every compiled program of an engine, with its shardings and donations in one place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.fragments import Fragments, partition
from lowcomm_jax.gradient import make_gradient_program
from lowcomm_jax.guard import Guard
from lowcomm_jax.inner import InnerStep, make_inner_program
from lowcomm_jax.layout import Layout
from lowcomm_jax.methods.base import Method
from lowcomm_jax.regions import REGION, Regions
from lowcomm_jax.rounds import Rounds
from lowcomm_jax.sharding import SpecFn, fsdp_specs, leaf_shardings, optimizer_shardings
from lowcomm_jax.state import Inner

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the user asked for; the same for every parameter layout."""

    loss_fn: Callable
    inner: optax.GradientTransformation  # with gradient exchange, behind the method's outer rule
    method: Method
    regions: Regions
    guard: Guard
    spec_fn: SpecFn | None
    stacked: tuple[str, ...]
    seed: int
    accumulate: int
    skip_nonfinite: bool


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions of one engine for one parameter layout.

    `block` runs inner steps (`inner.make_inner_program`, or, for methods that exchange gradients,
    `gradient.make_gradient_program`); the rest are the methods of `rounds.Rounds`.
    """

    recipe: Recipe
    step: InnerStep
    exchange: MeshExchange
    fragments: Fragments
    specs: dict[str, P]
    block: Callable
    send: Callable
    move: Callable
    adopt: Callable
    restart: Callable
    receive: Callable
    average: Callable

    def averaged(self) -> dict[str, int]:
        """Name -> bytes of each leaf of role `average`, as it travels (fp32)."""
        layout = self.step.layout
        described = zip(layout.names, layout.roles, layout.shapes)
        return {n: 4 * math.prod(s) for n, role, s in described if role == "average"}

    def averaged_bytes(self) -> int:
        return sum(self.averaged().values())


def build(recipe: Recipe, layout: Layout) -> Programs:
    """Make the programs for parameters of this layout; nothing is compiled yet.

    Raises:
      ValueError: the parameters cannot be cut as the method asks (`fragments.partition`).
    """
    regions, method, shapes = recipe.regions, recipe.method, layout.train_shapes()
    spec_fn = recipe.spec_fn or fsdp_specs(regions.mesh.shape["fsdp"])
    specs = {name: spec_fn(name, leaf) for name, leaf in shapes.items()}
    schedule = method.schedule
    cut = partition(shapes, schedule.fragments, method.pattern, method.rest, recipe.stacked)
    exchange = MeshExchange(regions, method.codec)
    rounds = Rounds(regions, exchange, method, recipe.guard, specs)
    step = InnerStep(
        recipe.loss_fn,
        recipe.inner,
        layout,
        recipe.seed,
        recipe.accumulate,
        recipe.skip_nonfinite,
    )
    if method.signal == "gradient":
        block = make_gradient_program(step, rounds)
        block = jax.jit(block, donate_argnums=0, static_argnames="single")
    else:
        out = (inner_shardings(recipe, layout, shapes, specs), regions.sharding(REGION))
        block = make_inner_program(step, regions)
        block = jax.jit(block, donate_argnums=0, static_argnames="single", out_shardings=out)
    return Programs(
        recipe=recipe,
        step=step,
        exchange=exchange,
        fragments=cut,
        specs=specs,
        block=block,
        send=jax.jit(rounds.send, static_argnames="keep", donate_argnames="codec_state"),
        move=jax.jit(
            rounds.move,
            donate_argnames=("anchor", "outer_state", "codec_state"),
            static_argnames="if_news",
        ),
        adopt=jax.jit(rounds.adopt, donate_argnames=("params", "landing_state")),
        restart=jax.jit(rounds.restart),
        receive=jax.jit(rounds.receive, donate_argnames="received"),
        average=jax.jit(rounds.average_buffers, donate_argnames="buffers"),
    )


def inner_shardings(recipe: Recipe, layout: Layout, shapes, specs) -> Inner:
    """Shardings of the regions' private state."""
    regions = recipe.regions
    region = regions.sharding(REGION)
    opt = optimizer_shardings(
        recipe.inner, layout.tree(shapes), layout.tree(specs), regions, REGION
    )
    return Inner(
        params=leaf_shardings(regions, REGION, specs),
        buffers=region,
        opt=opt,
        step=region,
        tokens=region,
    )
