"""Makes one region's exchange: `store`, `peers` and `through` return a `RemoteExchange`.

They raise `ValueError` with everything that is wrong with the arguments.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.refused import refuse
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.background import Background
from lowcomm_jax.store.commits import CommitLog
from lowcomm_jax.store.context import ContextParts, ExchangeContext, FaultHooks, NoFaults
from lowcomm_jax.store.file_handles import file_handle_problems
from lowcomm_jax.store.heartbeat import Heartbeat
from lowcomm_jax.store.kv import MetricsCounter, Store, url_problems
from lowcomm_jax.store.secret import Seal, read_secret
from lowcomm_jax.store.slots import Slots
from lowcomm_jax.store.terms import Heal
from lowcomm_jax.store.timing import Pace, Timing
from lowcomm_jax.store.transport import StoreTransport, Transport
from lowcomm_jax.store.wait_list import WaitList

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
) -> RemoteExchange:
    """Exchange whose payloads go through the key-value store; jobs need no route to one another.

    Where this job is several `jax.distributed` processes, all of them call this function with the
    same arguments; only the first one takes part in the exchange (`RemoteExchange`).

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
) -> RemoteExchange:
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
        from lowcomm_jax.store.peers_transport import PeersTransport

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
) -> RemoteExchange:
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
) -> RemoteExchange:
    """The exchange.

    Args:
      wrong: problems found so far.
    """

    def make() -> ExchangeContext:
        parts = _context_parts(shared, wrong)
        return ExchangeContext(**vars(parts), transport=transport(parts))

    given = shared.region, shared.count, shared.heal
    return RemoteExchange(*given, make, shared.keep, leader())


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
