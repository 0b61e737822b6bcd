"""Runs training in virtual time: the engine reports events, the clock computes regions' waits.

Event interface (on the host; plain numbers in, plain numbers out):

    clock = VirtualClock(network, seed=0)
    clock.inner_step(step)                   every region computes one inner step
    clock.send(step, key, nbytes_R, route)   a collective starts; no region waits
    stall_R = clock.land(step, key)          its members wait until the bytes are there

The engine reports the events of a step in its own order: inner step, landings of earlier sends,
sends, landings of this step's sends.

A collective starts once its last member has sent (the maximum of their virtual times). A landing
costs region r max(0, ready_r - now_r) seconds. With equal regions and one transfer in flight that
is max(0, T_s - tau * T_c). The part of a stall before the last member had sent is booked as waiting
for peers, the rest as exposed communication.

`clock_state` and `restore_clock` save and restore a clock as plain JSON-able data, with the
transfers in flight.
"""

import ast
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from lowcomm_jax.network.ledger import Ledger
from lowcomm_jax.network.links import BYTES_PER_GBIT, Network
from lowcomm_jax.network.randomness import BLOCK, generator, step_factors
from lowcomm_jax.network.timeline import Recorder, Timeline
from lowcomm_jax.network.transfers import Transfer
from lowcomm_jax.network.transit import Flight, PayloadFlights, Transit, sender_groups
from lowcomm_jax.refused import refuse

