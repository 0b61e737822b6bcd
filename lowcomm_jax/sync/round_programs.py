"""Every compiled program of an engine, with its shardings and donations in one place.

`build` takes an engine's settings and a parameter layout, and gives `RoundPrograms`: jitted
functions of `train.inner_step` and `round_functions`, of which nothing is compiled yet.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import integrates, route
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.exchange import GroupExchange, MeshExchange
from lowcomm_jax.exchange.traffic import Traffic
from lowcomm_jax.mesh import offload
from lowcomm_jax.mesh.regions import REGION, Regions
from lowcomm_jax.mesh.stages import STAGE, stage_axis
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import step_seconds, sync_seconds
from lowcomm_jax.network.collectives import store_seconds
from lowcomm_jax.params.fragments import Fragments, partition
from lowcomm_jax.params.layout import UNFIT, Layout
from lowcomm_jax.params.roles import trained_rows
from lowcomm_jax.params.sharding import SpecFn, fsdp_specs, leaf_shardings, optimizer_shardings
from lowcomm_jax.refused import Refused, refuse
from lowcomm_jax.rules.merge import tensors
from lowcomm_jax.schedule import Timing
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import Inner, TrainState
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.sync.concurrent_exchange import ConcurrentExchange
from lowcomm_jax.sync.part_checks import (
    idle_period,
    moment_problems,
    optimizer_problems,
    part_problems,
)
from lowcomm_jax.sync.round_functions import (
    GossipRoundFunctions,
    OutlierGuard,
    RoundFunctions,
    is_narrow,
    recount,
    rounded,
    token_rate,
)
from lowcomm_jax.train.inner_step import InnerStep, make_accumulating_program, make_inner_program

PyTree = Any
TrafficFn = Callable[..., Traffic]
log = logging.getLogger(__name__)


class Family(Protocol):
    """What methods with a loop of their own bring: its compiled programs, and all that follows."""

    def each(self, make: Callable[[Callable, str], Callable]) -> Family:
        """As `each`."""
        ...

    def initial_state(self, programs: RoundPrograms, params: PyTree) -> TrainState:
        """`initial_state.initial_state` of these methods."""
        ...

    def placed_state(self, programs: RoundPrograms, state: TrainState) -> TrainState:
        """`initial_state.placed_state` of these methods."""
        ...

    def loop(self, programs: RoundPrograms, weights: str | np.ndarray) -> Any:
        """A `sync_loop.Loop`, for all regions on one mesh."""


class MakeFamily(Protocol):
    """Makes a family's programs of the core's parts, as `build` has made them."""

    def __call__(
        self, setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
    ) -> Family:
        """`inner_out`: shardings of the inner state, and of metrics.

        Raises:
          ValueError: lists what cannot work with these parameters and this optimizer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RoundPrograms:
    """Jitted functions of one engine for one parameter layout.

    Attributes:
      setup: settings of the engine.
      method: the setup's, with its schedule settled (`Schedule.settle`).
      step: one region's inner step.
      exchange: takes payloads to everyone and computes their mean.
      groups: does so within a round's groups; None for methods without a topology.
      fragments: how trained leaves are cut.
      specs: leaf name -> PartitionSpec inside a region.
      family: of a method with a loop of its own; None = its loop is `SyncLoop`.
      inner_program: a block of inner steps (`inner_step.make_inner_program`).
      microbatch_program: the same for steps of several microbatches
        (`inner_step.make_accumulating_program`).
      concurrent: inner steps and the exchange of payloads in flight as one program; None where a
        landing's own program exchanges them.
      payload_program, outer_program, landing_program: `RoundFunctions.make_payload`, `outer_step`
        and `landing_step`, compiled.
      restart_program, received_program, average_program, drift_program, header_program:
        `RoundFunctions.restart`, `mark_received`, `average_buffers`, `drift`, `mean_header`.
      token_rate_program, recount_program: `round_functions.token_rate` and `recount`.
      copy_program: copies an array that is donated later.
    """

    setup: Setup
    method: Method
    step: InnerStep
    exchange: MeshExchange
    groups: GroupExchange | None
    fragments: Fragments
    specs: dict[str, P]
    family: Family | None
    inner_program: Callable
    microbatch_program: Callable
    concurrent: ConcurrentExchange | None
    payload_program: Callable
    outer_program: Callable
    landing_program: Callable
    restart_program: Callable
    received_program: Callable
    average_program: Callable
    drift_program: Callable
    header_program: Callable
    token_rate_program: Callable
    recount_program: Callable
    copy_program: Callable

    @property
    def regions(self) -> Regions:
        """The regions of this job on its mesh."""
        return self.setup.placed

    def averaged(self) -> dict[str, int]:
        """Name -> bytes of each leaf of role `average`, as it travels (fp32)."""
        layout = self.step.layout
        described = zip(layout.names, layout.roles, layout.shapes)
        return {n: 4 * math.prod(s) for n, role, s in described if role == "average"}

    def averaged_bytes(self) -> int:
        return sum(self.averaged().values())

    def norms(self, fragment: int) -> int:
        """Norms that travel with a fragment's payload: of each tensor, or 0 of them."""
        if self.method.reads != "norms":
            return 0
        return tensors(self.fragments.like(fragment), self.setup.stacked)


