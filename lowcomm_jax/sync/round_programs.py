"""Every compiled program of an engine, with its shardings and donations in one place.

`build` takes an engine's settings and a parameter layout, and gives `RoundPrograms`: jitted
functions of `train.inner_step` and `round_functions`, of which nothing is compiled yet.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.exchange import GroupExchange, MeshExchange
from lowcomm_jax.mesh import offload
from lowcomm_jax.mesh.regions import REGION, Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.params.fragments import Fragments
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.params.sharding import leaf_shardings, optimizer_shardings
from lowcomm_jax.refused import refuse
from lowcomm_jax.rules.merge import tensors
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import Inner, TrainState
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.sync.concurrent_exchange import ConcurrentExchange
from lowcomm_jax.sync.fit import TITLE, fitted
from lowcomm_jax.sync.gossip_step import gossip_step
from lowcomm_jax.sync.part_checks import idle_period
from lowcomm_jax.sync.round_functions import (
    RoundFunctions,
    is_narrow,
    recount,
    rounded,
    token_rate,
)
from lowcomm_jax.train.inner_step import InnerStep, make_inner_program

PyTree = Any
log = logging.getLogger(__name__)


class Family(Protocol):
    """What methods with a loop of their own bring: its compiled programs, and all that follows."""

    @staticmethod
    def check_optimizer(setup: Setup, layout: Layout) -> tuple[list[str], bool]:
        """`part_checks.optimizer_problems` of these methods."""
        ...

    @classmethod
    def make(
        cls, setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
    ) -> Family:
        """Make the programs of the core's parts, as `build` has made them.

        Args:
          inner_out: shardings of the inner state, and of metrics.
        """
        ...

    def initial_state(self, programs: RoundPrograms, params: PyTree, making: Any) -> TrainState:
        """`initial_state.initial_state` of these methods."""
        ...

    def loop(self, programs: RoundPrograms, weights: str | np.ndarray) -> Any:
        """A `sync_loop.Loop`, for all regions on one mesh."""


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
      concurrent: inner steps and the exchange of payloads in flight as one program; None where a
        landing's own program exchanges them.
      payload_program, outer_program, landing_program: `RoundFunctions.make_payload`, `outer_step`
        (of gossip `gossip_step`) and `landing_step`, compiled.
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
      programs: `RoundPrograms`, those of its family among them. A name is that of the field;
        `concurrent` has one program for each kind of payloads.
    """
    changes: dict[str, Any] = {}
    for name, value in vars(programs).items():
        if hasattr(value, "lower"):  # jitted
            changes[name] = make(value, name)
        elif name == "concurrent" and value is not None:
            changes[name] = value.each(make)
        elif name == "family" and value is not None:
            changes[name] = each(value, make)
    return dataclasses.replace(programs, **changes)


def build(setup: Setup, layout: Layout, family: type[Family] | None) -> RoundPrograms:
    """Make the programs for parameters of this layout; nothing is compiled yet.

    Args:
      family: of the method; None = it has none.

    Raises:
      Refused: everything that does not fit the parameters (`fit.fitted`).
    """
    fit, problems = fitted(setup, layout, family)
    refuse(TITLE, [problem.text for problem in problems])
    cut, exchange, method, specs = fit.cut, fit.exchange, fit.method, fit.specs
    regions, shapes = setup.placed, layout.train_shapes()
    here = {name: mask[list(setup.here)] for name, mask in fit.trained.items()}
    warn_of_whole(method, [cut.like(p) for p in range(len(cut))])
    apart = range(len(cut) if method.rules_differ else 1)
    rules_K = tuple((method.outer_of(p), method.landing_of(p)) for p in apart)
    functions = RoundFunctions(setup, exchange, method, rules_K, fit.trained)
    groups, outer_step = None, functions.outer_step
    if method.topology is not None:
        groups = GroupExchange(exchange, method.topology)
        outer_step = functools.partial(gossip_step, functions, groups)
    step = InnerStep(setup, layout, fit.gives_loss, method.metrics, here)
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
        family=None if family is None else family.make(setup, step, functions, out),
        inner_program=jax.jit(
            make_inner_program(step, regions),
            donate_argnums=0,
            static_argnames="single",
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
            outer_step,
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
    if idle := idle_period(setup.optimizer, layout.tree(shapes), method):
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


# -- warnings --------------------------------------------------------------------------------------


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
