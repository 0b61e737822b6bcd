"""Run training in virtual time: the engine reports events, the clock says how long each region
computes and waits.

Event interface (host side; plain numbers in, plain numbers out):

    clock = VirtualClock(network, seed=0)
    clock.inner_step(step)                   every active region computes one inner step
    clock.send(step, key, nbytes_R, route)   a collective starts; nobody waits
    stall_R = clock.land(step, key)          its receivers wait until the bytes are there

Order inside a step is the engine's: inner step, landings of earlier sends, sends, landings of this
step's sends. A collective starts once its last participant has sent (the maximum of their virtual
times). A landing costs region r max(0, ready_r - now_r); with equal regions and one transfer in
flight that is max(0, T_s - tau * T_c). The part of a stall before the last participant had sent is
booked as waiting for peers, the rest as exposed communication.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax.network.accounts import ClockReport, summarise
from lowcomm_jax.network.collectives import Profile
from lowcomm_jax.network.fabric import Fabric, note_peaks
from lowcomm_jax.network.ledger import Ledger
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.profiles import ProfileCache
from lowcomm_jax.network.randomness import BLOCK, generator, step_factors
from lowcomm_jax.network.recorder import Recorder
from lowcomm_jax.network.sharing import Transfer
from lowcomm_jax.network.timeline import Timeline

REMEMBER = 16  # finished transfers kept before the fabric is tidied


@dataclass
class Flight:
    """One group's collective in flight.

    Attributes:
        number: of its transfer.
        members: region ids.
        start_s: when its last member had sent.
        share_M: share of the volume after which each member has the result.
        waiting_M: who has not landed yet.
    """

    number: int
    members: tuple[int, ...]
    start_s: float
    share_M: np.ndarray
    waiting_M: np.ndarray


class VirtualClock:
    """Virtual time of all regions of a network, driven by events.

    Attributes:
        now_R: virtual seconds of each region, float64 [R].
        ledger: bytes booked by `send`.
    """

    def __init__(self, network: Network, seed: int = 0, record: bool = False) -> None:
        """Start at time 0.

        Args:
            network: regions and links.
            seed: of all jitter; draws are pure functions of (seed, step, region) and of (seed,
                step, key, link).
            record: keep bars for the timeline picture (memory grows with the number of events).
        """
        self.network = network
        self.seed = seed
        self.ledger = Ledger(network.regions)
        self.now_R = np.zeros(network.size)
        self.peers_R = np.zeros(network.size)
        self.exposed_R = np.zeros(network.size)
        self.absent_R = np.zeros(network.size)
        self.peak_R = np.zeros(network.size)
        self.fabric = Fabric()
        self.flights: dict[Hashable, list[Flight]] = {}
        self.used_links: set[tuple[int, int]] = set()
        self.sends = 0
        self.recorder = Recorder(network.regions) if record else None
        self._profiles = ProfileCache(network)
        self._everyone = tuple(range(network.size))

    def inner_step(self, step: int, active: Sequence[bool] | None = None) -> None:
        """Advance every active region by its compute seconds of this step.

        Args:
            step: 1-based inner step; picks the jitter draw.
            active: bool [R]; None = all. An inactive region does not compute and is carried along
                to the time of the slowest active region (booked as absent).

        Raises:
            ValueError: `active` has another length.
        """
        if active is None:
            self.now_R += self._compute(step)
        else:
            self._partial_step(step, np.asarray(active, bool))

    def inner_steps(self, first: int, count: int, active: Sequence[bool] | None = None) -> None:
        """Advance by steps first, ..., first + count - 1: bit for bit as that many `inner_step`
        calls.
        """
        if active is not None or self.network.compute_jitter.active:
            for step in range(first, first + count):
                self.inner_step(step, active)
        elif count > 0:
            path = np.broadcast_to(self.network.compute_R, (count + 1, self.network.size)).copy()
            path[0] = self.now_R
            self.now_R = np.add.accumulate(path, axis=0)[-1].copy()

    def _compute(self, step: int) -> np.ndarray:
        jitter = self.network.compute_jitter
        if not jitter.active:
            return self.network.compute_R
        factors_BxR = step_factors(self.seed, "compute", step // BLOCK, self.network.size, jitter)
        return self.network.compute_R * factors_BxR[step % BLOCK]

    def _partial_step(self, step: int, active_R: np.ndarray) -> None:
        if active_R.shape != self.now_R.shape:
            raise ValueError(
                f"active has shape {active_R.shape}: it must be ({self.network.size},)"
            )
        self.now_R[active_R] += self._compute(step)[active_R]
        if active_R.any() and not active_R.all():
            away_R = np.where(
                active_R, 0.0, np.maximum(self.now_R[active_R].min() - self.now_R, 0.0)
            )
            if self.recorder is not None:
                for region in np.flatnonzero(away_R).tolist():
                    begin = float(self.now_R[region])
                    self.recorder.pause("absent", region, begin, begin + float(away_R[region]), "")
            self.now_R += away_R
            self.absent_R += away_R

    def send(
        self,
        step: int,
        key: Hashable,
        nbytes_R: float | Sequence[float],
        route: str,
        participants_R: Sequence[bool] | None = None,
        groups: Iterable[Sequence[int]] | None = None,
        announced: float | None = None,
    ) -> None:
        """Start a collective (one per group); returns at once and costs no time.

        Args:
            step: inner step of the send.
            key: name of what travels, in flight at most once: an int, a string, or a tuple of
                those.
            nbytes_R: bytes of each region's payload buffers; one number when all are equal.
            route: one of `collectives.ROUTES`.
            participants_R: bool [R]; None = all. Others neither send nor receive.
            groups: disjoint tuples of region ids that exchange among themselves; None = one group
                of all. Absent members are left out; a group of one transfers nothing.
            announced: payload bytes as the codec announces them, for the ledger's analytic figure.

        Raises:
            ValueError: the key is still in flight, or the collective is malformed.
        """
        if key in self.flights:
            raise ValueError(
                f"key {key!r} is still in flight: land it before sending it again at step {step}"
            )
        sizes_R = np.broadcast_to(np.asarray(nbytes_R, float), self.now_R.shape).tolist()
        teams = self._teams(step, key, participants_R, groups)
        jitter = self.network.transfer_jitter.active
        rng = generator(self.seed, key, step) if jitter else None
        flights = []
        for team in teams:
            sizes = tuple([sizes_R[m] for m in team])
            flights.append(self._launch(route, sizes, team, rng))
            self.ledger.book(key, route, sizes, team, announced, self.network.control_bytes)
        self.flights[key] = flights

    def _teams(self, step, key, participants_R, groups) -> list[tuple[int, ...]]:
        if groups is None:
            teams = [self._everyone]
        else:
            teams = [tuple(int(m) for m in group) for group in groups]
            self._check_disjoint(step, key, teams)
        if participants_R is not None:
            taking = set(np.flatnonzero(np.asarray(participants_R, bool)).tolist())
            teams = [tuple(m for m in team if m in taking) for team in teams]
        return [team for team in teams if team]

    def _check_disjoint(self, step, key, teams: list[tuple[int, ...]]) -> None:
        members = [m for team in teams for m in team]
        if len(set(members)) != len(members) or any(
            not 0 <= m < self.network.size for m in members
        ):
            bad = sorted(
                {m for m in members if members.count(m) > 1 or not 0 <= m < self.network.size}
            )
            raise ValueError(
                f"send of {key!r} at step {step}: regions {bad} are in two groups or do not exist: "
                f"use disjoint groups of ids 0 to {self.network.size - 1}"
            )

    def _launch(
        self, route: str, sizes: tuple, team: tuple[int, ...], rng: np.random.Generator | None
    ) -> Flight:
        shape, usage, rate_M = self._profiles.get(route, sizes, team)
        start = float(self.now_R[list(team)].max())
        ready_M, duration, latency = shape.ready_M, shape.duration_s, shape.latency_s
        if rng is not None and len(team) > 1:
            factor_L = self.network.transfer_jitter.draw(rng, (len(shape.sources),))
            ready_M = ready_M * np.array([factor_L[links].max() for links in shape.ready_links])
            slower = float(ready_M.max()) / duration if duration > 0 else 1.0
            duration, latency, rate_M = duration * slower, latency * slower, rate_M / slower
        volume = duration - latency
        share_M = np.maximum(ready_M - latency, 0.0) / volume if volume > 0 else np.zeros(len(team))
        number, self.sends = self.sends, self.sends + 1
        flow = start + latency + self._constants(shape)
        self.fabric.add(Transfer(number, team, flow, volume, usage, rate_M))
        return Flight(number, team, start, share_M, np.ones(len(team), bool))

    def _constants(self, shape: Profile) -> float:
        """Give the per-sync constant, plus the first-use constant when a link is new."""
        if len(shape.members) == 1:
            return 0.0
        extra = self.network.sync_constant_s
        if self.network.first_use_s:
            links = set(zip(shape.sources.tolist(), shape.targets.tolist(), strict=True))
            extra += self.network.first_use_s if links - self.used_links else 0.0
            self.used_links |= links
        return extra

    def land(self, step: int, key: Hashable, regions: Iterable[int] | None = None) -> np.ndarray:
        """Make the receivers wait for a collective; give each region's stall in seconds, float64
        [R].

        Args:
            step: inner step of the landing.
            key: as given to `send`.
            regions: ids of the regions that land now; None = all members that have not landed yet.
                Regions that were no members do not wait. The key is free again once every member
                has landed.

        Raises:
            ValueError: nothing is in flight under this key.
        """
        stall_R = np.zeros(self.network.size)
        flights = self._in_flight(key)
        wanted_R = None if regions is None else np.isin(np.arange(self.network.size), list(regions))
        for flight in flights:
            index_M = np.array(flight.members)
            if wanted_R is None and flight.waiting_M.all():
                share_M, flight.waiting_M = flight.share_M, np.zeros(len(index_M), bool)
            else:
                now_M = flight.waiting_M & (True if wanted_R is None else wanted_R[index_M])
                index_M, share_M = index_M[now_M], flight.share_M[now_M]
                flight.waiting_M = flight.waiting_M & ~now_M
            ready_M = self.fabric.resolve(flight.number).crossings(share_M)
            stall_R[index_M] = self._arrive(key, index_M, flight.start_s, ready_M)
        if not any(flight.waiting_M.any() for flight in flights):
            del self.flights[key]
            if len(self.fabric) >= REMEMBER:
                self._tidy()
        return stall_R

    def _in_flight(self, key: Hashable) -> list[Flight]:
        if key not in self.flights:
            raise ValueError(f"nothing is in flight under key {key!r}: send it first")
        return self.flights[key]

    def _arrive(
        self, key: Hashable, index_M: np.ndarray, start_s: float, ready_M: np.ndarray
    ) -> np.ndarray:
        now_M = self.now_R[index_M]
        stall_M = np.maximum(ready_M - now_M, 0.0)
        peers_M = np.minimum(np.maximum(start_s - now_M, 0.0), stall_M)
        if self.recorder is not None:
            self.recorder.landing(str(key), index_M.tolist(), start_s, now_M, peers_M, ready_M)
        self.now_R[index_M] = np.maximum(now_M, ready_M)
        self.peers_R[index_M] += peers_M
        self.exposed_R[index_M] += stall_M - peers_M
        return stall_M

    def _tidy(self) -> None:
        """Forget transfers that can no longer influence anything; note their peak rates first."""
        numbers = {flight.number for flights in self.flights.values() for flight in flights}
        horizon = min(
            (t.flow_s for t in self.fabric.transfers() if t.number in numbers), default=np.inf
        )
        self._note_peaks()
        self.fabric.forget_before(min(horizon, float(self.now_R.min())), numbers)

    def _note_peaks(self) -> None:
        note_peaks(self.peak_R, [self.fabric.resolve(t.number) for t in self.fabric.transfers()])

    def ready_s(self, key: Hashable) -> np.ndarray:
        """Give the virtual time at which each member has (or will have) the result, float64 [R];
        NaN for others.

        Raises:
            ValueError: nothing is in flight under this key.
        """
        ready_R = np.full(self.network.size, np.nan)
        for flight in self._in_flight(key):
            course = self.fabric.resolve(flight.number)
            ready_R[list(flight.members)] = course.crossings(flight.share_M)
        return ready_R

    def transfer_seconds(
        self, nbytes: float, route: str, members: Sequence[int] | None = None
    ) -> float:
        """Give T_s: seconds of one collective alone, without jitter and first-use constant."""
        team = self._everyone if members is None else tuple(members)
        shape = self._profiles.get(route, (float(nbytes),) * len(team), team)[0]
        return shape.duration_s + (self.network.sync_constant_s if len(team) > 1 else 0.0)

    def report(self) -> ClockReport:
        """Sum up the run so far."""
        self._note_peaks()
        waits_3xR = (self.peers_R, self.exposed_R, self.absent_R)
        return summarise(self.network, self.ledger, self.now_R, waits_3xR, self.peak_R)

    def timeline(self) -> Timeline:
        """Give the bars recorded so far.

        Raises:
            ValueError: the clock was built with `record=False`.
        """
        if self.recorder is None:
            raise ValueError("the clock recorded no bars: build it with record=True")
        return self.recorder.timeline(self.now_R)
