"""The loop of methods with channels: who takes part, the bytes sent, and the end of a run.

`ChannelLoop` calls the programs of a method's channels (`ChannelPrograms`) for a block of steps
and writes an event for every exchange. The main exchange, where there is one, is done behind them
by a loop of acts. What does not fit the inner optimizer stands at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.channels import Channel
from lowcomm_jax.channels.source import PARAMS, find_source
from lowcomm_jax.compression import route
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.exchange.entries import LARGEST, band_sizes
from lowcomm_jax.history import Event
from lowcomm_jax.loops.channel_exchange import (
    ChannelExchange,
    initial_flights,
    make_channel_program,
)
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.refused import collect
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.channel_flights import ChannelFlights, left_by
from lowcomm_jax.state.train_state import TrainState, flight_key, with_taken_over
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.sync.finish import AtTheEnd
from lowcomm_jax.sync.initial_state import Making, start
from lowcomm_jax.sync.part_checks import optimizer_problems
from lowcomm_jax.sync.round_functions import RoundFunctions
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import FAR, Loop, Ran, Steps, SyncLoop, with_step
from lowcomm_jax.train.inner_step import InnerStep

PyTree = Any
END = "end"  # the channel of a run's last exchange, where there is no anchor
_EXPLODES = 100.0


@dataclasses.dataclass(frozen=True)
class ChannelPrograms:
    """`round_programs.Family` of methods with channels.

    Attributes:
      exchanges: the channels' functions, in the method's order.
      channel_program: a block of inner steps with the exchanges after them
        (`make_channel_program`).
      end: averages all parameters, for methods without an anchor (`ChannelExchange.average`).
    """

    exchanges: tuple[ChannelExchange, ...]
    channel_program: Callable
    end: Callable

    @property
    def channels(self) -> list[Channel]:
        return [exchange.channel for exchange in self.exchanges]

    @staticmethod
    def check_optimizer(setup: Setup, layout: Layout) -> tuple[list[str], bool]:
        """Also whether it has the leaves that channels average, and steps well after that."""
        lines, gives_loss = optimizer_problems(setup, layout)
        like = layout.tree(shapes := layout.train_shapes())
        found = lines or _moment_problems(setup, like, gives_loss)
        state = jax.eval_shape(setup.optimizer.init, like)
        for channel in setup.method.channels:
            source = collect(
                found, "", functools.partial(find_source, channel.source, state, shapes)
            )
            if source is not None and not channel.selection.whole:
                drawn = {name: shapes[parameter].shape for name, parameter in source.leaves}
                found += [f"channel {channel.name}: {line}" for line in _too_large(channel, drawn)]
        return found, gives_loss

    @classmethod
    def make(
        cls, setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
    ) -> ChannelPrograms:
        """The programs of a method's channels."""
        method, regions, shapes = setup.method, setup.placed, step.layout.train_shapes()
        opt = jax.eval_shape(step.init, shapes)
        exchanges = []
        for channel in (*method.channels, Channel(END)):
            source = find_source(channel.source, opt, shapes)
            one = ChannelExchange(
                channel,
                source,
                {name: shapes[parameter] for name, parameter in source.leaves},
                {name: functions.exchange.specs[parameter] for name, parameter in source.leaves},
                MeshExchange(regions),
                functions,
                setup.seed,
            )
            given: dict[str, Any] = {"specs": one.specs} if one.whole else {}
            if (codec := channel.codec) is not None:  # in the form that sends the fewest bytes
                two_shot = route(codec, [one.like], setup.regions).name == "two_shot"
                given |= {"codec": codec, "parts": setup.regions if two_shot else None}
            exchange = dataclasses.replace(one.exchange, **given)
            exchanges.append(dataclasses.replace(one, exchange=exchange))
        *exchanges, end = exchanges
        inner, by_region = inner_out
        program = jax.jit(
            make_channel_program(step, regions, exchanges),
            donate_argnums=0,
            static_argnames="single",
            out_shardings=((inner, by_region), by_region),
            compiler_options=inner_options(regions),
        )
        lies = ((inner.params, inner.rounding), by_region)
        averaged = jax.jit(end.average, donate_argnums=0, out_shardings=lies)
        return cls(tuple(exchanges), program, averaged)

    def initial_state(self, programs: RoundPrograms, params: PyTree, making: Making) -> TrainState:
        flights = initial_flights(self.exchanges, making)
        return start(programs, params, making).replace(channels=flights)

    def loop(self, programs: RoundPrograms, weights: str | np.ndarray) -> ChannelLoop:
        return ChannelLoop(programs, weights)


