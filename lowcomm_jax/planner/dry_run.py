"""A dry run: the engine's own loop on shapes, which gives the events and bytes of a run to come.

`rehearse` builds the programs of an engine, and `Rehearsal.play` lets its loop decide, send, move
and adopt. Nothing is computed: in the place of every program (`round_programs.each`) stands a
function that hands its arguments back. Bytes, routes and steps are therefore those of a run, for
any method and codec. What the host reads of computed values is the scenario's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.engine import Engine
from lowcomm_jax.history import Event
from lowcomm_jax.loops.channel_loop import ChannelLoop
from lowcomm_jax.mesh.regions import make_mesh
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network.links import Network
from lowcomm_jax.params.fragments import is_stacked, layer_stacks
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.schedule import Schedule
from lowcomm_jax.settings import described
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import abstract_state
from lowcomm_jax.sync.round_functions import RegionState
from lowcomm_jax.sync.round_programs import RoundPrograms, each
from lowcomm_jax.sync.sync_loop import Loop, Steps, SyncLoop
from lowcomm_jax.train.batch_blocks import BatchBlock

PyTree = Any
_OF_VALUES = ("rounds", "boundary", "measured", "known")  # of `decided`
PERIODS = 3  # that are measured, after one period and the overlap


@described
@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a run would measure, and a plan has to assume."""

    rank: Annotated[
        float | None,
        "DiLoCoX: the measured rank of every mean; None = at least the rank that was sent, so that "
        "rounds keep their length and payloads are largest.",
    ] = None
    rates: Annotated[
        tuple[float, ...] | None,
        "CoCoDC: how fast each fragment changes, of methods with as many fragments. None, and of "
        "others, all alike, so that they take turns.",
    ] = None

    def text(self) -> str:
        """What is assumed, in one line."""
        rank = "as sent" if self.rank is None else f"{self.rank:g}"
        rates = "all alike" if self.rates is None else ", ".join(f"{x:g}" for x in self.rates)
        return (
            f"assumed: measured ranks {rank}; fragments change {rates}; everyone takes part and "
            "counts; trainers do not merge and keep their first batch"
        )


@dataclasses.dataclass(frozen=True)
class Sent:
    """One payload.

    Attributes:
      step: inner step after which it leaves.
      waits: the step before which it must have arrived.
      fragment: as in `history.Event`.
      nbytes: of one region's payload.
      route: of `network.routes`.
      layers: {layer: share of the payload}.
    """

    step: int
    waits: int
    fragment: int
    nbytes: int
    route: str
    layers: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Played:
    """What a method does in steady periods.

    Attributes:
      events: of all played steps.
      sends: the payloads that leave in them.
      warm, steps: steps `warm` + 1 to `steps` are measured.
      sent_a_step: bytes that a region sends in a step, of the region that sends most.
      flying: most payloads on their way after one step, in bytes of one region.
      snapshots: values that are kept beside them until they land, of one region.
      kept: {name: bytes that a region keeps for each parameter}, of all trainers.
      repeats: whether the measured steps are a cycle; else figures are means over them.
    """

    events: tuple[Event, ...]
    sends: tuple[Sent, ...]
    warm: int
    steps: int
    sent_a_step: float
    flying: int
    snapshots: int
    kept: dict[str, float]
    repeats: bool


def period_of(method: Method) -> int:
    """Inner steps between two sends of the same values; 1 = gradients every step."""
    if method.signal == "gradient":
        return 1
    if method.has_anchor:
        return method.schedule.period
    return min(channel.every for channel in method.channels)