def each(programs: Any, make: Callable[[Callable, str], Callable]) -> Any:
    """The same programs, with `make(program, name)` in the place of each compiled one.

    Args:
      programs: `RoundPrograms`, or a family's. A name is that of the field; `concurrent` has one
        program for each kind of payloads.
    """
    changes: dict[str, Any] = {}
    for name, value in vars(programs).items():
        if hasattr(value, "lower"):  # jitted
            changes[name] = make(value, name)
        elif hasattr(value, "each"):
            changes[name] = value.each(make)
    return dataclasses.replace(programs, **changes)


def build(
    setup: Setup,
    layout: Layout,
    traffic: TrafficFn = MeshExchange.traffic,
    family: MakeFamily | None = None,
) -> RoundPrograms:
    """Make the programs for parameters of this layout; nothing is compiled yet.

    Args:
      traffic: bytes of an exchange, as `MeshExchange.traffic`.
      family: of the method; None = it has none.

    Raises:
      ValueError: one of these. The parameters cannot be cut as the method asks
        (`params.fragments.partition`), or do not fit its roles (`params.roles`). Parts of the
        method break their contract (`part_problems`). The network's timing does not fit the
        schedule. The mesh has stages, and no leaf is cut over them. The codec cannot work in
        stages. The codec sends increments, and the outer rule does not sum them up.
    """
    regions, method, shapes = setup.placed, setup.method, layout.train_shapes()
    schedule = method.schedule
    stages = regions.mesh.shape[STAGE]
    cut = partition(shapes, schedule.fragments, method.pattern, method.rest, setup.stacked, stages)
    like = layout.tree(shapes)
    unfit, gives_loss = optimizer_problems(setup.optimizer, like, method)
    unfit = unfit or moment_problems(setup.optimizer, like, method, gives_loss)
    if problems := part_problems(method, cut, setup.regions, setup.stacked) + unfit:
        raise Refused(f"parts of {method.name} cannot work", problems)
    likes = [cut.like(p) for p in range(len(cut))]
    trained_R = trained_rows(method.roles, shapes, setup.regions)
    here = {name: mask[list(setup.here)] for name, mask in trained_R.items()}
    check_averaged(setup, layout)
    check_increments(method, likes[0])
    warn_of_whole(method, likes)
    spec_fn = setup.specs or default_specs(setup)
    specs = {name: spec_fn(name, leaf) for name, leaf in shapes.items()}
    if stages > 1:
        check_stages(stages, specs)
    # Dense payloads can be scaled where they are, once all norms are known there. With a delay
    # they may travel before that, beside inner steps.
    delayed = bool(np.any(schedule.delay))
    scaled = method.codec is None and not (setup.separate or delayed)
    exchange = MeshExchange(
        regions,
        method.codec,
        specs,
        method.reads == "payloads" or (method.reads == "norms" and not scaled),
        parts=slices(setup, likes),
        separate=setup.separate,
    )
    method = settled(setup, exchange, cut, traffic)
    apart = range(len(cut) if method.rules_differ else 1)
    rules_K = tuple((method.outer_of(p), method.landing_of(p)) for p in apart)
    parts = (
        regions,
        exchange,
        method,
        OutlierGuard(setup.outlier_factor, setup.max_update_norm),
        setup.stacked,
        setup.codec_error,
        rules_K,
        trained_R,
        setup.here,
    )
    groups, functions = None, RoundFunctions(*parts)
    if method.topology is not None:
        groups = GroupExchange(exchange, method.topology)
        functions = GossipRoundFunctions(*parts, groups=groups)
    step = InnerStep(
        setup.loss_fn,
        setup.optimizer,
        layout,
        setup.accumulate,
        setup.skip_nonfinite,
        gives_loss,
        tuple(f"{c.name}_{k}" for c in method.channels for k in ("left_out", "spread")),
        here,
    )
    inner = inner_shardings(setup, layout, shapes, specs)
    out, options = (inner, regions.sharding(REGION)), inner_options(regions)
    programs = RoundPrograms(
        setup=setup,
        method=method,
        step=step,
        exchange=exchange,
        groups=groups,
        fragments=cut,
        specs=specs,
        family=None if family is None else family(setup, step, functions, out),
        inner_program=jax.jit(
            make_inner_program(step, regions),
            donate_argnums=0,
            static_argnames="single",
            out_shardings=out,
            compiler_options=options,
        ),
        microbatch_program=jax.jit(
            make_accumulating_program(step, regions),
            donate_argnums=0,
            out_shardings=out,
            compiler_options=options,
        ),
        concurrent=(ConcurrentExchange(step, regions, exchange, out) if setup.concurrent else None),
        payload_program=jax.jit(
            functions.make_payload,
            static_argnames=("with_snapshot", "level"),
            donate_argnames="codec_state",
        ),
        outer_program=jax.jit(
            functions.outer_step,
            donate_argnames="held",
            static_argnames=("if_news", "level", "rules"),
        ),
        landing_program=jax.jit(
            functions.landing_step,
            donate_argnames="own",
            static_argnames="rules",
        ),
        restart_program=jax.jit(functions.restart),
        received_program=jax.jit(functions.mark_received, donate_argnames="received"),
        average_program=jax.jit(functions.average_buffers, donate_argnames="buffers"),
        drift_program=jax.jit(functions.drift, static_argnames="names_K"),
        header_program=jax.jit(functions.mean_header),
        token_rate_program=jax.jit(token_rate),
        recount_program=jax.jit(recount),
        copy_program=jax.jit(jnp.copy),
    )
    warn_of_narrow(method, shapes)
    if idle := idle_period(setup.optimizer, like, method):
        log.warning("%s", idle)
    return offloaded(programs) if setup.offload else programs