class ChannelLoop(Loop):
    """Runs blocks of inner steps with their channels, and books the bytes that these send.

    Attributes:
      main: the loop of the acts behind the steps; None where channels alone exchange.
      first: number of the first channel in events, which follows those of the fragments.
    """

    every_step = True

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray):
        super().__init__(programs, weights)
        self.family: ChannelPrograms = programs.family
        self.first = len(self.fragments)
        self.main: SyncLoop | None = None
        if self.method.has_anchor:
            self.main = SyncLoop(programs, weights)
        self._likes = [exchange.like for exchange in self.family.exchanges]

    def next_event(self, state: TrainState, most: int = FAR) -> int:
        return most if self.main is None else self.main.next_event(state, most)

    def inner_steps(self, state: TrainState, steps: Steps) -> Ran:
        if self.main is not None and self.main.measurements is not None:
            self.main.measurements.starts()
        masks, capacity = steps.masks, steps.block.capacity
        done, count = int(state.counters.step), self.count
        takes_part = np.zeros((count, capacity), bool)
        for i, mask in enumerate(masks):
            takes_part[:, i] = mask
        state, lands, events = self._book(state, masks, capacity)
        flights = tuple(
            f.on_devices if (f := state.channels.get(c.name)) else () for c in self.family.channels
        )
        (inner, flights), metrics = self.family.channel_program(
            (state.inner, flights),
            state.frozen,
            steps.block.batches,
            steps.keys,
            takes_part,
            lands,
            self.weights,
            np.int32(done),
            np.int32(len(masks)),
            single=steps.single,
        )
        held = {
            c.name: ChannelFlights(*flight, state.channels[c.name].takes_part)
            for c, flight in zip(self.family.channels, flights)
            if c.delay
        }
        return Ran(state.replace(inner=inner, channels=held), metrics, events, {})

    def after(
        self, state: TrainState, steps: int, mask: np.ndarray
    ) -> tuple[TrainState, list[Event]]:
        if self.main is None:
            return with_step(state, int(state.counters.step) + steps, behind=0), []
        state, events = self.main.after(state, steps, mask)
        for event in events:
            if event.kind == "land":
                state = self.adopted(state, event.participants)
        return state, events

    def _book(self, state: TrainState, masks: Sequence[np.ndarray], capacity: int):
        """Count the bytes of these steps, and find in which regions payloads land.

        Returns:
          (state, for each channel bool `[R, S]`: where a payload lands, events).
        """
        counters, count = state.counters.copy(), self.count
        waits = {name: f.takes_part.copy() for name, f in state.channels.items()}
        lands = [np.zeros((count, capacity), bool) for _ in self.family.channels]
        events: list[Event] = []
        for i, mask in enumerate(masks):
            step = int(counters.step) + i + 1
            late, sent, at_once = [], [], []
            for number, channel in enumerate(self.family.channels):
                if channel.delay and channel.lands(step):
                    slot = channel.slot(step - channel.delay)
                    adopts = waits[channel.name][:, slot].copy()
                    waits[channel.name][:, slot] = False
                    lands[number][:, i] = adopts
                    if adopts.any():
                        late.append(self._landing(number, step, adopts))
                if not channel.sends(step):
                    continue
                if channel.delay:
                    waits[channel.name][:, channel.slot(step)] = mask
                if not mask.any():
                    continue
                sent.append(self._sent(number, step, mask, counters))
                if not channel.delay:
                    at_once.append(self._landing(number, step, mask))
            events += late + sent + at_once
        held = {
            name: dataclasses.replace(f, takes_part=waits[name])
            for name, f in state.channels.items()
        }
        return state.replace(counters=counters, channels=held), tuple(lands), events

    def _sent(self, number: int, step: int, mask: np.ndarray, counters) -> Event:
        exchange, name = self.family.exchanges[number].exchange, self._name(number)
        traffic = exchange.traffic(self._likes[number], mask)
        counters.count_bytes(traffic.sent, traffic.received)
        event = Event.of_send(step, self.first + number, f"{name}@{step}", mask, traffic, {})
        return dataclasses.replace(event, channel=name)

    def _landing(self, number: int, step: int, adopts: np.ndarray) -> Event:
        delay, name = self.family.channels[number].delay, self._name(number)
        key = f"{name}@{step - delay}"
        event = Event.of_landing(step, self.first + number, key, adopts, delay, {})
        return dataclasses.replace(event, channel=name)

    def _name(self, number: int) -> str:
        return self.family.channels[number].name

    def announced(self) -> int:
        """Bytes that a region sends where all channels send at once, and everyone takes part."""
        everyone = np.ones(self.count, bool)
        sent = [
            exchange.exchange.traffic(like, everyone).sent.max()
            for exchange, like in zip(self.family.exchanges, self._likes)
        ]
        return int(sum(sent))

    # -- where the main exchange meets channels -------------------------------------------------

    def adopted(self, state: TrainState, lands_R: np.ndarray) -> TrainState:
        """The state after the regions of `lands_R` have adopted an anchor.

        Payloads of their parameters in flight are older than the anchor, and do not land there.
        """
        stale = {c.name for c in self.family.channels if c.source == PARAMS}
        held = {k: f.left_by(lands_R) if k in stale else f for k, f in state.channels.items()}
        return state.replace(channels=held)

    def finish(
        self, state: TrainState, participants: AtTheEnd = None
    ) -> tuple[TrainState, list[Event]]:
        """As the main exchange ends; without an anchor every region ends on the mean of all.

        The channels' payloads in flight are older than the regions' values, and are dropped.
        """
        step, everyone = int(state.counters.step), np.ones(self.count, bool)
        state = state.replace(channels=left_by(state.channels, everyone))
        if self.main is not None:
            return self.main.finish(state, participants)
        mask = everyone if participants is None else np.asarray(participants(0), bool)
        if (state.counters.last_landed[0] == step).all() or not mask.any():
            return state, []
        leaves = state.inner.params, state.inner.rounding
        taken, values = self.family.end(leaves, np.int32(0), mask, self.weights, everyone)
        traffic = self.programs.exchange.traffic(self.fragments.like(0), mask)
        counters, key = state.counters.copy(), flight_key(0, step)
        counters.count_send(0, step)
        counters.count_bytes(traffic.sent, traffic.received)
        counters.last_landed[0], counters.staleness[0] = step, 0
        sent = Event.of_send(step, 0, key, mask, traffic, values)
        landed = Event.of_landing(step, 0, key, everyone, 0, {})
        return with_taken_over(state, *taken).replace(counters=counters), [sent, landed]