def tau_of(method: Method) -> int:
    """Inner steps from a send to its landing; the period = one whole round."""
    late = method.schedule.land_after_send and method.has_anchor
    return period_of(method) if late else int(np.max(method.schedule.delay))


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """A method on shapes of parameters, whose periods can be played; `rehearse` makes it.

    Attributes:
      method: as given; its trainers share one engine.
      engine, programs: the programs compute nothing.
      state: the first one, in shapes.
      kept: see `Played`.
      scenario, stacked: as given.
    """

    method: Method
    engine: Engine
    programs: RoundPrograms
    state: TrainState
    kept: dict[str, float]
    scenario: Scenario
    stacked: Sequence[str]

    def play(self, schedule: Schedule | None = None) -> Played:
        """Play the method's steady periods.

        Args:
          schedule: None = the method's own. Another one of its class, settled and with as many
            fragments, on which neither programs nor payloads depend, spares what `rehearse` takes.
        """
        method, programs, state = self.method, self.programs, self.state
        if schedule is not None:
            method = dataclasses.replace(method, schedule=schedule)
            acts = dataclasses.replace(programs.method, schedule=schedule)
            programs = dataclasses.replace(programs, method=acts)
        loop, trainers = self._loop(programs), method.trainer_count
        state = state.replace(counters=state.counters.copy())
        warm, steps = _measured(method, loop, self.scenario)
        events, everyone, keys, sent = [], np.ones(loop.count, bool), {}, {}
        flying = snapshots = 0
        while (now := int(state.counters.step)) < steps:
            to = min(now + loop.next_event(state, steps - now), warm if now < warm else steps)
            block = BatchBlock((), to - now, to - now)
            given = Steps(block, None, None, [everyone] * block.steps, False)
            state, _, inside, _ = loop.inner_steps(state, given)
            state, behind = loop.after(state, block.steps, everyone)
            events += [*inside, *behind]
            nbytes = {e.key: e.nbytes for e in events if e.kind == "send"}
            flying = max(flying, sum(nbytes.get(key, 0) for key in state.in_flight))
            beside = (f for f in state.in_flight.values() if f.snapshot is not None)
            snapshots = max(snapshots, sum(loop.fragments.numel(int(f.fragment)) for f in beside))
            keys[to], sent[to] = decides(state), state.counters.bytes_sent.copy()
        shares = [_layers(loop, p, self.stacked) for p in range(len(loop.fragments))]
        a_step = float((sent[steps] - sent[warm]).max()) / (steps - warm)
        return Played(
            events=tuple(events),
            sends=tuple(_sends(events, shares, steps, trainers)),
            warm=warm,
            steps=steps,
            sent_a_step=a_step * trainers,
            flying=flying * trainers,
            snapshots=snapshots * trainers,
            kept=self.kept,
            repeats=keys[warm] == keys[steps] and method.topology is None,
        )

    def _loop(self, programs: RoundPrograms) -> Loop:
        """The engine's loop; what regions would measure is the scenario's."""
        loop = self.engine.loop_of(programs)
        acts = loop.main if isinstance(loop, ChannelLoop) else loop
        if isinstance(acts, SyncLoop):
            acts.measurements = None
        return loop


def rehearse(
    method: Method,
    params: PyTree,
    regions: int,
    *,
    stacked: Sequence[str] = (),
    scenario: Scenario | None = None,
    network: Network | None = None,
    inner: optax.GradientTransformation | None = None,
) -> Rehearsal:
    """Build what plays a method on shapes of the parameters.

    Args:
      params: shapes of the user's parameters.
      stacked: see `Engine`; rows of a stack of layers (`layer_stacks`) are the layers.
      scenario: what a run would measure; None = its defaults.
      network: for schedules that it settles (`Schedule.needs_network`).
      inner: the optimizer; None = one with the state of Adam.

    Raises:
      ValueError: the engine refuses the method for these parameters or regions.
    """
    scenario = Scenario() if scenario is None else scenario
    single = dataclasses.replace(method, inner_batching=None, trainers=None)
    settles = network if method.schedule.needs_network else None
    engine = Engine(
        _no_loss,
        _TWO_MOMENTS if inner is None else inner,
        single,
        regions,
        mesh=make_mesh(1, devices=jax.devices()[:1]),  # so that no plan depends on the machine
        stacked=stacked,
        network=settles,
    )
    programs = engine.programs_for(make_layout(params, engine.setup.roles))
    rates = scenario.rates
    if rates is None or len(rates) != len(programs.fragments):
        rates = (1.0,) * len(programs.fragments)
    state = abstract_state(programs, params).replace(rate=np.asarray(rates, np.float32))
    kept = {k: each * method.trainer_count for k, each in _kept(method, state, params).items()}
    dry = _dry(programs, scenario)
    return Rehearsal(method, engine, dry, state, kept, scenario, stacked)


def _measured(method: Method, loop: Loop, scenario: Scenario) -> tuple[int, int]:
    """(steps before those that are measured, steps in all)."""
    schedule, period = loop.schedule, period_of(method)
    settled = schedule.window if scenario.rank else 0
    warm = (1 + settled) * period + tau_of(loop.method) + 1
    cycle = max(period, schedule.cycle, *(channel.every for channel in method.channels))
    return warm, warm + PERIODS * cycle


