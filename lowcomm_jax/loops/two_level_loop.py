"""The loop of methods with two levels: workers and their group's server, servers and a global one.

The anchor and its outer state are the global server's. `TrainState.servers` holds the groups'
servers, every leaf `[G, ...]`:

- `model` and its `outer` state; `merged`, the model at the last merge;
- `update`, on its way to the global server; `reply`, on its way back;
- `codec`, the senders' states. A coded `update` is what the global server decodes.

The loop asks `schedule.two_levels` when workers arrive and how long transfers take; every numeric
part is a compiled program (`server_programs`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.history import Event
from lowcomm_jax.loops import server_programs
from lowcomm_jax.params.sharding import leaf_shardings, rule_shardings
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.finish import AtTheEnd
from lowcomm_jax.sync.initial_state import Making, start
from lowcomm_jax.sync.part_checks import optimizer_problems
from lowcomm_jax.sync.round_functions import RoundFunctions
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import FAR, Loop, Ran, Steps, as_of, made_steps
from lowcomm_jax.train.inner_step import InnerStep

PyTree = Any
NOTHING = -1


@dataclasses.dataclass(frozen=True)
class ServerPrograms:
    """`round_programs.Family` of methods with two levels: functions of `server_programs`, compiled.

    Attributes:
      arrive, leave, reach, merge, start_anew: those of these names.
    """

    check_optimizer = staticmethod(optimizer_problems)
    arrive: Callable
    leave: Callable
    reach: Callable
    merge: Callable
    start_anew: Callable

    @classmethod
    def make(
        cls, setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
    ) -> ServerPrograms:
        """The programs of a method's servers."""
        del step, inner_out
        method, codec, own = setup.method, functions.exchange.codec, server_programs
        arrive = functools.partial(own.arrive, method.servers.outer, codec)
        reach = functools.partial(own.reach, method.outer)
        return cls(
            arrive=jax.jit(arrive, donate_argnums=(0, 1, 2, 3)),
            leave=jax.jit(functools.partial(own.leave, method.servers.codec), donate_argnums=0),
            reach=jax.jit(reach, donate_argnums=(0, 1, 2)),
            merge=jax.jit(functools.partial(own.merge, method.servers.blend), donate_argnums=0),
            start_anew=jax.jit(own.start_anew, donate_argnums=(0, 1, 2)),
        )

    def initial_state(self, programs: RoundPrograms, params: PyTree, making: Making) -> TrainState:
        """All servers start from the anchor."""
        state, method = start(programs, params, making), programs.method
        groups, servers = len(method.schedule.groups), method.servers

        def init(anchor):
            model = {k: jnp.broadcast_to(x, (groups, *x.shape[1:])) for k, x in anchor.items()}
            nothing = jax.tree.map(jnp.zeros_like, model)
            found = {"model": model, "merged": model, "update": nothing, "reply": nothing}
            found["outer"] = jax.vmap(servers.outer.init)(model)
            if servers.codec is not None:
                first = servers.codec.init(programs.fragments.like(0))
                found["codec"] = jax.tree.map(
                    lambda x: jnp.broadcast_to(x[None], (groups, *x.shape)), first
                )
            return found

        out = _server_shardings(programs)
        servers = making.run(jax.jit(init, out_shardings=out), out, state.anchor)
        return state.replace(servers=servers)

    def loop(self, programs: RoundPrograms, weights: str | np.ndarray) -> TwoLevelLoop:
        return TwoLevelLoop(programs, weights)


def _server_shardings(programs: RoundPrograms) -> dict[str, PyTree]:
    """Each server is in every region, cut inside it as the anchor is."""
    regions, specs, cut = programs.regions, programs.specs, programs.fragments
    leaves = leaf_shardings(regions, None, specs)
    like = {k: jax.ShapeDtypeStruct(s.shape, "float32") for k, s in cut.shapes.items()}
    servers = programs.method.servers
    found: dict[str, PyTree] = dict.fromkeys(("model", "merged", "update", "reply"), leaves)
    found["outer"] = rule_shardings("servers.outer", servers.outer, like, specs, regions, None)
    if servers.codec is not None:
        found["codec"] = regions.sharding(None)  # what it keeps lies in every region, and whole
    return found


