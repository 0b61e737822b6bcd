"""Makes one region's exchange: `store`, `peers` and `through` return a `JobExchange`.

They raise `ValueError` with everything that is wrong with the arguments. In a job of several
processes they return a `LockstepExchange`: its first process alone takes part in the exchange.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.leader import Leader, leader
from lowcomm_jax.refused import refuse
from lowcomm_jax.runtime.background import Background
from lowcomm_jax.runtime.commits import CommitLog
from lowcomm_jax.runtime.context import ContextParts, ExchangeContext, FaultHooks, NoFaults
from lowcomm_jax.runtime.file_handles import file_handle_problems
from lowcomm_jax.runtime.heartbeat import Heartbeat, WaitList
from lowcomm_jax.runtime.kv import MetricsCounter, Store, url_problems
from lowcomm_jax.runtime.remote import RemoteExchange
from lowcomm_jax.runtime.request import Arrived
from lowcomm_jax.runtime.rounds import RoundExchange
from lowcomm_jax.runtime.secret import Seal, read_secret
from lowcomm_jax.runtime.slots import Slots
from lowcomm_jax.runtime.terms import Heal
from lowcomm_jax.runtime.timing import Pace, Timing
from lowcomm_jax.runtime.transport import StoreTransport, Transport

ANY_HOST = ("0.0.0.0", "[::]", "*")
"""Hosts to listen on that mean all addresses of a machine."""

ROUNDS_KEPT = {"store": 16, "peers": 4}
"""For how many rounds payloads stay; a round has a key for every fragment."""


def store(
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None = None,
    *,
    timing: Timing | None = None,
    keep: int = ROUNDS_KEPT["store"],
    heal: Heal = "stop",
    identity: Mapping[str, str] | None = None,
    fault_hooks: FaultHooks | None = None,
) -> RemoteExchange | LockstepExchange:
    """Exchange whose payloads go through the key-value store; jobs need no route to one another.

    Where this job is several `jax.distributed` processes, all of them call this function with the
    same arguments; only the first one takes part in the exchange (`LockstepExchange`).

    Args:
      url: folder of the store: "gs://bucket/...", "s3://bucket/...", or what
        `pathlib.Path(folder).absolute().as_uri()` gives, "file:///...".
      region: number of this region, from 0.
      count: number of regions.
      run_id: names the run; a run keeps its id when it is continued.
      secret: shared by the regions: bytes, "env:NAME" or "file:PATH"; None = records are checked
        for damage only, and any program that can write to the store can join.
      timing: how long regions wait for one another.
      keep: exchanges whose payloads stay for regions that are late; more than may be in flight at
        once. With several fragments a round has an exchange for each.
      heal: what to do where anchors differ that must be equal. "stop": all regions stop.
        "majority", "lowest": the anchor of most regions, or of the lowest one, is kept; the others
        stop, and take that anchor when they come back.
      identity: what else all jobs of the run must have in common, by name; a job that differs is
        told in what.
      fault_hooks: faults on purpose (`FaultHooks`); None = none.

    Raises:
      ValueError: lists everything that is wrong with the arguments.
      StoreUnavailable: the store cannot be opened.
    """
    shared = Shared(url, region, count, run_id, secret, timing, keep, heal, identity, fault_hooks)
    wrong = file_handle_problems(count, peers=False)
    return _open(lambda parts: StoreTransport(parts.store, parts.counter), shared, wrong)


def peers(
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None = None,
    *,
    address: str = "127.0.0.1:0",
    listen: str | None = None,
    certificates: str | None = None,
    timing: Timing | None = None,
    keep: int = ROUNDS_KEPT["peers"],
    heal: Heal = "stop",
    identity: Mapping[str, str] | None = None,
    fault_hooks: FaultHooks | None = None,
) -> RemoteExchange | LockstepExchange:
    """Exchange whose payloads go straight from region to region; see `store`.

    They travel by HTTPS with certificates on both sides: a region lets in only regions of the run.

    Args:
      url, region, count, run_id, secret, timing, heal, identity, fault_hooks: see `store`.
      address: "host:port" under which the other regions reach this one; port 0 = the one that is
        listened on.
      listen: "host:port" of this machine to listen on, where that is another one, behind NAT or a
        map of ports; port 0 takes any. None = `address`.
      certificates: folder with `tls.crt`, `tls.key` and the authority's `ca.crt`; None = every
        region makes its own when it starts. The same choice in all regions.
      keep: keys whose payloads of all regions stay in this host's memory for regions that are
        late; more than may be in flight at once.

    Raises:
      ValueError: lists everything that is wrong with the arguments, or the address cannot be used.
    """

    def make(parts: ContextParts) -> Transport:
        # Its libraries, of HTTP and certificates, would make every import of the package slower.
        from lowcomm_jax.runtime.peers_transport import PeersTransport

        return PeersTransport(parts, address, certificates, listen)

    shared = Shared(url, region, count, run_id, secret, timing, keep, heal, identity, fault_hooks)
    wrong = [*address_problems(address, listen), *file_handle_problems(count, peers=True)]
    return _open(make, shared, wrong)


def through(
    transport: Callable[[ContextParts], Transport],
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None = None,
    *,
    timing: Timing | None = None,
    keep: int = ROUNDS_KEPT["peers"],
    heal: Heal = "stop",
    identity: Mapping[str, str] | None = None,
    fault_hooks: FaultHooks | None = None,
) -> RemoteExchange | LockstepExchange:
    """Exchange whose payloads a transport of one's own moves; see `store`.

    Records and heartbeats go through the store at `url` all the same. Payloads are named by their
    SHA-256, and verified by who gets them.

    Args:
      transport: makes it from what the exchanges of a region share; every region uses the same one.
      url, region, count, run_id, secret, timing, keep, heal, identity, fault_hooks: see `store`.

    Raises:
      ValueError: lists everything that is wrong with the arguments.
      StoreUnavailable: the store cannot be opened.
    """
    shared = Shared(url, region, count, run_id, secret, timing, keep, heal, identity, fault_hooks)
    return _open(transport, shared, file_handle_problems(count, peers=True))


class Shared(NamedTuple):
    """Arguments of all exchanges; see `store`."""

    url: str
    region: int
    count: int
    run_id: str
    secret: bytes | str | None
    timing: Timing | None
    keep: int
    heal: Heal
    identity: Mapping[str, str] | None
    fault_hooks: FaultHooks | None


def _open(
    transport: Callable[[ContextParts], Transport], shared: Shared, wrong: Sequence[str]
) -> RemoteExchange | LockstepExchange:
    """The exchange; in a job of several processes, the one for each of them.

    Args:
      wrong: problems found so far.
    """

    def make() -> RemoteExchange:
        parts = _context_parts(shared, wrong)
        context = ExchangeContext(**vars(parts), transport=transport(parts))
        return RemoteExchange(context, shared.keep)

    processes = leader()
    if processes.count == 1:
        return make()
    return LockstepExchange(processes, shared.region, shared.count, shared.heal, make)


def address_problems(address: str, listen: str | None) -> list[str]:
    """A line for each reason why others cannot reach a region there, or it cannot listen."""
    given = {"address": address} | ({} if listen is None else {"listen": listen})
    found = []
    for name, value in given.items():
        if not isinstance(value, str):
            found.append(f"{name}={value!r}: give a text, HOST:PORT")
            continue
        host, _, port = value.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            found.append(f"{name}={value!r}: give HOST:PORT, with port 0 for any that is free")
        elif name == "address" and host in ANY_HOST:
            found.append(
                f"{name}={value!r} is no address of one machine: give HOST:PORT by which the other "
                f"regions reach this one, and listen=0.0.0.0:{port} to listen on all addresses"
            )
    return found


class LockstepExchange:
    """`RemoteExchange` of a region whose job is several processes.

    All processes call the same methods in one order. The first process calls its `RemoteExchange`
    and broadcasts the result, so that all processes hold the same arrays and take the same way.

    Args:
      team: this job's processes.
      make: makes the exchange, in the first process.

    Raises:
      ValueError: the processes were given different regions; and whatever `make` raises.
    """

    def __init__(
        self, team: Leader, region: int, count: int, heal: Heal, make: Callable[[], RemoteExchange]
    ):
        self.region: int = region
        self.count: int = count
        self.heal: Heal = heal
        self._leader = team
        self._exchange: RemoteExchange | None = None
        given = team.everyones("region", (region, count, heal))
        if len(set(given)) > 1:
            raise ValueError(
                f"the processes of this job were given (region, count, heal) {given}: give all of "
                "them the same"
            )
        team.broadcast_from_leader("open the exchange", lambda: self._open(make))

    def _open(self, make: Callable[[], RemoteExchange]) -> None:
        self._exchange = make()
        self._leader.on_failure(self._exchange.fail)

    @property
    def awaited(self) -> bool:
        """See `RemoteExchange`."""
        return self._leader.broadcast_from_leader("awaited", lambda: self._exchange.awaited)

    @property
    def epoch(self) -> int:
        """See `RemoteExchange`."""
        return self._leader.broadcast_from_leader("epoch", lambda: self._exchange.epoch)

    def stop_when(self, stops: Callable[[], bool]) -> None:
        """See `RemoteExchange`; the first process asks."""
        if self._exchange is not None:
            self._exchange.stop_when(stops)

    def start(self, key: str, arrays: dict[str, jax.Array | np.ndarray], **options: Any) -> None:
        """See `RemoteExchange.start`; arrays that lie in several processes are put together."""
        here = {name: whole(x) for name, x in arrays.items()}
        self._leader.broadcast_from_leader(
            "start", lambda: self._exchange.start(key, here, **options)
        )

    def send_early(
        self, key: str, arrays: dict[str, jax.Array | np.ndarray], **options: Any
    ) -> None:
        """See `RemoteExchange.send_early`; arrays are put together as in `start`."""
        here = {name: whole(x) for name, x in arrays.items()}
        self._leader.broadcast_from_leader(
            "send_early", lambda: self._exchange.send_early(key, here, **options)
        )

    @property
    def kind(self) -> str:
        """See `RemoteExchange`."""
        return self._leader.broadcast_from_leader("kind", lambda: self._exchange.kind)

    def rounds(self, *given: Any) -> LockstepRounds:
        """See `RemoteExchange.rounds`."""
        made: list[RoundExchange] = []
        begin = self._leader.broadcast_from_leader
        begin("rounds", lambda: made.append(self._exchange.rounds(*given)))
        return LockstepRounds(self._leader, made[0] if made else None)


class LockstepRounds:
    """`RoundExchange` of a learner whose job is several processes; see `LockstepExchange`.

    Attributes:
      newest, committed: as they were when the last step was done, or was reported to, so that all
        processes decide by the same numbers.
    """

    def __init__(self, team: Leader, rounds: RoundExchange | None):
        self._leader, self._rounds = team, rounds
        self._look(lambda: None)

    def _look(self, act: Callable[[], None]) -> None:
        def both() -> tuple[int, int]:
            act()
            return self._rounds.newest, self._rounds.committed

        self.newest, self.committed = self._leader.broadcast_from_leader("look", both)

    def stepped(self) -> None:
        """See `RoundExchange`."""
        self._look(lambda: self._rounds.stepped())

    def wait(self) -> None:
        """See `RoundExchange`."""
        self._look(lambda: self._rounds.wait())

    def check(self) -> None:
        """See `RoundExchange`."""
        self._leader.broadcast_from_leader("check", lambda: self._rounds.check())

    def report(
        self, number: int, arrays: Mapping[str, Any], terms: Mapping[str, Any], step: int
    ) -> None:
        """See `RoundExchange`; arrays that lie in several processes are put together."""
        here = {name: whole(x) for name, x in arrays.items()}
        self._leader.broadcast_from_leader(
            "report", lambda: self._rounds.report(number, here, terms, step)
        )
        self.newest = max(self.newest, number)

    def take(self, number: int) -> Arrived | None:
        """See `RoundExchange`."""
        return self._leader.broadcast_from_leader("take", lambda: self._rounds.take(number))

    def compare(self, number: int, ours: Mapping[str, Any]) -> None:
        """See `RoundExchange`."""
        self._leader.broadcast_from_leader("compare", lambda: self._rounds.compare(number, ours))

    def go_on(self, first: int) -> None:
        """See `RoundExchange`."""
        self._look(lambda: self._rounds.go_on(first))

    def names_ours(self, number: int) -> bool:
        """See `RoundExchange`."""
        ours = self._leader.broadcast_from_leader
        return ours("names_ours", lambda: self._rounds.names_ours(number))

    def landed(self, number: int) -> None:
        """See `RoundExchange`."""
        self._leader.broadcast_from_leader("landed", lambda: self._rounds.landed(number))


def _broadcast(name: str) -> Callable:
    """A method that calls `RemoteExchange`'s in the first process and returns its result in all."""
    method = getattr(RemoteExchange, name)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return self._leader.broadcast_from_leader(
            name, lambda: method(self._exchange, *args, **kwargs)
        )

    return call


