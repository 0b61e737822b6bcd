"""The host's part of channels: who takes part, the bytes sent, and the end of a run.

`build_channels` makes the programs of a method's channels (`ChannelPrograms`). `ChannelLoop` calls
them for a block of steps and writes an event for every exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.channels import Channel
from lowcomm_jax.channels.source import PARAMS, find_source
from lowcomm_jax.compression import route
from lowcomm_jax.exchange import MeshExchange, Traffic
from lowcomm_jax.history import ChannelEvent, Event
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.channel_flights import ChannelFlights, left_by
from lowcomm_jax.state.train_state import TrainState, flight_key, with_taken_over
from lowcomm_jax.sync.channel_exchange import ChannelExchange, make_channel_program
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.sync.round_functions import RoundFunctions
from lowcomm_jax.train.inner_step import InnerStep

PyTree = Any
END = "end"  # the channel of a run's last exchange, where there is no anchor


@dataclasses.dataclass(frozen=True)
class ChannelPrograms:
    """Compiled channels of one engine for one parameter layout.

    Attributes:
      exchanges: the channels' functions, in the method's order.
      program: a block of inner steps with the exchanges after them (`make_channel_program`).
      end: averages all parameters, for methods without an anchor (`ChannelExchange.average`).
    """

    exchanges: tuple[ChannelExchange, ...]
    program: Callable
    end: Callable

    @property
    def channels(self) -> list[Channel]:
        return [exchange.channel for exchange in self.exchanges]


def build_channels(
    setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
) -> ChannelPrograms | None:
    """Make the programs of a method's channels; None where it has none.

    Args:
      inner_out: (shardings of the inner state, of metrics).
    """
    method, regions, shapes = setup.method, setup.placed, step.layout.train_shapes()
    if not method.channels:
        return None
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
        if one.whole:
            exchange = dataclasses.replace(one.exchange, specs=one.specs)
            one = dataclasses.replace(one, exchange=exchange)
        exchanges.append(_with_codec(one, setup.regions))
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
    return ChannelPrograms(tuple(exchanges), program, averaged)


def _with_codec(one: ChannelExchange, total: int) -> ChannelExchange:
    """The channel with its codec in the form that sends the fewest bytes (two-shot or not)."""
    codec = one.channel.codec
    if codec is None:
        return one
    parts = total if route(codec, [one.like], total).name == "two_shot" else None
    exchange = dataclasses.replace(one.exchange, codec=codec, parts=parts)
    return dataclasses.replace(one, exchange=exchange)


class ChannelLoop:
    """Runs blocks of inner steps with their channels, and books the bytes that these send.

    Attributes:
      programs: the compiled ones.
      weights: float32 `[R]`, of the regions in every mean.
      first: number of the first channel in events, which follows those of the fragments.
    """

    def __init__(self, programs: ChannelPrograms, weights: np.ndarray, first: int):
        self.programs, self.weights, self.first = programs, weights, first
        self._likes = [exchange.like for exchange in programs.exchanges]

    def inner_steps(
        self,
        state: TrainState,
        given: Sequence[Any],
        masks: Sequence[np.ndarray],
        capacity: int,
        single: bool,
    ) -> tuple[TrainState, dict[str, jax.Array], list[Event]]:
        """The first steps of a block, one for each mask, and their exchanges.

        Args:
          given: frozen leaves, batches and region numbers, as the inner program takes them.
          masks: of each step bool `[R]`, who takes part in what leaves after it.
          capacity: S, steps that the block has room for.

        Returns:
          (state, metrics, events); the step counter is as it was.
        """
        done, count = int(state.counters.step), len(self.weights)
        takes_part = np.zeros((count, capacity), bool)
        for i, mask in enumerate(masks):
            takes_part[:, i] = mask
        state, lands, events = self._book(state, masks, capacity)
        flights = tuple(
            f.on_devices if (f := state.channels.get(c.name)) else ()
            for c in self.programs.channels
        )
        (inner, flights), metrics = self.programs.program(
            (state.inner, flights),
            *given,
            takes_part,
            lands,
            self.weights,
            np.int32(done),
            np.int32(len(masks)),
            single=single,
        )
        held = {
            c.name: ChannelFlights(*flight, state.channels[c.name].takes_part)
            for c, flight in self._delayed(flights)
        }
        return state.replace(inner=inner, channels=held), metrics, events

    def _delayed(self, items: Sequence[Any]) -> list[tuple[Channel, Any]]:
        return [(c, item) for c, item in zip(self.programs.channels, items) if c.delay]

    def _book(self, state: TrainState, masks: Sequence[np.ndarray], capacity: int):
        """Count the bytes of these steps, and find in which regions payloads land.

        Returns:
          (state, for each channel bool `[R, S]`: where a payload lands, events).
        """
        counters, count = state.counters.copy(), len(self.weights)
        waits = {name: f.takes_part.copy() for name, f in state.channels.items()}
        lands = [np.zeros((count, capacity), bool) for _ in self.programs.channels]
        events: list[Event] = []
        for i, mask in enumerate(masks):
            step = int(counters.step) + i + 1
            late, sent, at_once = [], [], []
            for number, channel in enumerate(self.programs.channels):
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
        exchange, name = self.programs.exchanges[number].exchange, self._name(number)
        traffic = exchange.traffic(self._likes[number], mask)
        counters.bytes_sent += traffic.sent
        counters.bytes_received += traffic.received
        event = Event.of_send(step, self.first + number, f"{name}@{step}", mask, traffic, {})
        return ChannelEvent.widened(event, channel=name)

    def _landing(self, number: int, step: int, adopts: np.ndarray) -> Event:
        delay, name = self.programs.channels[number].delay, self._name(number)
        key = f"{name}@{step - delay}"
        event = Event.of_landing(step, self.first + number, key, adopts, delay, {})
        return ChannelEvent.widened(event, channel=name)

    def _name(self, number: int) -> str:
        return self.programs.channels[number].name

    def announced(self) -> int:
        """Bytes that a region sends where all channels send at once, and everyone takes part."""
        everyone = np.ones(len(self.weights), bool)
        sent = [
            exchange.exchange.traffic(like, everyone).sent.max()
            for exchange, like in zip(self.programs.exchanges, self._likes)
        ]
        return int(sum(sent))

    # -- where the main exchange meets channels -------------------------------------------------

    def adopted(self, state: TrainState, lands_R: np.ndarray) -> TrainState:
        """The state after the regions of `lands_R` have adopted an anchor.

        Payloads of their parameters in flight are older than the anchor, and do not land there.
        """
        stale = {c.name for c in self.programs.channels if c.source == PARAMS}
        held = {k: f.left_by(lands_R) if k in stale else f for k, f in state.channels.items()}
        return state.replace(channels=held)

    def drained(self, state: TrainState) -> TrainState:
        """The state before the last synchronisation, without the channels' payloads in flight."""
        everyone = np.ones(len(self.weights), bool)
        return state.replace(channels=left_by(state.channels, everyone))

    def end(
        self, state: TrainState, mask: np.ndarray, traffic: Traffic, events: list[Event]
    ) -> TrainState:
        """The last synchronisation of a method without an anchor: all take the regions' mean.

        Args:
          mask: bool `[R]`, whose parameters enter the mean.
          traffic: of all parameters, dense.
        """
        step, everyone = int(state.counters.step), np.ones(len(self.weights), bool)
        if (state.counters.last_landed[0] == step).all() or not mask.any():
            return state
        leaves = state.inner.params, state.inner.rounding
        taken, values = self.programs.end(leaves, np.int32(0), mask, self.weights, everyone)
        counters, key = state.counters.copy(), flight_key(0, step)
        counters.previous_sent[0], counters.last_sent[0] = counters.last_sent[0], step
        counters.last_landed[0], counters.staleness[0] = step, 0
        counters.sends[0] += 1
        counters.bytes_sent += traffic.sent
        counters.bytes_received += traffic.received
        events.append(Event.of_send(step, 0, key, mask, traffic, values))
        events.append(Event.of_landing(step, 0, key, everyone, 0, {}))
        return with_taken_over(state, *taken).replace(counters=counters)
