"""`FlightTransport`: payloads go from region to region by Arrow Flight, with mutual TLS.

A process of its own serves this region's payloads (`PayloadServer`); threads here pull those of
others (`Streams`). A region that holds a verified payload serves it to later ones.

Without given certificates a region makes a key and a certificate when it starts. Its heartbeats
carry the certificate; those of every other region carry the pass that it has issued for that key
(`Authority.issue`). Heartbeats are signed records, which only holders of the run's secret can make.
Neither payloads nor private keys are in the store.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from lowcomm_jax.runtime.certificates import (
    FILES,
    Authority,
    Credentials,
    fingerprint,
    host_name,
    read_credentials,
)
from lowcomm_jax.runtime.context import ContextParts
from lowcomm_jax.runtime.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.runtime.payload_server import PayloadServer
from lowcomm_jax.runtime.records import Beat
from lowcomm_jax.runtime.streams import DeniedError, Partial, Streams

SCHEME = "grpc+tls://"
_SLOWEST_BYTES_PER_S = 1e6
"""A link is taken to be no slower than this before it was measured."""
_SLOWER = 16
"""How many times longer than it should a region that is alive may bring nothing."""
_TRIES = 3
"""So often a region's port is asked before a warning says that it is not reached."""
_FORGOTTEN_S = 120.0
"""What has arrived of a payload is kept for so long after the last try to get the rest."""
log = logging.getLogger(__name__)


