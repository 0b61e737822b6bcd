"""What only the parameters' shapes can show: how they are cut and lie, and what does not fit them.

`fitted` makes a `Fit` of an engine's settings and a parameter layout, or lists everything that is
wrong. It takes no arrays, and compiles nothing but an optimizer's update of leaves of one entry,
where channels average first moments. So commands ask it before they read a corpus.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import integrates, route
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.stages import STAGE, stage_axis
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import step_seconds, sync_seconds
from lowcomm_jax.network.collectives import store_seconds
from lowcomm_jax.params.fragments import Fragments, partition
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.params.roles import trained_rows
from lowcomm_jax.params.sharding import SpecFn, fsdp_specs, optimizer_state
from lowcomm_jax.refused import Problem, Refused
from lowcomm_jax.rounds.job_traffic import JobTraffic
from lowcomm_jax.schedule import NetworkTiming
from lowcomm_jax.setup import Setup
from lowcomm_jax.sync.part_checks import optimizer_problems, part_problems

PyTree = Any
T = TypeVar("T")
TITLE = "these settings do not fit the parameters"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The settings of an engine on parameters of one layout.

    Attributes:
      cut: the trained leaves in fragments.
      specs: leaf name -> PartitionSpec inside a region.
      trained: leaf name -> bool `[R, ...]`, what each region of the run trains (`params.roles`).
      exchange: takes payloads to everyone and computes their mean.
      method: the setup's, with its schedule settled (`Schedule.settle`).
      gives_loss: whether the optimizer's update takes `value`, the step's loss.
    """

    cut: Fragments
    specs: dict[str, P]
    trained: dict[str, np.ndarray]
    exchange: MeshExchange
    method: Method
    gives_loss: bool


def fitted(setup: Setup, layout: Layout, family: Any) -> tuple[Fit | None, list[Problem]]:
    """The settings on parameters of this layout.

    Args:
      setup: settings in which the table (`refusals`) finds nothing wrong.
      family: of the method (`round_programs.Family`); None = it has none.

    Returns:
      (None, everything that does not fit, each thing once) or (the fit, []).
    """
    found: list[Problem] = []
    method, shapes = setup.method, layout.train_shapes()
    like, gives_loss = layout.tree(shapes), False
    cut, misfits = cut_of(setup, layout)
    found += misfits
    trained = _made(found, "parameters", lambda: trained_rows(method.roles, shapes, setup.regions))
    if _made(found, "inner", lambda: optimizer_state(setup.optimizer, like)) is not None:
        check = optimizer_problems if family is None else family.check_optimizer
        lines, gives_loss = check(setup, layout)
        found += [Problem("inner", line) for line in lines]
    specs = _specs(setup, shapes)
    lines = _averaged_problems(setup, layout) + _stage_problems(setup, specs)
    broken = [] if cut is None else part_problems(method, cut, setup.regions, setup.stacked)
    found += _of_parameters(lines + broken)
    if cut is None or broken:  # what follows calls the parts
        return None, list(dict.fromkeys(found))
    found += _of_parameters(_increment_problems(method, cut.like(0)))
    exchange = _made(found, "method", lambda: _exchange(setup, cut, specs))
    if exchange is None:
        return None, list(dict.fromkeys(found))
    settled, misfits = _settled(setup, exchange, cut)
    found = list(dict.fromkeys(found + misfits))
    if found or trained is None:
        return None, found
    return Fit(cut, specs, trained, exchange, settled, gives_loss), []


def cut_of(setup: Setup, layout: Layout) -> tuple[Fragments | None, list[Problem]]:
    """(the trained leaves in fragments, []) or (None, why they cannot be cut so).

    It reads the mesh and the method alone, so that a wrong number of regions does not matter.
    """
    found: list[Problem] = []
    shapes, method = layout.train_shapes(), setup.method
    stages = 1 if setup.mesh is None else setup.mesh.shape[STAGE]
    given = (method.schedule.fragments, method.pattern, method.rest, setup.stacked, stages)
    return _made(found, "fragments", lambda: partition(shapes, *given)), found


def _made(found: list[Problem], about: str, make: Callable[[], T]) -> T | None:
    """What `make()` gives; None where it refuses, and its lines join `found`."""
    try:
        return make()
    except Refused as error:
        found += [Problem(about, line) for line in error.lines]
    return None


