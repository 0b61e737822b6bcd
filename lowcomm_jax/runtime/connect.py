"""Makes exchanges between jobs."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any, get_args

import jax
import numpy as np

from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.leader import Leader, leader
from lowcomm_jax.runtime import kv
from lowcomm_jax.runtime.commits import CommitLog
from lowcomm_jax.runtime.context import ExchangeContext, FaultHooks, NoFaults
from lowcomm_jax.runtime.heartbeat import Heartbeat
from lowcomm_jax.runtime.kv import MetricsCounter, Store
from lowcomm_jax.runtime.peer_transport import PeerTransport
from lowcomm_jax.runtime.remote import RemoteExchange
from lowcomm_jax.runtime.secret import Seal, read_secret
from lowcomm_jax.runtime.terms import Heal
from lowcomm_jax.runtime.timing import Pace, Timing
from lowcomm_jax.runtime.transport import StoreTransport

# -- lockstep ----------------------------------------------------------------------------------
#
# The exchange of a region whose job is several processes.
#
# The first process alone takes part in the exchange; the others learn from it what it decides,
# and what has come (`broadcast_from_leader`). So all of them hold the same arrays and go the same
# way.


class LockstepExchange:
    """`RemoteExchange` in every process of a region: all of them call the same, in one order.

    Args:
      make: makes the exchange, in the first process.

    Raises:
      ValueError: the processes were given different regions; and whatever `make` raises.
    """

    def __init__(self, team: Leader, region: int, count: int, heal: Heal, make: Callable):
        self.region, self.count = region, count
        self._team = team
        self._exchange: RemoteExchange | None = None
        given = team.everyones("region", (region, count, heal))
        if len(set(given)) > 1:
            raise ValueError(
                f"the processes of this job were given (region, count, heal) {given}: give all of "
                "them the same"
            )
        team.broadcast_from_leader("open the exchange", lambda: self._open(make))

    def _open(self, make: Callable) -> None:
        self._exchange = make()
        self._team.on_failure(self._exchange.fail)

    @property
    def awaited(self) -> bool:
        """See `RemoteExchange`."""
        return self._team.broadcast_from_leader("awaited", lambda: self._exchange.awaited)

    @property
    def epoch(self) -> int:
        """See `RemoteExchange`."""
        return self._team.broadcast_from_leader("epoch", lambda: self._exchange.epoch)

    def start(self, key: str, arrays: dict[str, jax.Array | np.ndarray], **options: Any) -> None:
        """See `RemoteExchange.start`; arrays that lie in several processes are put together."""
        here = {name: whole(x) for name, x in arrays.items()}
        self._team.broadcast_from_leader(
            "start", lambda: self._exchange.start(key, here, **options)
        )


def _told(name: str) -> Callable:
    method = getattr(RemoteExchange, name)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return self._team.broadcast_from_leader(
            name, lambda: method(self._exchange, *args, **kwargs)
        )

    return call


_ALIKE = (
    *("join", "come_in", "hear", "living", "steps", "beat", "trains"),
    *("agree", "counts", "pause", "close"),
    *("ready", "reachable", "be_patient", "arrives", "finish", "skip", "passed_over"),
    *("want_state", "asking", "donors", "owes_state", "give_state", "newest_state"),
    *("vouch", "agrees"),
)
for _name in _ALIKE:
    setattr(LockstepExchange, _name, _told(_name))


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
    mishaps: FaultHooks | None = None,
) -> RemoteExchange | LockstepExchange:
    """Exchange whose payloads go through the key-value store; regions need no route to another.

    Where this job is several `jax.distributed` processes, all of them call it alike, and only the
    first one takes part in the exchange (`lockstep`).

    Args:
      url: folder of the store: "file:///...", "gs://bucket/..." or "s3://bucket/...".
      region: which one we are, 0-based; count: how many there are.
      run_id: names the run; a run keeps its id when it is continued.
      secret: shared by the regions: bytes, "env:NAME" or "file:PATH"; None = records are checked
        for damage only, and whoever can write to the store can join.
      timing: how long regions wait for one another.
      keep: keys whose payloads stay for regions that are late; more than may be in flight at once.
      heal: what holds when regions that must have the same anchor have not. Nothing, all "stop";
        that of the "majority", or that of the "lowest" region: the others stop, and take it when
        they come back.
      mishaps: what goes wrong on purpose; None = nothing.

    Raises:
      ValueError: lists everything that is wrong with the arguments.
      StoreUnavailable: the store cannot be opened.
    """

    def make() -> RemoteExchange:
        parts = _parts(url, region, count, run_id, secret, timing, keep, heal, mishaps)
        transport = StoreTransport(parts["store"], parts["tally"])
        return RemoteExchange(ExchangeContext(transport=transport, **parts), "store", keep)

    return _in_step(make, region, count, heal)


def peers(
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None = None,
    *,
    address: str = "127.0.0.1:0",
    timing: Timing | None = None,
    keep: int = ROUNDS_KEPT["peers"],
    heal: Heal = "stop",
    mishaps: FaultHooks | None = None,
) -> RemoteExchange | LockstepExchange:
    """Exchange whose payloads go straight from region to region; see `store`.

    Payloads are plain text on the wire: use a private network or a tunnel.

    Args:
      address: "host:port" under which the other regions reach this one; port 0 takes any.
      keep: keys whose payloads of all regions stay in this host's memory for regions that are
        late; more than may be in flight at once.
    """

    def make() -> RemoteExchange:
        parts = _parts(url, region, count, run_id, secret, timing, keep, heal, mishaps)
        names = ("store", "seal", "beats", "tally", "pace", "timing", "closing")
        transport = PeerTransport(*(parts[name] for name in names), address)
        return RemoteExchange(ExchangeContext(transport=transport, **parts), "peers", keep)

    return _in_step(make, region, count, heal)


def _in_step(
    make: Callable[[], RemoteExchange], region: int, count: int, heal: Heal
) -> RemoteExchange | LockstepExchange:
    """The exchange, or in a job of several processes, what each of them needs of it."""
    processes = leader()
    if processes.count == 1:
        return make()
    return LockstepExchange(processes, region, count, heal, make)


def _parts(url, region, count, run_id, secret, timing, keep, heal, mishaps) -> dict[str, Any]:
    """The parts of an office but for the transport; checks all arguments first."""
    timing = timing or Timing()
    wrong = timing.violations()
    scheme = url.partition("://")[0]
    if scheme not in kv.SCHEMES:
        wrong.append(f"url {url!r} must begin with one of {[f'{s}://' for s in kv.SCHEMES]}")
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
    if wrong:
        raise ValueError("exchange between jobs: " + "; ".join(wrong))
    tally = MetricsCounter()
    opened, seal = Store(url, run_id, tally), Seal(run_id, found)
    return {
        "run_id": run_id,
        "region": region,
        "count": count,
        "timing": timing,
        "heal": heal,
        "tally": tally,
        "store": opened,
        "seal": seal,
        "board": CommitLog(opened, seal),
        "beats": Heartbeat(opened, seal, region, count, timing),
        "pace": Pace(timing),
        "mishaps": mishaps or NoFaults(),
        "closing": threading.Event(),
        "halted": threading.Event(),
    }


JobExchange = RemoteExchange | LockstepExchange
"""Of a job that is one region of several."""