def offloaded(programs: RoundPrograms) -> RoundPrograms:
    """The programs around state that lives on the host (`initial_state` puts it there)."""
    return dataclasses.replace(
        programs,
        payload_program=offload.around(programs.payload_program, (1, 2), offload.stow_sent),
        outer_program=offload.around(programs.outer_program, (0,), offload.stow_anchor_update),
        landing_program=offload.around(programs.landing_program, (1,)),
        restart_program=offload.around(programs.restart_program, (1,)),
        received_program=offload.around(programs.received_program, (0, 1, 2), offload.stow),
        drift_program=offload.around(programs.drift_program, (1,)),
    )


def default_specs(setup: Setup) -> SpecFn:
    """FSDP on the longest axis, or, where a codec then finds whole units, on the rows."""
    sizes = setup.placed.mesh.shape
    devices = sizes["fsdp"]
    longest = fsdp_specs(devices)
    codec = None if setup.method.codec is None else per_tensor(setup.method.codec)
    if devices == 1 or codec is None:
        return longest

    def spec(name: str, leaf: jax.ShapeDtypeStruct) -> P:
        row = int(codec.is_stacked(name))
        if len(leaf.shape) <= max(row, 1) or leaf.shape[row] % devices:
            return longest(name, leaf)
        by_rows = P(*(None,) * row, "fsdp")
        place = codec.placed({name: leaf}, {name: by_rows}, sizes, False).places[name]
        return longest(name, leaf) if place.moves or place.gathers else by_rows

    return spec


def settled(setup: Setup, exchange: MeshExchange, cut: Fragments, traffic: TrafficFn) -> Method:
    """The method, its schedule settled by the network's timing: T_c, and T_s of every payload.

    Raises:
      ValueError: the settled schedule cannot work.
    """
    method, network = setup.method, setup.links
    apart = setup.separate and method.schedule.by_rounds
    if network is None:
        return method

    def seconds(fragment: int, level: int) -> float:
        if apart:
            return store_seconds(network, exchange.at(level).nbytes(cut.like(fragment)))
        everyone, like = np.ones(setup.placed.count, bool), cut.like(fragment)
        booked = traffic(exchange.at(level), like, everyone, None, 0)
        return sync_seconds(network, booked.nbytes, booked.route)

    schedule = method.schedule.settle(Timing(step_seconds(network), seconds))
    problems = schedule.violations(setup.regions)
    refuse("this network and method do not fit", problems)
    return dataclasses.replace(method, schedule=schedule)