def _of_parameters(lines: Sequence[str]) -> list[Problem]:
    return [Problem("parameters", line) for line in lines]


# -- where leaves lie, and how their payloads travel ----------------------------------------------


def _specs(setup: Setup, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, P]:
    spec_fn = setup.specs or _default_specs(setup)
    return {name: spec_fn(name, leaf) for name, leaf in shapes.items()}


def _default_specs(setup: Setup) -> SpecFn:
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


def _exchange(setup: Setup, cut: Fragments, specs: dict[str, P]) -> MeshExchange:
    method = setup.method
    # Dense payloads can be scaled where they are, once all norms are known there. With a delay
    # they may travel before that, beside inner steps.
    delayed = bool(np.any(method.schedule.delay))
    scaled = method.codec is None and not (setup.separate or delayed)
    return MeshExchange(
        setup.placed,
        method.codec,
        specs,
        method.reads == "payloads" or (method.reads == "norms" and not scaled),
        parts=_slices(setup, [cut.like(p) for p in range(len(cut))]),
        separate=setup.separate,
    )


def _slices(setup: Setup, likes: Sequence[PyTree]) -> int | None:
    """In how many slices coded payloads are reduced, where a two-shot sends less; None = whole.

    `likes`: shapes of every fragment.
    """
    method = setup.method
    whole = setup.separate and method.schedule.by_rounds  # they get payloads whole
    if method.codec is None or not method.reduces_all or whole or not method.codec.local:
        return None
    return setup.regions if route(method.codec, likes, setup.regions).name == "two_shot" else None


def _settled(setup: Setup, exchange: MeshExchange, cut: Fragments) -> tuple[Method, list[Problem]]:
    """(the method, its schedule settled by the network's timing, T_c and T_s of every payload;
    what is wrong with that schedule).
    """
    method, network = setup.method, setup.links
    apart = setup.separate and method.schedule.by_rounds
    if network is None:
        return method, []
    traffic = MeshExchange.traffic
    if setup.separate:
        traffic = JobTraffic(setup.regions, setup.exchange.region).of_payloads

    def seconds(fragment: int, level: int) -> float:
        if apart:
            return store_seconds(network, exchange.at(level).nbytes(cut.like(fragment)))
        everyone, like = np.ones(setup.placed.count, bool), cut.like(fragment)
        booked = traffic(exchange.at(level), like, everyone, None, 0)
        return sync_seconds(network, booked.nbytes, booked.route)

    schedule = method.schedule.settle(NetworkTiming(step_seconds(network), seconds))
    wrong = [Problem("method", line) for line in schedule.violations(setup.regions)]
    return dataclasses.replace(method, schedule=schedule), wrong


# -- what does not fit ----------------------------------------------------------------------------


def _stage_problems(setup: Setup, specs: dict[str, P]) -> list[str]:
    """A mesh with stages over which no leaf is cut."""
    stages = setup.placed.mesh.shape[STAGE]
    if stages == 1 or any(stage_axis(spec) is not None for spec in specs.values()):
        return []
    return [
        f"the mesh has {stages} stages, but specs cut no leaf over them: "
        "train a models.Pipeline with its specs, or use stage=1"
    ]


def _averaged_problems(setup: Setup, layout: Layout) -> list[str]:
    """Leaves of role `average` where no send has the mean of all regions."""
    method = setup.method
    why = "of all regions at once, and this job is one region" if setup.separate else None
    if method.topology is not None:
        why = "of all regions, which gossip has not"
    if method.base == "received":
        why = f"of all regions at once, and {method.name} sends one by one"
    if not method.has_anchor:
        why = f"that travels with pseudo-gradients, which {method.name} does not send"
    names = [name for name, role in zip(layout.names, layout.roles) if role == "average"]
    if why is None or not names:
        return []
    return [f"leaves {names} of role 'average' need a mean {why}: give them the role 'local'"]


def _increment_problems(method: Method, like: PyTree) -> list[str]:
    """Increments (`Codec.increments`) that the outer rule would take for the mean itself."""
    if method.codec is None or not method.codec.increments:
        return []
    outer = method.outer_of(0)
    if outer is not None and integrates(jax.eval_shape(outer.init, like)):
        return []
    return [
        f"codec {method.codec.name}: its payloads are increments, and nothing sums them up; "
        "use outer=optax.chain(lowcomm_jax.compression.integrate(), outer)"
    ]
