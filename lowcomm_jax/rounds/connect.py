"""Makes one region's exchange: `store` returns a `RemoteExchange`; `peers` is a transport for it.

They raise `ValueError` with everything that is wrong with the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import get_args

from lowcomm_jax.refused import Refused, refuse
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.context import ExchangeContext, FaultHooks
from lowcomm_jax.store.file_handles import file_handle_problems
from lowcomm_jax.store.kv import url_problems
from lowcomm_jax.store.secret import read_secret
from lowcomm_jax.store.terms import Heal
from lowcomm_jax.store.timing import Timing
from lowcomm_jax.store.transport import StoreTransport, Transport

ANY_HOST = ("0.0.0.0", "[::]", "*")
"""Hosts to listen on that mean all addresses of a machine."""

_TITLE = "exchange between jobs"


def store(
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None = None,
    *,
    transport: Callable[[ExchangeContext], Transport] | None = None,
    timing: Timing | None = None,
    keep: int | None = None,
    heal: Heal = "stop",
    identity: Mapping[str, str] | None = None,
    fault_hooks: FaultHooks | None = None,
) -> RemoteExchange:
    """Exchange between jobs that meet in a key-value store, one job a region.

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
      transport: how payloads travel, the same way in every region: `peers(...)`, or what makes a
        transport of one's own from what the exchanges of this region share. Records and heartbeats
        go through the store all the same. Payloads are named by their SHA-256, and verified by who
        gets them. None = they go through the store: jobs need no route to one another.
      timing: how long regions wait for one another; None = as `Timing.between` says of the url.
      keep: exchanges whose payloads stay for regions that are late; more than may be in flight at
        once. With several fragments a round has an exchange for each. None = 16; 4 with a transport
        that lingers (`Transport`), such as `peers`.
      heal: what to do where anchors differ that must be equal. "stop": all regions stop.
        "majority", "lowest": the anchor of most regions, or of the lowest one, is kept; the others
        stop, and take that anchor when they come back.
      identity: what else all jobs of the run must have in common, by name; a job that differs is
        told in what.
      fault_hooks: faults on purpose (`FaultHooks`); None = none.

    Raises:
      ValueError: lists everything that is wrong with the arguments; or the transport cannot be
        made.
      StoreUnavailable: the store cannot be opened.
    """
    timing = timing or Timing.between(url)

    def make() -> ExchangeContext:
        few = file_handle_problems(count, peers=False)
        problems = [] if transport else few
        problems += [*timing.violations(), *url_problems(url)]
        if count < 1 or not 0 <= region < count:
            problems.append(f"region {region} of {count} must be one of 0..count-1")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
            problems.append(f"run_id {run_id!r} must be made of letters, digits, '.', '_' and '-'")
        if heal not in get_args(Heal):
            problems.append(f"heal={heal!r}: use {', '.join(get_args(Heal))}")
        if keep is not None and keep < 1:
            problems.append(f"keep={keep} must be at least 1")
        try:
            found = read_secret(secret)
        except ValueError as error:
            problems.append(str(error))
        refuse(_TITLE, problems)

        def carries(context: ExchangeContext) -> Transport:
            if transport is None:
                return StoreTransport(context.store, context.counter)
            made = _made(transport, context)
            refuse(_TITLE, few)  # after `peers`, which needs more, and says so
            return made

        return ExchangeContext(
            *(url, run_id, region, count, timing, heal),
            identity=dict(identity or {}),
            fault_hooks=fault_hooks or FaultHooks(),
            secret=found,
            make_transport=carries,
        )

    return RemoteExchange(region, count, heal, make, keep)


def _made(transport: Callable[[ExchangeContext], Transport], context: ExchangeContext) -> Transport:
    """What `transport` makes; its OSError or ValueError becomes a refusal that names it."""
    kind = getattr(transport, "func", transport)  # of `functools.partial`
    label = f"{getattr(kind, '__name__', kind)}: "
    try:
        return transport(context)
    except (OSError, ValueError) as error:
        lines = getattr(error, "lines", [" ".join(str(error).split())])
        raise Refused(_TITLE, [label + line for line in lines]) from error


def peers(
    address: str = "127.0.0.1:0", *, listen: str | None = None, certificates: str | None = None
) -> Callable[[ExchangeContext], Transport]:
    """The transport of payloads that go straight from region to region, for `store`.

    They travel by HTTPS with certificates on both sides: a region lets in only regions of the run.
    Payloads that a region keeps, of all regions, are in its host's memory.

    Args:
      address: "host:port" under which the other regions reach this one; port 0 = the one that is
        listened on.
      listen: "host:port" of this machine to listen on, where that is another one, behind NAT or a
        map of ports; port 0 takes any. None = `address`.
      certificates: folder with `tls.crt`, `tls.key` and the authority's `ca.crt`; None = every
        region makes its own when it starts. The same choice in all regions.

    Raises:
      ValueError: lists everything that is wrong with the addresses. In `store`: one of them, or the
        certificates, cannot be used.
    """
    refuse(_TITLE, address_problems(address, listen))

    def peers_transport(context: ExchangeContext) -> Transport:
        # Its libraries, of HTTP and certificates, would make every import of the package slower.
        from lowcomm_jax.store.peers_transport import PeersTransport

        refuse(_TITLE, file_handle_problems(context.count, peers=True))
        return PeersTransport(context, address, certificates, listen)

    peers_transport.__name__ = "peers"  # as what it refuses is labelled
    return peers_transport


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