class TwoLevelLoop(Loop):
    """The loop of methods with `Method.servers`.

    Order within a tick: updates that reach the global server, group by group; replies that come
    back; workers that arrive, in region order, each answered at once; then again transfers that
    take 0 ticks.
    """

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray):
        super().__init__(programs, weights)
        self.servers: ServerPrograms = programs.family
        self.groups_of = self.schedule.groups
        like, codec, upper = self.fragments.like(0), self.method.codec, self.method.servers.codec
        self._dense = 4 * sum(int(np.prod(x.shape)) for x in like.values())
        self._delta = self._dense if codec is None else codec.nbytes(like)
        self._update = self._dense if upper is None else upper.nbytes(like)

    def next_event(self, state: TrainState, most: int = FAR) -> int:
        counters, step = state.counters, int(state.counters.step)
        ends = np.concatenate([counters.decided["up"], counters.decided["down"]])
        arrival = self.schedule.next_send(step, counters)
        return min(most, int(np.min(ends[ends > step], initial=arrival)) - step)

    def inner_steps(self, state: TrainState, steps: Steps) -> Ran:
        return made_steps(self.programs, state, steps)

    def after(
        self, state: TrainState, steps: int, mask: np.ndarray
    ) -> tuple[TrainState, list[Event]]:
        """As `Loop.after`; of these steps only the last one is one of events (`next_event`)."""
        step, events = int(state.counters.step) + steps, []
        state = self._travel(as_of(state, step, behind=0), step, events)
        for send in self.schedule.due(step, state.counters):
            for region in np.flatnonzero(mask & send.admitted):
                state = self._worker_arrives(state, int(region), step, events)
        return self._travel(state, step, events), events

    # -- between the servers --------------------------------------------------------------------

    def _travel(self, state: TrainState, step: float, events: list[Event]) -> TrainState:
        decided, now = state.counters.decided, int(state.counters.step)
        for g in np.flatnonzero((decided["up"] != NOTHING) & (decided["up"] <= step)):
            anchor, outer, servers = self.servers.reach(
                state.anchor, state.outer[0], state.servers, np.int32(g)
            )
            state = state.replace(anchor=anchor, outer=(outer,), servers=servers)
            decided["up"][g], decided["down"][g] = NOTHING, now + self.schedule.travels(g)
            self._moved(state, f"down@{now}/{g}", self._host(0), self._host(g), events, self._dense)
        for g in np.flatnonzero((decided["down"] != NOTHING) & (decided["down"] <= step)):
            state = state.replace(servers=self.servers.merge(state.servers, np.int32(g)))
            decided["down"][g], decided["merged"][g] = NOTHING, decided["arrivals"][g]
        return state

    def _worker_arrives(
        self, state: TrainState, region: int, step: int, events: list[Event]
    ) -> TrainState:
        g, decided, counters = (
            self.schedule.group_of(region),
            state.counters.decided,
            state.counters,
        )
        state = self._deliver(state, region, step, events)
        since = max(int(counters.last_landed[0, region]), 0)
        counters.last_landed[0, region], counters.staleness[0, region] = step, step - since
        counters.count_send(0, step)
        decided["arrivals"][g] += 1
        waits = decided["up"][g] != NOTHING or decided["down"][g] != NOTHING
        if decided["arrivals"][g] >= decided["merged"][g] + self.schedule.every and not waits:
            state = state.replace(servers=self.servers.leave(state.servers, np.int32(g)))
            decided["up"][g] = step + self.schedule.travels(g)
            self._moved(state, f"up@{step}/{g}", self._host(g), self._host(0), events, self._update)
        return state

    def _deliver(self, state: TrainState, region: int, step: int, events) -> TrainState:
        """A worker hands its Delta to its server, which answers at once."""
        g = self.schedule.group_of(region)
        params, received, servers, codec = self.servers.arrive(
            state.inner.params,
            state.received,
            state.servers,
            state.codec[0],
            np.int32(region),
            np.int32(g),
        )
        state = state.replace(received=received, servers=servers, codec=(codec,))
        key, host = f"0@{step}/{region}", self._host(g)
        self._moved(state, key, region, host, events, self._delta, self._dense)
        return with_inner(state, params=params)

    def _host(self, group: int) -> int:
        """The region at whose site a group's server is; the global server is at group 0's."""
        return self.groups_of[group][0]

    def _moved(
        self, state, key: str, source: int, target: int, events, nbytes: int, answer: int = 0
    ) -> None:
        """Book a transfer from one region to another, and an answer of `answer` bytes back."""
        who = np.isin(np.arange(self.count), (source, target))
        sent, received = np.zeros((2, self.count), np.int64)
        if source != target:
            sent[[source, target]] = received[[target, source]] = nbytes, answer
        counters, step = state.counters, int(state.counters.step)
        counters.count_bytes(sent, received)
        traffic = Traffic("one_way", nbytes, sent, received)
        groups = (tuple(sorted({source, target})),)
        events.append(Event.of_send(step, 0, key, who, traffic, {}, groups))
        since = max(int(counters.last_landed[0, source]), 0)
        events.append(Event.of_landing(step, 0, key, who, step - since, {}))

    # -- the end --------------------------------------------------------------------------------

    def finish(
        self, state: TrainState, participants: AtTheEnd = None
    ) -> tuple[TrainState, list[Event]]:
        """Workers arrive, servers' changes reach the global one, and all take its model.

        What travels between the servers lands before.
        """
        events, everyone, step = [], np.ones(self.count, bool), int(state.counters.step)
        state = self._travel(as_of(state, step, behind=0), np.inf, events)
        mask = everyone if participants is None else np.asarray(participants(0), bool)
        for region in np.flatnonzero(mask):
            state = self._deliver(state, int(region), step, events)
        for g in range(len(self.groups_of)):
            servers = self.servers.leave(state.servers, np.int32(g))
            anchor, outer, servers = self.servers.reach(
                state.anchor, state.outer[0], servers, np.int32(g)
            )
            state = state.replace(anchor=anchor, outer=(outer,), servers=servers)
            key, hosts = f"up@{step}/{g}", (self._host(g), self._host(0))
            self._moved(state, key, *hosts, events, self._update, self._dense)
        params, received, servers = self.servers.start_anew(
            state.inner.params, state.received, state.servers, state.anchor
        )
        state = state.replace(received=received, servers=servers)
        arrivals = state.counters.decided["arrivals"]
        state.counters.decided = self.schedule.start() | {
            "arrivals": arrivals,
            "merged": arrivals.copy(),
        }
        return with_inner(state, params=params), events
