"""Collectives between their send and their last landing.

`Transit` takes sends (`open`, `launch`) and computes when each member has the result (`ready`). A
collective starts once its last sender has sent, and then shares the network with the others
(`transfers.Fabric`). A member has the result when its share of the volume has been transferred,
plus the latency of its own path.

Listeners (see `routes`) have no landing of their own. A payload they listened to is due once a
sender has landed it, and they wait for it at their own next landing.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lowcomm_jax.network.collectives import Profile, profile
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.transfers import Fabric, Transfer

CACHED_PROFILES = 4096  # random pairs and adapting sizes must not grow without bound
KEPT_TRANSFERS = 16  # with fewer, `Transit` forgets none


@dataclass
class Flight:
    """One collective as some of its regions wait for it.

    Attributes:
        key: name of the payload.
        number: of its transfer.
        members: region ids.
        start_s: when its last sender had sent.
        latency_M: seconds of each member's path that bandwidth cannot shorten.
        share_M: share of the volume after which each member has the result.
        waiting_M: bool, members that have not landed yet.
    """

    key: Hashable
    number: int
    members: tuple[int, ...]
    start_s: float
    latency_M: np.ndarray
    share_M: np.ndarray
    waiting_M: np.ndarray


@dataclass
class PayloadFlights:
    """The flights of one key.

    Attributes:
        label: name under which the ledger books it.
        sent: one flight a group, of the members that sent.
        heard: flights of the listeners.
        landing: whether a member has landed it.
    """

    label: Hashable
    sent: list[Flight] = field(default_factory=list)
    heard: list[Flight] = field(default_factory=list)
    landing: bool = False


class Transit:
    """Collectives under way on a network.

    Attributes:
        payloads: by key, until every sender has landed.
        owed: flights that landed elsewhere and their members still have to wait for.
        used_links: links that have paid the first-use constant.
        sends: collectives started so far.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.fabric: Fabric = Fabric()
        # Computed once each, so that a repeated exchange costs a look-up.
        self.profile: Callable[..., Profile] = functools.lru_cache(CACHED_PROFILES)(
            functools.partial(profile, network)
        )
        self.payloads: dict[Hashable, PayloadFlights] = {}
        self.owed: list[Flight] = []
        self.used_links: set[tuple[int, int]] = set()
        self.sends: int = 0

    def open(self, key: Hashable, label: Hashable) -> None:
        """Make room for a payload.

        A label that is sent again is in flight nowhere any more: members that have not landed the
        payload before do so at their next landing.

        Raises:
            ValueError: the key is still in flight.
        """
        if key in self.payloads:
            raise ValueError(f"key {key!r} is still in flight: land it before sending it again")
        for old in [k for k, p in self.payloads.items() if p.landing and p.label == label]:
            self.owed += [f for f in self.payloads.pop(old).sent if f.waiting_M.any()]
        self.payloads[key] = PayloadFlights(label)

    def launch(
        self,
        key: Hashable,
        route: str,
        sizes: tuple[float, ...],
        senders: tuple[int, ...],
        listeners: tuple[int, ...],
        start_s: float,
        rng: np.random.Generator | None,
    ) -> None:
        """Start one group's collective; `rng` draws the jitter of its links.

        Raises:
            ValueError: see `routes.check`.
        """
        shape = self.profile(route, sizes, senders, listeners)
        latency_M, volume_M, volume = shape.latency_M, shape.volume_M, shape.volume_s
        if rng is not None and len(shape.members) > 1:
            factor_L = self.network.transfer_jitter.draw(rng, (len(shape.sources),))
            factor_M = np.array([factor_L[links].max(initial=0.0) for links in shape.ready_links])
            latency_M, volume_M = latency_M * factor_M, volume_M * factor_M
            volume = float(volume_M.max())
        share_M = volume_M / volume if volume > 0 else np.zeros(len(shape.members))
        flow = float(start_s + self._constants(shape))
        self.fabric.add(Transfer(self.sends, shape.members, flow, volume, shape.usage))
        payload, cut = self.payloads[key], len(senders)
        for flights, members, part in (
            (payload.sent, senders, slice(cut)),
            (payload.heard, listeners, slice(cut, None)),
        ):
            if members:
                times = (start_s, latency_M[part], share_M[part], np.ones(len(members), bool))
                flights.append(Flight(key, self.sends, members, *times))
        self.sends += 1

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

    def payload(self, key: Hashable) -> PayloadFlights:
        """Give the payload of a key.

        Raises:
            ValueError: nothing is in flight under this key.
        """
        if key not in self.payloads:
            raise ValueError(f"nothing is in flight under key {key!r}: send it first")
        return self.payloads[key]

    def ready(self, flight: Flight, which_M: np.ndarray) -> np.ndarray:
        """Give the times at which the members of `which_M` have (or will have) the result."""
        course = self.fabric.resolve(flight.number)
        return course.crossings(flight.share_M[which_M]) + flight.latency_M[which_M]

    def landed(self, key: Hashable, now_s: float) -> None:
        """Note that senders have landed a payload; `now_s` is the time of the last region."""
        payload = self.payloads[key]
        self.owed += payload.heard
        payload.heard, payload.landing = [], True
        if not any(flight.waiting_M.any() for flight in payload.sent):
            del self.payloads[key]
            self._tidy(now_s)

    def drop_landed(self, now_s: float) -> None:
        """Drop the flights for which no region waits any more."""
        self.owed = [flight for flight in self.owed if flight.waiting_M.any()]
        self._tidy(now_s)

    def _tidy(self, now_s: float) -> None:
        """Forget transfers that can no longer influence anything."""
        if len(self.fabric) < KEPT_TRANSFERS:
            return
        under_way = (f for p in self.payloads.values() for f in (*p.sent, *p.heard))
        numbers = {flight.number for flight in (*under_way, *self.owed)}
        horizon = min(
            (t.flow_s for t in self.fabric.transfers() if t.number in numbers), default=np.inf
        )
        self.fabric.forget_before(min(horizon, now_s), numbers)


def sender_groups(
    size: int,
    participants_R: Sequence[bool] | None,
    groups: Iterable[Sequence[int]] | None,
) -> list[tuple[int, ...]]:
    """List the groups of regions that exchange, without absent regions and empty groups.

    Raises:
        ValueError: groups that overlap, or name regions that do not exist.
    """
    if groups is None:
        found = [tuple(range(size))]
    else:
        found = [tuple(int(m) for m in group) for group in groups]
        members = [m for senders in found for m in senders]
        known = set(members)
        if len(known) != len(members) or not known <= set(range(size)):
            bad = sorted(m for m in known if members.count(m) > 1 or not 0 <= m < size)
            raise ValueError(
                f"regions {bad} are in two groups or do not exist: use disjoint groups of ids 0 to "
                f"{size - 1}"
            )
    if participants_R is not None:
        taking = set(np.flatnonzero(np.asarray(participants_R, bool)).tolist())
        found = [tuple(m for m in senders if m in taking) for senders in found]
    return [senders for senders in found if senders]