def inner_shardings(setup: Setup, layout: Layout, shapes, specs) -> Inner:
    """Shardings of the regions' private state."""
    regions, kept = setup.placed, rounded(setup.method, shapes)
    region = regions.sharding(REGION)
    opt = optimizer_shardings(
        setup.optimizer, layout.tree(shapes), layout.tree(specs), regions, REGION
    )
    return Inner(
        params=leaf_shardings(regions, REGION, specs),
        buffers=region,
        opt=opt,
        step=region,
        tokens=region,
        rounding=leaf_shardings(regions, REGION, {k: specs[k] for k in kept}),
    )


# -- checks of the codec, the stages and the leaves ----------------------------------------------


def slices(setup: Setup, likes: Sequence[PyTree]) -> int | None:
    """In how many slices coded payloads are reduced, where a two-shot sends less; None = whole.

    `likes`: shapes of every fragment.
    """
    method = setup.method
    whole = setup.separate and method.schedule.by_rounds  # they get payloads whole
    if method.codec is None or not method.reduces_all or whole or not method.codec.local:
        return None
    return setup.regions if route(method.codec, likes, setup.regions).name == "two_shot" else None


def check_stages(stages: int, specs: dict[str, P]) -> None:
    """Refuse a mesh with stages over which no leaf is cut.

    Raises:
      ValueError: there is none.
    """
    if all(stage_axis(spec) is None for spec in specs.values()):
        raise ValueError(
            f"the mesh has {stages} stages, but specs cut no leaf over them: "
            "train a models.Pipeline with its specs, or use stage=1"
        )


def check_averaged(setup: Setup, layout: Layout) -> None:
    """Refuse leaves of role `average` where no send has the mean of all regions.

    Raises:
      Refused: there are some.
    """
    method = setup.method
    why = "of all regions at once, and this job is one region" if setup.separate else None
    if method.topology is not None:
        why = "of all regions, which gossip has not"
    if method.base == "received":
        why = f"of all regions at once, and {method.name} sends one by one"
    names = [name for name, role in zip(layout.names, layout.roles) if role == "average"]
    if why is not None and names:
        fix = "give them the role 'local'"
        refuse(UNFIT, [f"leaves {names} of role 'average' need a mean {why}: {fix}"])


def check_increments(method: Method, like: PyTree) -> None:
    """Refuse increments (`Codec.increments`) that the outer rule would take for the mean itself.

    Raises:
      ValueError: the outer rule has no `compression.integrate`.
    """
    if method.codec is None or not method.codec.increments:
        return
    outer = method.outer_of(0)
    if outer is None or not integrates(jax.eval_shape(outer.init, like)):
        raise ValueError(
            f"codec {method.codec.name}: its payloads are increments, and nothing sums them up; "
            "use outer=optax.chain(lowcomm_jax.compression.integrate(), outer)"
        )


def warn_of_narrow(method: Method, shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Log a warning on leaves that inner steps round; those of gradients step in fp32."""
    narrow = [k for k, x in shapes.items() if is_narrow(x.dtype)]
    if narrow and method.signal == "progress":
        kinds = ", ".join(sorted({shapes[k].dtype.name for k in narrow}))
        log.warning(
            "%d of %d trained leaves are below fp32 (%s): an inner step that moves a value by less "
            "than half of its last digit is lost there; to keep such steps train fp32 leaves, and "
            "cast them in loss_fn",
            len(narrow),
            len(shapes),
            kinds,
        )


def warn_of_whole(method: Method, likes: Sequence[PyTree]) -> None:
    """Log a warning on matrices that a sparse codec sends whole."""
    codec = None if method.codec is None else per_tensor(method.codec)
    whole = [] if codec is None else [path for like in likes for path in codec.sent_whole(like)]
    if whole:
        log.warning(
            "codec %s sends all of %s: their chunks hold at most k values; lower k, or give them "
            "a codec by rules",
            codec.name,
            ", ".join(dict.fromkeys(whole)),
        )