# -- what does not fit the inner optimizer ---------------------------------------------------------


def _moment_problems(setup: Setup, like: PyTree, gives_loss: bool) -> list[str]:
    """A first moment that is averaged without the second one, by which the optimizer divides it.

    An entry's second moment is 0 in a region that has seen no gradient of it. Divided by that, the
    first moment of other regions becomes a step of any size.
    """
    channels = setup.method.channels
    seconds = [c for c in channels if c.source == "nu" and c.selection.whole]
    alone = [
        first
        for first in channels
        if first.source == "mu"
        and not any(first.every % c.every == 0 and first.delay == c.delay for c in seconds)
    ]
    if not alone or not _divides(setup.optimizer, like, gives_loss):
        return []
    others = ", ".join(f"{c.name} every {c.every}" for c in seconds) or "none"
    return [
        f"channel {first.name}: averages first moments every {first.every} steps without the "
        f"second ones (channels of those: {others}), and this optimizer divides by them: 0 where a "
        "region has seen no gradient yet. Use ADOPT (optax.contrib.adopt; in a config "
        "inner.optimizer=adopt), or average both at the same steps (des_loc: second=first)"
        for first in alone
    ]


def _divides(inner, like: PyTree, gives_loss: bool) -> bool:
    """Whether an update with first moments of 1 is that much larger with second ones of 0, not 1.

    False, too, where the optimizer cannot be called with leaves of one entry.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros((1,) * len(x.shape), x.dtype), like)
    named = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(zeros)}
    keywords = {"value": jnp.zeros(())} if gives_loss else {}

    def update(second: float, count: int) -> jax.Array:
        state = inner.init(zeros)
        moments = {name: 1.0 for name, _ in find_source("mu", state, named).leaves}
        moments |= {name: second for name, _ in find_source("nu", state, named).leaves}

        def one(path, x):
            if not x.ndim and jnp.issubdtype(x.dtype, jnp.integer):
                return jnp.full_like(x, count)  # past a warm-up that begins with 0
            return jnp.full_like(x, moments.get(path_name(path), 0.0)) if x.size else x

        state = jax.tree_util.tree_map_with_path(one, state)
        moved, _ = inner.update(zeros, state, zeros, **keywords)
        return jnp.stack([jnp.max(jnp.abs(u)) for u in jax.tree.leaves(moved)]).max()

    def explodes() -> jax.Array:
        bounded = [update(0.0, n) <= _EXPLODES * update(1.0, n) for n in (1, 1000)]
        return ~jnp.stack(bounded).all()

    try:
        return bool(jax.jit(explodes)())
    except (TypeError, ValueError, LookupError):  # no such moments, which has a line of its own
        return False


def _too_large(channel: Channel, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Leaves, or what is chosen of all of them, that int32 indices do not reach."""
    sizes = {name: band_sizes(shape) for name, shape in shapes.items()}
    found = [
        f"a row of {name!r} has {math.prod(shapes[name][1:])} entries, at most {LARGEST} can be "
        "chosen from: cut the leaf, or select everything"
        for name, each in sizes.items()
        if not each
    ]
    count = sum(channel.selection.count(size) for each in sizes.values() for size in each)
    if count > LARGEST:
        found.append(
            f"{count} entries would travel together, at most {LARGEST} can: give a smaller share, "
            "or select everything"
        )
    return found
