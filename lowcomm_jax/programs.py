"""Every compiled program of an engine, with its shardings and donations in one place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax import offload
from lowcomm_jax.accumulating import make_accumulating_program
from lowcomm_jax.carrying import Carrier
from lowcomm_jax.coding import check_increments, coded, in_stages, warn_of_whole
from lowcomm_jax.exchange import GroupExchange, MeshExchange
from lowcomm_jax.fragments import Fragments, partition
from lowcomm_jax.gossip_rounds import GossipRounds
from lowcomm_jax.gradient import make_gradient_program
from lowcomm_jax.guard import Guard
from lowcomm_jax.inner import InnerStep, make_inner_program
from lowcomm_jax.layout import Layout
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import Network, step_seconds, sync_seconds
from lowcomm_jax.regions import REGION, Regions
from lowcomm_jax.rounds import Rounds
from lowcomm_jax.schedule import Timing
from lowcomm_jax.sharding import SpecFn, fsdp_specs, leaf_shardings, optimizer_shardings
from lowcomm_jax.stages import STAGE
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
    network: Network | None
    offload: bool
    routed: bool  # the loss function moves values between regions
    carrier: Carrier


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions of one engine for one parameter layout.

    `method` is the recipe's with its schedule settled (`Schedule.settle`). `block` runs inner
    steps (`inner.make_inner_program`, or, for methods that exchange gradients,
    `gradient.make_gradient_program`); `accumulating` runs steps of several microbatches (None with
    gradient exchange); the rest are the methods of `rounds.Rounds`.
    """

    recipe: Recipe
    method: Method
    step: InnerStep
    exchange: MeshExchange
    fragments: Fragments
    specs: dict[str, P]
    block: Callable
    accumulating: Callable | None
    send: Callable
    move: Callable
    adopt: Callable
    restart: Callable
    receive: Callable
    average: Callable
    drift: Callable
    mean_header: Callable

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
      ValueError: the parameters cannot be cut as the method asks (`fragments.partition`), what the
        schedule draws from the network does not fit it, the mesh has stages that nothing lies in,
        the codec cannot work in stages, or the outer rule does not sum up its increments.
    """
    regions, method, shapes = recipe.regions, recipe.method, layout.train_shapes()
    schedule = method.schedule
    stages = regions.mesh.shape[STAGE]
    cut = partition(shapes, schedule.fragments, method.pattern, method.rest, recipe.stacked, stages)
    likes = [cut.like(p) for p in range(len(cut))]
    check_increments(method, likes[0])
    warn_of_whole(method, likes)
    codec = in_stages(recipe, shapes, likes) if stages > 1 else coded(recipe, likes)
    exchange = MeshExchange(regions, codec, recipe.stacked)
    spec_fn = recipe.spec_fn or default_specs(exchange)
    specs = {name: spec_fn(name, leaf) for name, leaf in shapes.items()}
    method = settled(method, exchange, cut, recipe)
    parts = (regions, exchange, method, recipe.guard, specs)
    if method.topology is None:
        rounds = Rounds(*parts)
    else:
        groups = GroupExchange(regions, method.topology, exchange.codec, recipe.stacked)
        rounds = GossipRounds(*parts, groups)
    step = InnerStep(
        recipe.loss_fn,
        recipe.inner,
        layout,
        recipe.seed,
        recipe.accumulate,
        recipe.skip_nonfinite,
    )
    block, accumulating = _inner_programs(recipe, step, rounds, specs)
    programs = Programs(
        recipe=recipe,
        method=method,
        step=step,
        exchange=exchange,
        fragments=cut,
        specs=specs,
        block=block,
        accumulating=accumulating,
        send=jax.jit(rounds.send, static_argnames=("keep", "level"), donate_argnames="codec_state"),
        move=jax.jit(
            rounds.move,
            donate_argnames=("anchor", "outer_state", "codec_state"),
            static_argnames=("if_news", "level"),
        ),
        adopt=jax.jit(rounds.adopt, donate_argnames=("params", "landing_state")),
        restart=jax.jit(rounds.restart),
        receive=jax.jit(rounds.receive, donate_argnames="received"),
        average=jax.jit(rounds.average_buffers, donate_argnames="buffers"),
        drift=jax.jit(rounds.drift, static_argnames="names_K"),
        mean_header=jax.jit(rounds.mean_header),
    )
    return offloaded(programs) if recipe.offload else programs


def _inner_programs(recipe: Recipe, step: InnerStep, rounds: Rounds, specs):
    """(`block`, `accumulating`) of `Programs`."""
    if recipe.method.signal == "gradient":
        block = make_gradient_program(step, rounds)
        return jax.jit(block, donate_argnums=0, static_argnames="single"), None
    block = jax.jit(
        make_inner_program(step, recipe.regions),
        donate_argnums=0,
        static_argnames="single",
        out_shardings=_inner_out(recipe, step, specs),
    )
    return block, accumulating_program(recipe, step, specs)


def accumulating_program(
    recipe: Recipe, step: InnerStep, specs: dict[str, P], replicas: int = 1
) -> Callable:
    """`Programs.accumulating`; or over several replicas of every region, stacked and `apart`."""
    regions = recipe.regions.stacked(replicas)
    program = make_accumulating_program(step, regions, apart=replicas > 1)
    return jax.jit(program, donate_argnums=0, out_shardings=_inner_out(recipe, step, specs))


def _inner_out(recipe: Recipe, step: InnerStep, specs: dict[str, P]):
    """Where the results of inner steps lie: (inner state, metrics)."""
    layout = step.layout
    inner = inner_shardings(recipe, layout, layout.train_shapes(), specs)
    return inner, recipe.regions.sharding(REGION)


def offloaded(programs: Programs) -> Programs:
    """The programs around state that lives on the host (`initial.initial_state` puts it there)."""
    return dataclasses.replace(
        programs,
        send=offload.around(programs.send, (1, 2), offload.stow_sent),
        move=offload.around(programs.move, (0, 1, 6), offload.stow_moved),
        adopt=offload.around(programs.adopt, (1, 3)),
        restart=offload.around(programs.restart, (1,)),
        receive=offload.around(programs.receive, (0, 1), offload.stow),
        drift=offload.around(programs.drift, (1,)),
    )


def default_specs(exchange: MeshExchange) -> SpecFn:
    """FSDP on the longest axis, or, where a codec then finds whole blocks, on the rows."""
    devices = exchange.regions.mesh.shape["fsdp"]
    longest = fsdp_specs(devices)
    return longest if devices == 1 or exchange.codec is None else exchange.rows.first(longest)


def settled(method: Method, exchange: MeshExchange, cut: Fragments, recipe: Recipe) -> Method:
    """The method with what its schedule draws from the network: T_c, and T_s of every payload.

    Raises:
      ValueError: the settled schedule cannot work.
    """
    network = recipe.network
    if network is None:
        return method

    def seconds(fragment: int, level: int) -> float:
        everyone, like = np.ones(recipe.regions.count, bool), cut.like(fragment)
        traffic = recipe.carrier.traffic(exchange.at(level), like, everyone, None, 0)
        return sync_seconds(network, traffic.nbytes, traffic.route)

    schedule = method.schedule.settle(Timing(step_seconds(network), seconds))
    problems = schedule.violations(recipe.carrier.total)
    if problems:
        raise ValueError("this network and method do not fit:\n- " + "\n- ".join(problems))
    return dataclasses.replace(method, schedule=schedule)


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