ARRAYS = ("now_R", "peers_R", "exposed_R", "absent_R")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class ClockReport:
    """Costs of a run so far. Seconds are virtual; arrays are float64 [R].

    Attributes:
        wall_s: time of the last region.
        compute_R, peers_R, exposed_R, absent_R: seconds computing, waiting for slower peers,
            waiting for bytes, and away; the rest of wall_s a region waits for the last one to end.
        utilisation_R, utilisation: compute / wall per region, and their mean.
        sent_R, received_R: payload bytes.
        mean_gbps_R: sending rate over the wall-clock.
    """

    wall_s: float
    compute_R: np.ndarray
    peers_R: np.ndarray
    exposed_R: np.ndarray
    absent_R: np.ndarray
    utilisation_R: np.ndarray
    utilisation: float
    sent_R: np.ndarray
    received_R: np.ndarray
    mean_gbps_R: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """Give plain numbers and lists for JSON."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


class VirtualClock:
    """Virtual time of all regions of a network, driven by events.

    Attributes:
        now_R: virtual seconds of each region, float64 [R].
        peers_R, exposed_R, absent_R: of these, waiting for slower peers, for bytes, and away.
        ledger: bytes booked by `send`.
        transit: transfers under way.
    """

    def __init__(self, network: Network, seed: int = 0, record: bool = False) -> None:
        """Start at time 0.

        Args:
            network: regions and links.
            seed: of all jitter; draws are pure functions of (seed, step, region) and of (seed,
                step, key, link).
            record: keep bars for the timeline picture from the beginning, see `start_recording`.
        """
        self.network = network
        self.seed = seed
        self.ledger: Ledger = Ledger(network.regions)
        self.now_R: np.ndarray = np.zeros(network.size)
        self.peers_R: np.ndarray = np.zeros(network.size)
        self.exposed_R: np.ndarray = np.zeros(network.size)
        self.absent_R: np.ndarray = np.zeros(network.size)
        self.transit: Transit = Transit(network)
        self.recorder: Recorder | None = None
        if record:
            self.start_recording()

    def start_recording(self) -> None:
        """Keep bars for the timeline picture from now on."""
        self.recorder = Recorder(self.network.regions, self.now_R)

    # -- computing ----------------------------------------------------------------------------

    def inner_step(
        self,
        step: int,
        active: Sequence[bool] | None = None,
        away: Sequence[bool] | None = None,
        work: float | Sequence[float] | None = None,
    ) -> None:
        """Advance the regions that compute by their seconds of this step.

        Args:
            step: 1-based inner step; picks the jitter draw.
            active: bool [R], regions that make an inner step; None = all. The time of the others
                does not advance: a slow region's step spans several steps of the run.
            away: bool [R], regions that are absent; None = none. They do not compute; their time
                becomes that of the slowest region that does, when all have made the step. One that
                is further ahead keeps its time.
            work: this step's work as a multiple of the network's step (a larger batch, several
                trainers), of each region or of all; None = 1.

        Raises:
            ValueError: `active` or `away` has another length.
        """
        seconds_R = self._compute(step)
        if work is not None:
            seconds_R = seconds_R * np.asarray(work, float)
        if active is None and away is None:
            self.now_R += seconds_R
            return
        computes_R = ~self._mask("away", away, False)
        computes_R &= self._mask("active", active, True)
        self.now_R[computes_R] += seconds_R[computes_R]
        if away is not None and computes_R.any():
            self._carry(self._mask("away", away, False), float(self.now_R[computes_R].max()))

    def _mask(self, name: str, mask: Sequence[bool] | None, default: bool) -> np.ndarray:
        mask_R = np.full(self.now_R.shape, default) if mask is None else np.asarray(mask, bool)
        if mask_R.shape != self.now_R.shape:
            raise ValueError(f"{name} has shape {mask_R.shape}: it must be ({self.network.size},)")
        return mask_R

    def _compute(self, step: int) -> np.ndarray:
        jitter = self.network.compute_jitter
        if not jitter.active:
            return self.network.compute_R
        factors_BxR = step_factors(self.seed, "compute", step // BLOCK, self.network.size, jitter)
        return self.network.compute_R * factors_BxR[step % BLOCK]

    def _carry(self, away_R: np.ndarray, until_s: float) -> None:
        carried_R = np.where(away_R, np.maximum(until_s - self.now_R, 0.0), 0.0)
        if self.recorder is not None:
            for region in np.flatnonzero(carried_R).tolist():
                begin = float(self.now_R[region])
                self.recorder.pause("absent", region, begin, begin + float(carried_R[region]), "")
        self.now_R += carried_R
        self.absent_R += carried_R

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        step: int,
        key: Hashable,
        nbytes_R: float | Sequence[float],
        route: str,
        participants_R: Sequence[bool] | None = None,
        groups: Iterable[Sequence[int]] | None = None,
        listeners_R: Sequence[bool] | None = None,
        label: Hashable | None = None,
    ) -> None:
        """Start a collective (one per group); returns at once and costs no time.

        Args:
            step: inner step of the send.
            key: name of the payload, in flight at most once: an int, a string, or a tuple of those.
            nbytes_R: bytes of each region's payload buffers; one number when all are equal.
            route: one of `routes.ROUTES`.
            participants_R: bool [R]; None = all. Others do not send.
            groups: disjoint tuples of region ids that exchange among themselves; None = one group
                of all. Absent members are left out; a group of one transfers nothing.
            listeners_R: bool [R]; None = none. Regions that send nothing but receive the same as
                participants; with one participant the send is one-to-all. They wait for it in
                `catch_up`.
            label: name under which the ledger books it (a fragment), see `Transit.open`; None = the
                key.

        Raises:
            ValueError: the key is still in flight, or the collective is malformed.
        """
        found = sender_groups(self.network.size, participants_R, groups)
        listeners = () if listeners_R is None else tuple(np.flatnonzero(listeners_R).tolist())
        if listeners and groups is not None:
            raise ValueError(
                f"send of {key!r} at step {step}: groups have no listeners; leave groups or "
                "listeners_R out"
            )
        label = key if label is None else label
        self.transit.open(key, label)
        even = isinstance(nbytes_R, int | float)
        sizes_R = [float(nbytes_R)] * self.network.size if even else [float(b) for b in nbytes_R]
        rng = None
        if self.network.transfer_jitter.active:
            rng = generator(self.seed, key, step)
        for senders in found:
            sizes = tuple([sizes_R[m] for m in senders])
            start = float(self.now_R[list(senders)].max())
            self.transit.launch(key, route, sizes, senders, listeners, start, rng)
            self.ledger.book(label, route, sizes, senders, listeners)

    # -- landing ------------------------------------------------------------------------------

    def land(self, step: int, key: Hashable, regions: Iterable[int] | None = None) -> np.ndarray:
        """Make senders wait for a collective; give each region's stall in seconds, float64 [R].

        Args:
            step: inner step of the landing.
            key: as given to `send`.
            regions: ids of the regions that land now; None = all senders that have not landed yet.
                Regions that did not send do not wait. The key is free again once every sender has
                landed.

        Raises:
            ValueError: nothing is in flight under this key.
        """
        stall_R = np.zeros(self.network.size)
        wanted_R = None if regions is None else self._chosen(regions)
        for flight in self.transit.payload(key).sent:
            self._wait(flight, wanted_R, stall_R)
        self.transit.landed(key, float(self.now_R.min()))
        self._skip_what_is_there()
        return stall_R

    def catch_up(self, regions: Iterable[int]) -> np.ndarray:
        """Make regions wait for payloads that they listened to and others have landed.

        A landing adopts an anchor that holds everything landed so far, so that a region calls this
        whenever it lands a payload.

        Returns:
            Each region's stall in seconds, float64 [R].
        """
        stall_R = np.zeros(self.network.size)
        if self.transit.owed:
            wanted_R = self._chosen(regions)
            for flight in self.transit.owed:
                self._wait(flight, wanted_R, stall_R)
            self.transit.drop_landed(float(self.now_R.min()))
        return stall_R

    def _skip_what_is_there(self) -> None:
        """Drop owed waits for arrived transfers; a region that never lands would keep all."""
        if not self.transit.owed:
            return
        for flight in self.transit.owed:
            index_M = np.array(flight.members)
            ready_M = self.transit.ready(flight, np.ones(len(index_M), bool))
            there_M = flight.waiting_M & (ready_M <= self.now_R[index_M])
            flight.waiting_M = flight.waiting_M & ~there_M
            if self.recorder is not None:
                begin, label = flight.start_s, str(flight.key)
                self.recorder.travel(label, index_M[there_M], begin, ready_M[there_M])
        self.transit.drop_landed(float(self.now_R.min()))

    def _chosen(self, regions: Iterable[int]) -> np.ndarray:
        chosen_R = np.zeros(self.network.size, bool)
        chosen_R[list(regions)] = True
        return chosen_R

    def _wait(self, flight: Flight, wanted_R: np.ndarray | None, stall_R: np.ndarray) -> None:
        """Let members of a flight wait for it; their stalls are added in place."""
        index_M, now_M = np.array(flight.members), flight.waiting_M
        if wanted_R is not None:
            now_M = now_M & wanted_R[index_M]
        if not now_M.any():
            return
        ready_M = self.transit.ready(flight, now_M)
        flight.waiting_M = flight.waiting_M & ~now_M
        index_M = index_M[now_M]
        stall_R[index_M] += self._arrive(str(flight.key), index_M, flight.start_s, ready_M)

    def _arrive(
        self, label: str, index_M: np.ndarray, start_s: float, ready_M: np.ndarray
    ) -> np.ndarray:
        now_M = self.now_R[index_M]
        stall_M = np.maximum(ready_M - now_M, 0.0)
        peers_M = np.minimum(np.maximum(start_s - now_M, 0.0), stall_M)
        if self.recorder is not None:
            self.recorder.landing(label, index_M, start_s, now_M, peers_M, ready_M)
        self.now_R[index_M] = np.maximum(now_M, ready_M)
        self.peers_R[index_M] += peers_M
        self.exposed_R[index_M] += stall_M - peers_M
        return stall_M

    # -- what it cost -------------------------------------------------------------------------

    def report(self) -> ClockReport:
        """Sum up the run so far."""
        wall = float(self.now_R.max())
        compute_R = self.now_R - self.peers_R - self.exposed_R - self.absent_R
        utilisation_R = compute_R / wall if wall > 0 else np.ones(self.network.size)
        sent_R = self.ledger.sent_R()
        mean_gbps_R = sent_R / wall / BYTES_PER_GBIT if wall > 0 else np.zeros(self.network.size)
        return ClockReport(
            wall_s=wall,
            compute_R=compute_R,
            peers_R=self.peers_R.copy(),
            exposed_R=self.exposed_R.copy(),
            absent_R=self.absent_R.copy(),
            utilisation_R=utilisation_R,
            utilisation=float(utilisation_R.mean()),
            sent_R=sent_R,
            received_R=self.ledger.received_R(),
            mean_gbps_R=mean_gbps_R,
        )

    def timeline(self) -> Timeline:
        """Give the bars recorded so far.

        Raises:
            ValueError: nothing was recorded.
        """
        if self.recorder is None:
            raise ValueError("the clock recorded no bars: build it with record=True")
        return self.recorder.timeline(self.now_R)


# -- saving and restoring ----------------------------------------------------------------------


def clock_state(clock: VirtualClock) -> dict[str, Any]:
    """Give everything a clock needs to go on as if it had never stopped (bars of the timeline
    excepted).

    Keys and labels must be ints, strings or tuples of those.
    """
    transit = clock.transit
    return {
        "seed": clock.seed,
        "sends": transit.sends,
        "arrays": {name: getattr(clock, name).tolist() for name in ARRAYS},
        "used_links": sorted(list(pair) for pair in transit.used_links),
        "payloads": [
            {
                "key": repr(key),
                "label": repr(payload.label),
                "landing": payload.landing,
                "sent": [_row(f) for f in payload.sent],
                "heard": [_row(f) for f in payload.heard],
            }
            for key, payload in transit.payloads.items()
        ],
        "owed": [_row(f) for f in transit.owed],
        "transfers": [_row(transit.fabric.resolve(t.number)) for t in transit.fabric.transfers()],
        "booked": [[repr(entry), times] for entry, times in clock.ledger.booked.items()],
    }


def restore_clock(clock: VirtualClock, state: dict[str, Any]) -> None:
    """Put a freshly built clock (same network) into a saved state, in place.

    Raises:
        ValueError: the clock was used before, or the state is of another number of regions or
            another seed.
    """
    found, transit = [], clock.transit
    if transit.sends or clock.now_R.any():
        found.append("the clock was already used: restore into a new one")
    if len(state["arrays"]["now_R"]) != clock.network.size:
        found.append(
            f"saved with {len(state['arrays']['now_R'])} regions, the network has "
            f"{clock.network.size}"
        )
    if state["seed"] != clock.seed:
        found.append(
            f"saved with seed {state['seed']}, the clock has {clock.seed}: use the saved one"
        )
    refuse("cannot restore the clock", found)
    for name in ARRAYS:
        getattr(clock, name)[:] = state["arrays"][name]
    transit.sends = state["sends"]
    transit.used_links = {(a, b) for a, b in state["used_links"]}
    for row in state["transfers"]:
        transit.fabric.add(_record(Transfer, row))
    for row in state["payloads"]:
        sent, heard = ([_record(Flight, f) for f in row[part]] for part in ("sent", "heard"))
        payload = PayloadFlights(ast.literal_eval(row["label"]), sent, heard, row["landing"])
        transit.payloads[ast.literal_eval(row["key"])] = payload
    transit.owed = [_record(Flight, row) for row in state["owed"]]
    clock.ledger.booked.update({ast.literal_eval(entry): times for entry, times in state["booked"]})


def _row(record: Flight | Transfer) -> dict[str, Any]:
    """The fields of a record as JSON holds them: lists of arrays, all else as Python writes it."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {n: v.tolist() if isinstance(v, np.ndarray) else repr(v) for n, v in values.items()}


def _record(kind: Callable[..., T], row: dict[str, Any]) -> T:
    """The record of a row."""
    values = {n: ast.literal_eval(v) if isinstance(v, str) else np.array(v) for n, v in row.items()}
    return kind(**values)