class FlightTransport:
    """Serves the payloads that this region holds, and pulls those of others.

    Bytes are counted as sent when they leave.
    """

    name, lingers = "peers", True

    def __init__(
        self,
        parts: ContextParts,
        address: str,
        certificates: str | None = None,
        listen: str | None = None,
    ):
        """
        Args:
          address: "host:port" under which the other regions reach this one; port 0 = the one that
            is listened on.
          listen: "host:port" to listen on; port 0 = any. None = `address`.
          certificates: folder with this region's certificate and key, and their authority's
            certificate (`certificates.FILES`); None = this region makes its own.

        Raises:
          ValueError: the address cannot be used, or the certificates.
        """
        self._heartbeat, self._counter = parts.heartbeat, parts.counter
        self._pace, self._timing, self._closing = parts.pace, parts.timing, parts.closing
        self._authority: Authority | None = None
        if certificates is None:
            self._authority = made = Authority(parts.region)
            self._credentials = Credentials(made.certificate, made.certificate, made.key)
        else:
            self._credentials = read_credentials(certificates)
        sent = lambda nbytes: parts.counter.add("sent", nbytes)  # noqa: E731
        self._server = PayloadServer(listen or address, self._credentials, sent)
        host, _, port = address.rpartition(":")
        self._address = address if int(port) else f"{host}:{self._server.port}"
        if certificates is not None:
            self._check_certificates(certificates, None if listen is None else host)
        self._passes: dict[str, str] = {}
        self._streams: dict[int, tuple[Beat, Streams]] = {}
        self._left: list[Streams] = []  # to jobs that others have replaced
        self._partials: dict[str, Partial] = {}
        self._patience: dict[int, int] = {}
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, str]] = {}
        self._background = parts.background

    def _check_certificates(self, folder: str, host: str | None) -> None:
        """Connect to ourselves, as the others will.

        Args:
          host: that the certificate must name; None = the one that is listened on.

        Raises:
          ValueError: that fails.
        """
        streams = Streams(self._server.address, self._credentials, host, self._timing.answer_s)
        try:
            streams.probe(2 * self._timing.answer_s)
        except ConnectionError as error:
            self._server.close()
            raise ValueError(
                f"certificates={folder!r}: this region cannot connect to itself ({error}): give it "
                f"a certificate of {FILES['roots']} that is valid now, for servers and clients, "
                f"and names the host of address={self._address!r}"
            ) from None
        finally:
            streams.close()

    def start(self) -> None:
        """Publish this region's address and certificate, and accept connections."""
        self._heartbeat.update(address=f"{SCHEME}{self._address}", certificate=self._certificate)
        self._background.begin("serve", self._upkeep, serves=True)

    def close(self) -> None:
        """Let go of everything held; when nothing runs in the background any more."""
        self._server.close()
        with self._lock:
            left = [*self._left, *(streams for _, streams in self._streams.values())]
            self._streams.clear()
            self._partials.clear()
        for streams in left:
            streams.close()

    @property
    def _certificate(self) -> str:
        return "" if self._authority is None else self._authority.certificate.decode()

    # -- serving ------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Hold the bytes for other regions; heartbeats carry all that those need."""
        self.keep(name, data)

    def get_ahead(self, sizes: Mapping[str, int]) -> None:
        """Nothing: a region fetches from another one without a look at the store."""

    def keep(self, name: str, data: bytes) -> None:
        """Hold the bytes for other regions; empty ones cannot be held."""
        if data:
            self._server.hold(name, data)

    def drop(self, name: str, shared: bool) -> None:
        """Drop the bytes, and parts of them that have arrived."""
        self._server.drop(name)
        with self._lock:
            self._partials.pop(name, None)

    def _upkeep(self) -> None:
        """Let other regions in, and see to the process that serves, until closed."""
        while not self._closing.is_set():
            if self._authority is not None:
                self._issue_all(self._authority)
            self._ask_new()
            self._server.mend()
            self._closing.wait(self._timing.beat_s / 4)

    def _issue_all(self, authority: Authority) -> None:
        """Issue a pass for every living region; those of the dead are dropped."""
        latest, passes = self._heartbeat.latest(), {}
        for region in self._heartbeat.living(certain=False) - {self._heartbeat.region}:
            theirs = latest[region].certificate
            if theirs:
                name = fingerprint(theirs)
                issued = self._passes.get(name) or authority.issue(theirs, region).decode()
                passes[name] = issued
        if passes != self._passes:
            self._passes = passes
            self._heartbeat.update(passes=passes)

    # -- whom this region reaches -------------------------------------------------------------

    def _ask_new(self) -> None:
        """Ask the port of every region that has come, or come back, on threads of their own."""
        latest = self._heartbeat.latest()
        for region in self._heartbeat.living(certain=False) - {self._heartbeat.region}:
            beat = latest[region]
            place = beat.incarnation, beat.address
            if beat.address and self._asked.get(region) != place:
                self._asked[region] = place
                ask = functools.partial(self._ask, region, beat)
                self._background.begin(f"ask-{region}", ask, serves=True)

    def _ask(self, region: int, beat: Beat) -> None:
        """Warn where a region cannot be reached: then nothing comes from it."""
        reason = ""
        for _ in range(_TRIES):
            try:
                streams = self._to(region, beat)
            except ValueError:
                return  # certificates of another kind: whoever fetches says so
            reason = "it has not let this region in"
            if streams is not None:
                try:
                    return streams.probe(self._timing.answer_s)
                except ConnectionError as error:
                    reason = str(error).splitlines()[0][:300]
            if self._closing.wait(self._timing.beat_s) or not self._is_there(region, beat):
                return
        log.warning(
            "region %d cannot reach region %d at %s, and gets no payload from there (%s): give "
            "region %d an address by which region %d reaches it (address, and listen), and let its "
            "port through firewalls",
            self._heartbeat.region,
            region,
            beat.address.removeprefix(SCHEME),
            reason,
            region,
            self._heartbeat.region,
        )

    def _is_there(self, region: int, beat: Beat) -> bool:
        """Whether a region lives, and is the job that told this."""
        latest = self._heartbeat.latest().get(region)
        return self._alive(region) and latest.incarnation == beat.incarnation

    # -- fetching -----------------------------------------------------------------------------

    def get(self, name: str, nbytes: int, holders: Sequence[int]) -> bytes:
        """Pull the bytes from the first of these regions that is alive and has them.

        Raises:
          Rejected: no region has them, not even the one that announced them.
          Missing: no region that can be reached has them now.
          StoreUnavailable: a region has them, over a link that became slower. Try again: the next
            try has more time, and asks only for the rest.
          ValueError: the other region has certificates of another kind.
        """
        me, denied, slow = self._heartbeat.region, set(), None
        partial = self._take_partial(name, nbytes)
        for holder in holders:
            beat = self._heartbeat.latest().get(holder)
            if holder == me or beat is None or not beat.address or not self._alive(holder):
                continue
            try:
                if self._pull(holder, beat, name, partial):
                    self._counter.add("received", nbytes)
                    return partial.whole()
            except DeniedError:
                denied.add(holder)
            except TimeoutError as error:
                slow = error
        with self._lock:
            self._partials[name] = partial
        if slow is not None:
            raise StoreUnavailable(f"{name}: {slow}")
        if holders[0] in denied:
            raise Rejected(f"region {holders[0]} announced {name}, and does not have it")
        raise Missing(f"no region that is alive and can be reached has {name}")

    def _take_partial(self, name: str, nbytes: int) -> Partial:
        """Take over the part of a payload that has arrived so far; drops those of old payloads."""
        now = time.monotonic()
        with self._lock:
            for old in [n for n, p in self._partials.items() if now - p.touched_s > _FORGOTTEN_S]:
                del self._partials[old]
            found = self._partials.pop(name, None)
        return found if found is not None and found.nbytes == nbytes else Partial(nbytes)

    def _alive(self, region: int) -> bool:
        return region in self._heartbeat.living(certain=False)

    def _pull(self, holder: int, beat: Beat, name: str, partial: Partial) -> bool:
        """Pull the rest from one region; False = it failed, or is far too slow, or died.

        Raises:
          DeniedError: the region does not have it.
          TimeoutError: nothing came for too long; the next try gets twice the time.
        """
        streams = self._to(holder, beat)
        if streams is None:
            return False
        nbytes = partial.chunk * len(partial.ranges)
        expected_s = self._pace.transfer_s(nbytes) or nbytes / _SLOWEST_BYTES_PER_S
        patience = self._patience.get(holder, 1)
        allowed_s, began = patience * (self._timing.answer_s + 4 * expected_s), time.monotonic()

        def check(pause: float) -> bool:
            return not self._closing.wait(pause) and self._alive(holder)

        try:
            complete = streams.get(name, partial, allowed_s, check)
        except TimeoutError as error:
            log.info("pull of %s from region %d: %s", name, holder, error)
            if patience >= _SLOWER:
                return False
            self._patience[holder] = 2 * patience
            raise
        if complete and time.monotonic() - began < allowed_s / 4:
            self._patience[holder] = max(1, patience // 2)
        return complete

    def _to(self, holder: int, beat: Beat) -> Streams | None:
        """Connections to a region; None = it has not let us in yet.

        Raises:
          ValueError: it has certificates of another kind.
        """
        ours = self._certificate
        if bool(beat.certificate) != bool(ours):
            raise ValueError(
                f"region {holder} has certificates of another kind than region "
                f"{self._heartbeat.region}: give all regions a folder of certificates, or none"
            )
        place = beat.address, beat.certificate
        with self._lock:
            known, streams = self._streams.get(holder, (None, None))
        if known is not None and (known.address, known.certificate) == place:
            return streams
        credentials, name = self._credentials, None
        if ours:
            issued = self._pass(holder, beat.certificate)
            if issued is None:
                return None
            credentials = Credentials(
                beat.certificate.encode(), issued.encode(), self._credentials.key
            )
            name = host_name(holder)
        address = beat.address.removeprefix(SCHEME)
        made = Streams(address, credentials, name, self._timing.answer_s)
        with self._lock:
            if holder in self._streams:
                self._left.append(self._streams[holder][1])
            self._streams[holder] = beat, made
        return made

    def _pass(self, holder: int, certificate: str) -> str | None:
        """The pass that a region has issued for this one; None before its heartbeat carries it."""
        until, ours = time.monotonic() + self._timing.answer_s, fingerprint(self._certificate)
        while time.monotonic() < until and self._alive(holder):
            beat = self._heartbeat.latest()[holder]
            if beat.certificate != certificate:
                return None
            if ours in beat.passes:
                return beat.passes[ours]
            if self._closing.wait(self._timing.beat_s / 8):
                break
        return None
