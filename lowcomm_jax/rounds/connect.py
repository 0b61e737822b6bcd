"""Makes one region's exchange: `store` and `peers` return a `RemoteExchange`.

They raise `ValueError` with everything that is wrong with the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from lowcomm_jax.refused import refuse
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.context import ExchangeContext, FaultHooks, NoFaults
from lowcomm_jax.store.file_handles import file_handle_problems
from lowcomm_jax.store.kv import url_problems
from lowcomm_jax.store.secret import read_secret
from lowcomm_jax.store.terms import Heal
from lowcomm_jax.store.timing import Timing
from lowcomm_jax.store.transport import StoreTransport, Transport

ANY_HOST = ("0.0.0.0", "[::]", "*")
"""Hosts to listen on that mean all addresses of a machine."""


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
    """Exchange through a key-value store: jobs need no route to one another.

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
      transport: makes a transport of one's own from what the exchanges of this region share; the
        same one in every region. Records and heartbeats go through the store all the same. Payloads
        are named by their SHA-256, and verified by who gets them. None = they go through the store.
      timing: how long regions wait for one another; None = as `Timing.between` says of the url.
      keep: exchanges whose payloads stay for regions that are late; more than may be in flight at
        once. With several fragments a round has an exchange for each. None = 16; 4 with a transport
        of one's own that lingers (`Transport`).
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
    options = {"timing": timing, "keep": keep, "heal": heal, "identity": identity}
    given = url, region, count, run_id, secret, transport, fault_hooks
    return _connect(*given, [], holds_files=False, **options)


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
    keep: int | None = None,
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
      keep: as in `store`, None = 4; payloads of all regions are kept in this host's memory.

    Raises:
      ValueError: lists everything that is wrong with the arguments, or the address cannot be used.
    """

    def transport(context: ExchangeContext) -> Transport:
        # Its libraries, of HTTP and certificates, would make every import of the package slower.
        from lowcomm_jax.store.peers_transport import PeersTransport

        return PeersTransport(context, address, certificates, listen)

    wrong = address_problems(address, listen)
    options = {"timing": timing, "keep": keep, "heal": heal, "identity": identity}
    given = url, region, count, run_id, secret, transport, fault_hooks
    return _connect(*given, wrong, holds_files=True, **options)


def _connect(
    url: str,
    region: int,
    count: int,
    run_id: str,
    secret: bytes | str | None,
    transport: Callable[[ExchangeContext], Transport] | None,
    fault_hooks: FaultHooks | None,
    wrong: Sequence[str],
    *,
    holds_files: bool,
    timing: Timing | None,
    keep: int | None,
    heal: Heal,
    identity: Mapping[str, str] | None,
) -> RemoteExchange:
    """The exchange; arguments as in `store`.

    Args:
      wrong: the problems found so far.
      holds_files: whether each payload that is held takes a file.
    """
    timing = timing or Timing.between(url)

    def make() -> ExchangeContext:
        problems = [*wrong, *file_handle_problems(count, peers=holds_files)]
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
        refuse("exchange between jobs", problems)
        return ExchangeContext(
            *(url, run_id, found, region, count),
            timing=timing,
            heal=heal,
            identity=identity or {},
            fault_hooks=fault_hooks or NoFaults(),
            transport=transport or (lambda made: StoreTransport(made.store, made.counter)),
        )

    return RemoteExchange(region, count, heal, make, keep)


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