_BROADCAST = (
    *("join", "come_in", "wait_for_beats", "living", "steps", "beat", "trains"),
    *("agree", "counts", "pause", "close", "result", "misses", "leave_result"),
    *("ready", "reachable", "stopped", "be_patient", "keep_more", "arrives", "finish", "skip"),
    "passed_over",
    *("fetch_ahead", "forget_ahead", "drop_early"),
    *("agreed_terms", "sent_before"),
    *("want_state", "asking", "donors", "owes_state", "give_state", "newest_state"),
    *("announce_anchors", "anchors_agree"),
)

for _name in _BROADCAST:
    setattr(LockstepExchange, _name, _broadcast(_name))

JobExchange = RemoteExchange | LockstepExchange
"""What `store`, `peers` and `through` return."""


def _context_parts(shared: Shared, wrong: Sequence[str]) -> ContextParts:
    """`ExchangeContext` without its transport; checks all arguments first."""
    url, region, count, run_id, secret, timing, keep, heal, identity, fault_hooks = shared
    timing = timing or Timing()
    wrong = [*wrong, *timing.violations()]
    wrong += url_problems(url)
    if count < 1 or not 0 <= region < count:
        wrong.append(f"region {region} of {count} must be one of 0..count-1")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        wrong.append(f"run_id {run_id!r} must be made of letters, digits, '.', '_' and '-'")
    if heal not in get_args(Heal):
        wrong.append(f"heal={heal!r}: use {', '.join(get_args(Heal))}")
    if keep < 1:
        wrong.append(f"keep={keep} must be at least 1")
    try:
        found = read_secret(secret)
    except ValueError as error:
        wrong.append(str(error))
    refuse("exchange between jobs", wrong)
    counter = MetricsCounter()
    opened = Store(url, run_id, counter)
    slots = Slots(opened, Seal(run_id, found))
    heartbeat = Heartbeat(opened, slots, region, count, timing)
    return ContextParts(
        run_id=run_id,
        region=region,
        count=count,
        timing=timing,
        heal=heal,
        identity=dict(identity or {}),
        serials=itertools.count(1),
        counter=counter,
        store=opened,
        slots=slots,
        commit_log=CommitLog(opened, slots),
        heartbeat=heartbeat,
        wait_list=WaitList(heartbeat),
        pace=Pace(timing),
        background=Background(heartbeat.fail),
        fault_hooks=fault_hooks or NoFaults(),
        closing=threading.Event(),
        halted=threading.Event(),
    )