def _kept(method: Method, state: TrainState, params: PyTree) -> dict[str, float]:
    """Bytes that a region keeps for each parameter, by name; gradients are one of them."""
    gradient = method.signal == "gradient"  # the inner optimizer then stands in `outer`
    numel = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    regions = len(state.counters.bytes_sent)

    def each(tree: PyTree, copies: int | None = None) -> float:
        arrays = [x for x in jax.tree.leaves(tree) if len(x.shape) > 1]  # others are counters
        held = (x.size // (copies or x.shape[0]) * x.dtype.itemsize for x in arrays)
        return sum(held) / numel

    found = {
        "parameters": each((state.inner.params, state.inner.buffers, state.inner.rounding)),
        "inner optimizer": each(state.outer if gradient else state.inner.opt),
        "gradients": each(state.inner.params),
        "anchor": each(state.anchor),
        "received anchor": each(state.received),
        "outer optimizer": each(() if gradient else state.outer),
        "codec": each(state.codec),
        "rules": each((state.landing, state.merge)),
        "servers": each(state.servers, regions),
        "channels": each([flights.on_devices for flights in state.channels.values()]),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _no_loss(params, batch, rng):
    """The loss function that an engine must be given; nothing calls it where no step is made."""
    raise AssertionError("a dry run makes no inner step")


def _zero_moments(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)


_TWO_MOMENTS = optax.GradientTransformation(
    _zero_moments, lambda updates, state, params=None: (updates, state)
)
"""The state of Adam, and no step."""


def decides(state: TrainState) -> tuple:
    """What the next acts depend on, relative to the step."""
    counters, step = state.counters, int(state.counters.step)
    marks = (*counters.last_sent, *counters.last_landed.flat)
    since = tuple(step - int(x) if x >= 0 else -1 for x in marks)
    flying = sorted((int(f.fragment), step - int(f.sent)) for f in state.in_flight.values())
    decided = counters.decided
    left = {k: v for k, v in decided.items() if k not in _OF_VALUES}
    return since, tuple(flying), int(decided.get("boundary", step)) - step, repr(left)


# -- programs that hand their arguments back ------------------------------------------------------


def _dry(programs: RoundPrograms, scenario: Scenario) -> RoundPrograms:
    """The programs, which compute nothing."""
    everyone = np.ones(programs.regions.count, bool)
    ones = np.ones(programs.regions.count, np.float32)
    measures = programs.method.schedule.energy is not None
    rank = {"rank": np.float32(scenario.rank or np.inf)} if measures else {}

    def payload(values, against, codec_state, rows, senders, with_snapshot=False, level=0):
        del values, against, rows, senders, level
        nothing = {"payload": None, "codec_state": codec_state}
        nothing["snapshot"] = () if with_snapshot else None
        return nothing | {"accepted": everyone, "weight": ones}

    hands_back = {
        "inner_program": lambda inner, *given, **static: (inner, {}),
        "payload_program": payload,
        "outer_program": lambda held, *given, **static: (held, rank),
        "landing_program": lambda own, *given, **static: RegionState(own.values, own.landing),
        "received_program": lambda received, *given: received,
        "average_program": lambda buffers, *given: buffers,
        "token_rate_program": lambda tokens, *given: ones,
        "recount_program": lambda tokens, *given: tokens,
        "copy_program": lambda x: x,
        "gradient_program": lambda carry, *given, **static: (carry, {}),
        "channel_program": lambda carry, *given, **static: (carry, {}),
        "arrive": lambda *state_and_numbers: state_and_numbers[:4],
        "leave": lambda servers, group: servers,
        "reach": lambda anchor, outer, servers, group: (anchor, outer, servers),
        "merge": lambda servers, group: servers,
    }
    alone = dataclasses.replace(programs, concurrent=None)
    return each(alone, lambda program, name: hands_back.get(name, program))


# -- what left, and which layers wait for it ------------------------------------------------------


def _sends(events: Sequence[Event], shares, steps: int, trainers: int):
    """The payloads of these events. Anchors sent ahead are waited for at the next landing."""
    lands: dict[str | None, int] = {}
    rounds: dict[int, list[int]] = {}
    for event in events:
        if event.kind == "land":
            lands.setdefault(event.key, event.step)
            rounds.setdefault(event.fragment, []).append(event.step)
    for event in events:
        layers = shares[event.fragment] if event.fragment < len(shares) else _even(shares)
        if event.kind == "send" and event.nbytes:
            lands_at = lands.get(event.key, steps)
            nbytes = event.nbytes * trainers
            route = _known(event.route)
            yield Sent(event.step, lands_at + 1, event.fragment, nbytes, route, layers)
        elif event.kind == "land" and event.ahead:
            later = [step for step in rounds[event.fragment] if step > event.step]
            waits = later[0] + 1 if later else steps + 1
            nbytes = event.ahead * trainers
            yield Sent(event.step, waits, event.fragment, nbytes, "pair", layers)


def _known(route: str) -> str:
    """Transfers between two servers take what a pair takes."""
    return "pair" if route == "one_way" else route


def _even(shares: Sequence[dict[int, float]]) -> dict[int, float]:
    """Channels send entries of all layers."""
    layers = {layer for share in shares for layer in share}
    return {layer: 1 / len(layers) for layer in layers}


def _layers(loop: Loop, p: int, stacked: Sequence[str]) -> dict[int, float]:
    """{layer: its share of fragment p}. Rows of a stack of layers are layers (`layer_stacks`).

    Other leaves count as the first layer's: their gradients are done last, and they are needed
    first, so that no plan hides more than a run.
    """
    cut, found, layered = loop.fragments, {}, layer_stacks(stacked)
    total = cut.numel(p)
    for piece in cut.parts[p]:
        shape = cut.shapes[piece.name].shape
        size, rows = float(np.prod(shape)), (0,)
        if is_stacked(piece.name, layered):
            size, rows = size / shape[0], piece.rows or range(shape[0])
        for row in rows:
            found[row] = found.get(row, 0.0) + size / total
    return found
