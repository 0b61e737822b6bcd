"""What training carries from step to step; checkpoints save all of it but `InFlight.brought`.

The functions at the end replace a part of a state. Arrays are never changed in place. A loop
changes the counters in place, after it has copied them (`sync_loop.as_of`).
"""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import jax
import numpy as np

from lowcomm_jax.params.layout import Layout
from lowcomm_jax.state.channel_flights import ChannelFlights

PyTree = Any
Decided = dict[str, np.ndarray | np.generic]  # what a schedule remembers, by name


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Inner:
    """Private state of the regions; every leaf has a leading region axis R.

    Attributes:
      params: trainable leaves by name, `[R, ...]`, the user's dtypes.
      buffers: non-trainable state by name (roles `local`, `average`), `[R, ...]`.
      opt: inner optimizer state, `[R, ...]`; never travels and is kept across rounds.
      step: int32 `[R]`, inner optimizer steps taken (seeds the step's randomness).
      tokens: float32 `[R, K]`, tokens consumed since each fragment's last send, where they weight
        the mean; since its last landing, with learners weighted by their rate of tokens. Others
        never start it anew, and gradient exchange does not count.
      rounding: fp32 `[R, ...]` by name: what rounding to a leaf's dtype took from the values that a
        region took over. Only of leaves narrower than fp32 whose regions take over other values
        than the anchor's (`round_functions.rounded`); of the others the anchor tells it.
    """

    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    opt: PyTree
    step: jax.Array
    tokens: jax.Array
    rounding: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class InFlight:
    """A fragment between its send and its last landing.

    `SyncLoop.put_in_flight` makes it, and keeps it in `TrainState.in_flight`.
    `SyncLoop.adopt_payload` drops payload, header and `kept` with the first landing, and the rest
    with the last.

    Attributes:
      payload: encoded pseudo-gradients, leaves `[R, ...]` of the codec's wire type.
      snapshot: float leaves `[R, ...]`, the local values at the send; None where the landing rule
        does not need the progress made in flight.
      accepted: bool `[R]`, regions whose contribution counts.
      weight: float32 `[R]`, weight of each region in the mean; 0 for those not accepted.
      fragment: index of the fragment.
      sent: step of the send.
      due: int64 `[R]`, step at which each region lands.
      takes_part: bool `[R]`, regions that took part in the send and have not landed yet. Between
        jobs, once everyone's payload is here: those that the commit record counts.
      anchor_updated: whether the anchor has already moved by this payload.
      level: of the codec, at which the payload is encoded (`Codec.at`).
      header: float32 `[R, n]` by name, measurements that each region sends along, so that all
        regions decide alike at the landing: of the schedule, and the norms that a merge rule reads.
      kept: between jobs, the fragment's codec state `[R, ...]` from before it was encoded. The loop
        restores it where the others did not count this region's payload. None on one mesh: there
        the program that encodes knows who counts.
      brought: results of its collectives, where they ran beside inner steps
        (`sync.concurrent_exchange`); None = none yet. Not saved: a restart exchanges once more.
    """

    payload: PyTree
    snapshot: dict[str, jax.Array] | None
    accepted: jax.Array
    weight: jax.Array
    fragment: np.ndarray
    sent: np.ndarray
    due: np.ndarray
    takes_part: np.ndarray
    anchor_updated: np.ndarray
    level: np.ndarray
    header: dict[str, jax.Array]
    kept: PyTree = None
    brought: PyTree = None

    @property
    def waiting(self) -> np.ndarray:
        """Bool `[R]`: regions that have something to do at its landing.

        These are the regions that took part; where none here did, all, for the anchor's move.
        """
        return self.takes_part if self.takes_part.any() else np.ones_like(self.takes_part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SyncCounters:
    """Counters of steps, sends, landings and bytes; on the host (NumPy), never on a device.


    Attributes:
      step: inner steps done by the run.
      behind: number of the last steps whose sends and landings are still to be done; 1 while the
        loop does those of this step. More only in a job that defers them (`jobs.job_carrier`).
      last_sent, previous_sent: int64 `[K]`, step of the last and the last but one send; -1 = never.
      last_landed: int64 `[K, R]`, step of each region's last landing; -1 = never.
      staleness: int64 `[K, R]`, of the last landing, as in `history.Event`; -1 = never.
      sends: int64 `[K]`, sends so far.
      counted: bool `[K]`, whether every region of the exchange counted in the last landing; where
        all regions are in one job, `last_landed` tells.
      bytes_sent, bytes_received: int64 `[R]`, bytes between regions so far.
      decided: what the schedule remembers (`Schedule.start`).
    """

    step: np.ndarray
    behind: np.ndarray
    last_sent: np.ndarray
    previous_sent: np.ndarray
    last_landed: np.ndarray
    staleness: np.ndarray
    sends: np.ndarray
    counted: np.ndarray
    bytes_sent: np.ndarray
    bytes_received: np.ndarray
    decided: Decided

    @classmethod
    def start(cls, fragments: int, regions: int, decided: Decided | None = None) -> SyncCounters:
        never = np.full(fragments, -1, np.int64)
        return cls(
            step=np.int64(0),
            behind=np.int64(0),
            last_sent=never.copy(),
            previous_sent=never.copy(),
            last_landed=np.full((fragments, regions), -1, np.int64),
            staleness=np.full((fragments, regions), -1, np.int64),
            sends=np.zeros(fragments, np.int64),
            counted=np.ones(fragments, bool),
            bytes_sent=np.zeros(regions, np.int64),
            bytes_received=np.zeros(regions, np.int64),
            decided=dict(decided or {}),
        )

    @property
    def done_until(self) -> int:
        """The step up to which all due sends and landings are done."""
        return int(self.step - self.behind)

    def sends_until(self, step: int) -> int:
        """Number of all sends up to a step, after which no fragment was sent more than twice."""
        later = (self.last_sent > step).sum() + (self.previous_sent > step).sum()
        return int(self.sends.sum() - later)

    def count_send(self, fragment: int, step: int) -> None:
        """Count a send after this step, in place."""
        self.previous_sent[fragment], self.last_sent[fragment] = self.last_sent[fragment], step
        self.sends[fragment] += 1

    def count_bytes(self, sent: np.ndarray, received: np.ndarray) -> None:
        """Count bytes of each region, int64 `[R]`, in place."""
        self.bytes_sent += sent
        self.bytes_received += received

    def copy(self) -> SyncCounters:
        return jax.tree.map(np.copy, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """The whole training state.

    Attributes:
      inner: private state of the regions, `[R, ...]`.
      frozen: leaves that are neither trained nor exchanged, by name; one copy for all regions.
      anchor: fp32 leaves by name, `[A, ...]`; A = 1 (shared by all regions) or R (one each).
      received: fp32 leaves by name, `[R, ...]`: the anchor as each region received it last; empty
        unless the method measures against it.
      outer: outer optimizer state of each fragment, leaves `[A, ...]`.
      codec: codec state (residuals) of each fragment, leaves `[R, ...]`.
      landing: landing rule state of each fragment, leaves `[R, ...]`.
      rate: float32 `[K]`, change rate of each fragment as of its last landing (from reduced data).
      in_flight: payloads under way, by `flight_key`.
      counters: host-side counters.
      layout: static; the user's tree structure and the roles of its leaves.
      servers: of methods with two levels, the groups' servers, leaves `[G, ...]`
        (`loops.two_level_loop`); else empty.
      channels: payloads in flight of channels with a delay, by name.
      merge: states of the merge rule of each fragment, by leaf (`merge.initial_states`), the same
        in all regions; () without a rule.
    """

    inner: Inner
    frozen: dict[str, jax.Array]
    anchor: dict[str, jax.Array]
    received: dict[str, jax.Array]
    outer: tuple[PyTree, ...]
    codec: tuple[PyTree, ...]
    landing: tuple[PyTree, ...]
    rate: jax.Array
    in_flight: dict[str, InFlight]
    counters: SyncCounters
    layout: Layout = dataclasses.field(metadata={"static": True})
    servers: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    channels: dict[str, ChannelFlights] = dataclasses.field(default_factory=dict)
    merge: tuple[PyTree, ...] = ()

    def replace(self, **changes: Any) -> TrainState:
        # Called every step: `dataclasses.replace` takes twice as long.
        return TrainState(**(vars(self) | changes))

    def with_more_bytes(self, sent: np.ndarray, received: np.ndarray) -> TrainState:
        """The state after each region has sent and received so much more, int64 `[R]`."""
        counters = self.counters.copy()
        counters.count_bytes(sent, received)
        return self.replace(counters=counters)

    def refuse_donated(self) -> None:
        """Check that the state was not taken away before; waits for no device.

        Looks at one array of each kind that programs take: every call takes all of one kind.

        Raises:
          ValueError: an earlier call has taken it. Deleted arrays would end a process of several
            devices.
        """
        arrays = (x for x in self._one_of_each_kind() if not isinstance(x, jax.core.Tracer))
        if any(x.is_deleted() for x in arrays):
            raise ValueError(
                "this state was donated to an earlier call (step, run, warm or finish): use the "
                "state that was returned"
            )

    def refuse_traced(self) -> None:
        """Check that no transformation of JAX traces the state.

        Raises:
          ValueError: one does (`jax.jit`); the calls compile programs of their own.
        """
        if any(isinstance(x, jax.core.Tracer) for x in self._one_of_each_kind()):
            raise ValueError(
                "step, run, warm and finish compile their own programs: call them outside jax.jit, "
                "and outside other transformations of JAX"
            )

    def _one_of_each_kind(self) -> list[jax.Array]:
        kinds = ([self.inner.step], self.inner.params.values(), self.anchor.values())
        return [x for kind in kinds for x in islice(kind, 1) if isinstance(x, jax.Array)]

    def whole(self) -> TrainState:
        """This state. (A state of several trainers returns the merged one.)"""
        return self

    @property
    def parts(self) -> dict[str, TrainState]:
        """The training states by the prefix of their arrays' names in a checkpoint: this one."""
        return {"": self}

    def document(self) -> dict[str, Any]:
        """What checkpoints and other regions are told besides, as JSON: nothing, of one trainer."""
        return {}


def flight_key(fragment: int, step: int, region: int | None = None) -> str:
    """Name of a payload in flight; `region` when it is one region's alone."""
    return f"{fragment}@{step}" if region is None else f"{fragment}@{step}/{region}"


def in_send_order(in_flight: dict[str, InFlight]) -> list[tuple[str, InFlight]]:
    """Payloads as they were sent. Dict order does not tell: tree functions sort keys."""

    return sorted(in_flight.items(), key=lambda item: _order(item[1]))


def round_of(state: TrainState, flight: InFlight) -> int:
    """Number, from 0, of the round of its fragment that a payload in flight belongs to.

    Where contributions are applied one by one, each is a round.
    """
    p = int(flight.fragment)
    fragments = (f for f in state.in_flight.values() if f.fragment == p)
    later = sum(_order(f) >= _order(flight) for f in fragments)
    return int(state.counters.sends[p]) - later


def rounds_landed(state: TrainState) -> int:
    """Rounds of all fragments that have landed, where what is in flight has not."""
    return int(state.counters.sends.sum()) - len(state.in_flight)


def _order(flight: InFlight) -> tuple[int, int, int]:
    return int(flight.sent), int(flight.fragment), int(np.argmax(flight.takes_part))


def with_item(items: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    """The same items with one of them replaced."""
    return (*items[:index], value, *items[index + 1 :])


def with_inner(state: TrainState, **changes: Any) -> TrainState:
    """The same state with some fields of `inner` replaced."""
    return state.replace(inner=dataclasses.replace(state.inner, **changes))


def with_taken_over(state: TrainState, params: PyTree, rounding: PyTree) -> TrainState:
    """The same state with these leaves, by name, that regions took over, and their rounding."""
    inner = state.inner
    params, rounding = {**inner.params, **params}, {**inner.rounding, **rounding}
    return with_inner(state, params=params, rounding=rounding)


def without(in_flight: dict[str, InFlight], key: str | None) -> dict[str, InFlight]:
    """The payloads in flight but one."""
    return {k: f for k, f in in_flight.items() if k != key}
