"""`PeersTransport`: payloads go from region to region by HTTPS, with certificates on both sides.

A process of its own serves this region's payloads (`PayloadServer`); threads here pull those of
others (`Partial`). A region that holds a verified payload serves it to later ones.

Without given certificates a region makes a key and a certificate when it starts, and its heartbeats
carry the certificate. A region lets in those whose certificate a heartbeat carries, and takes
payloads from whoever shows that of its heartbeat. Heartbeats are signed records, which only holders
of the run's secret can make. Neither payloads nor private keys are in the store.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
import time
from collections.abc import Sequence

from lowcomm_jax.store.certificates import make_credentials, read_credentials
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.store.file_handles import PAYLOADS_KEPT
from lowcomm_jax.store.pulling import DeniedError, Partial, Port
from lowcomm_jax.store.records import Beat
from lowcomm_jax.store.serving import Credentials, PayloadServer, tls_context
from lowcomm_jax.store.transport import Transport

SCHEME = "https://"
_MOST_PATIENCE = 16
"""How many times longer than `Timing.answer_s` a region that is alive may bring nothing."""
_ASKED_FOR = 3
"""For so many times `Timing.answer_s` a region's port is asked before a warning."""
_FORGOTTEN_S = 120.0
"""What has arrived of a payload is kept for so long after the last try to get the rest."""
log = logging.getLogger(__name__)


class PeersTransport(Transport):
    """Serves the payloads that this region holds, and pulls those of others.

    Bytes are counted as sent soon after they have left.

    Args:
      address: "host:port" under which the other regions reach this one; port 0 = the one that is
        listened on.
      listen: "host:port" to listen on; port 0 = any. None = `address`.
      certificates: folder with this region's certificate and key, and their authority's
        certificate; None = this region makes its own.

    Raises:
      ValueError: the address cannot be used, or the certificates.
    """

    name, lingers = "peers", True

    def __init__(
        self,
        context: ExchangeContext,
        address: str,
        certificates: str | None = None,
        listen: str | None = None,
    ):
        self._heartbeat, self._counter = context.heartbeat, context.counter
        self._timing, self._closing = context.timing, context.closing
        self._background = context.background
        try:
            mine = context.region
            own = read_credentials(certificates) if certificates else make_credentials(mine)
            self._certificate = "" if certificates else own.roots
            self._tls = functools.lru_cache(functools.partial(_context, own))
            tls = self._tls(self._certificate)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"certificates={certificates!r} cannot be used ({error}): put the authority's "
                "certificate into ca.crt, this region's into tls.crt, and its key, without a "
                "passphrase, into tls.key"
            ) from None
        sent = functools.partial(context.counter.add, "sent")
        self._server = PayloadServer(listen or address, own, sent, PAYLOADS_KEPT)
        host, _, number = address.rpartition(":")
        self._address = address if int(number) else f"{host}:{self._server.port}"
        port = Port(self._address, tls, at=self._server.address)
        if certificates and (problem := self._problem(port)):
            self._server.close()
            raise ValueError(
                f"certificates={certificates!r}: this region cannot connect to itself ({problem}): "
                f"give it a certificate of ca.crt that is valid now, for servers and clients, and "
                f"names the host of address={self._address!r}"
            )
        self._partials: dict[str, Partial] = {}
        self._patience: dict[int, int] = {}
        self._asked: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Publish this region's address and certificate, and accept connections."""
        self._heartbeat.update(address=f"{SCHEME}{self._address}", certificate=self._certificate)
        self._background.begin("serve", self._upkeep, serves=True)

    def close(self) -> None:
        """Let go of everything held; when nothing runs in the background any more."""
        self._server.close()

    # -- serving ------------------------------------------------------------------------------

    def keep(self, name: str, data: bytes) -> None:
        """Hold the bytes for other regions; empty ones cannot be held."""
        if data:
            self._server.hold(name, data)

    put = keep

    def drop(self, name: str, shared: bool) -> None:
        """Drop the bytes, and parts of them that have arrived."""
        self._server.drop(name)
        with self._lock:
            self._partials.pop(name, None)

    def _others(self) -> dict[int, Beat]:
        """Heartbeats of the other regions that may live and have a port."""
        living = self._heartbeat.living(certain=False) - {self._heartbeat.region}
        beats = {r: beat for r, beat in self._heartbeat.latest().items() if r in living}
        return {r: beat for r, beat in beats.items() if beat.address}

    def _upkeep(self) -> None:
        """See whom this region reaches, and to the process that serves."""
        while not self._closing.is_set():
            for region, beat in self._others().items():
                place = beat.incarnation, beat.address
                if self._asked.get(region) != place:
                    self._asked[region] = place
                    meet = functools.partial(self._meet, region, beat)
                    self._background.begin(f"meet-{region}", meet, serves=True)
            self._server.tend()
            self._closing.wait(self._timing.beat_s / 4)

    def _meet(self, region: int, beat: Beat) -> None:
        """Let a region in; warn where this one cannot reach it: then nothing comes from it."""
        try:
            port = self._port(region, beat)
        except (ValueError, OSError):
            return  # whoever fetches from it says so
        if self._certificate:
            self._server.trust(beat.certificate)
        until = time.monotonic() + _ASKED_FOR * self._timing.answer_s
        while problem := self._problem(port):
            if time.monotonic() > until:
                log.warning(
                    "region %d cannot reach region %d at %s, and gets no payload from there (%s): "
                    "give region %d an address by which region %d reaches it (address, and "
                    "listen), and let its port through firewalls",
                    *(self._heartbeat.region, region, port.address, problem),
                    *(region, self._heartbeat.region),
                )
                return
            if self._closing.wait(self._timing.beat_s):
                return
            now = self._others().get(region)
            if now is None or now.incarnation != beat.incarnation:
                return

    def _problem(self, port: Port) -> str:
        """Why no payload would come from there, or ""; asks for one that does not exist."""
        probe = Partial(1)
        try:
            probe.pull(port, "", self._timing.answer_s, lambda: not self._closing.is_set())
        except DeniedError:
            return ""
        except TimeoutError as error:
            return str(error)
        return probe.problem or "no answer"

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
        denied, slow, now = set(), None, time.monotonic()
        with self._lock:
            for old in [n for n, p in self._partials.items() if now - p.touched_s > _FORGOTTEN_S]:
                del self._partials[old]
            partial = self._partials.pop(name, None)
        if partial is None or partial.data.size != nbytes:
            partial = Partial(nbytes)
        for holder in holders:
            try:
                if self._pull(holder, name, partial):
                    self._counter.add("received", nbytes)
                    return partial.data.tobytes()
            except DeniedError:
                denied.add(holder)
            except TimeoutError as error:
                slow = error
            except OSError as error:
                log.info("the certificate of region %d is none: %s", holder, error)
        with self._lock:
            self._partials[name] = partial
        if slow is not None:
            raise StoreUnavailable(f"{name}: {slow}")
        if holders[0] in denied:
            raise Rejected(f"region {holders[0]} announced {name}, and does not have it")
        raise Missing(f"no region that is alive and can be reached has {name}")

    def _pull(self, holder: int, name: str, partial: Partial) -> bool:
        """Pull the rest from one region; False = it failed, or is far too slow, or died.

        Raises:
          DeniedError: the region does not have it.
          TimeoutError: nothing came for too long; the next try gets twice the time.
          OSError, ValueError: see `_port`.
        """
        beat = self._others().get(holder)
        if beat is None:
            return False
        patience = self._patience.get(holder, 1)
        allowed_s, began = patience * self._timing.answer_s, time.monotonic()

        def check() -> bool:
            return not self._closing.is_set() and holder in self._others()

        try:
            complete = partial.pull(self._port(holder, beat), name, allowed_s, check)
        except TimeoutError as error:
            log.info("pull of %s from region %d: %s", name, holder, error)
            if patience >= _MOST_PATIENCE:
                return False
            self._patience[holder] = 2 * patience
            raise
        if complete and time.monotonic() - began < allowed_s / 4:
            self._patience[holder] = max(1, patience // 2)
        return complete

    def _port(self, holder: int, beat: Beat) -> Port:
        """Where a region serves.

        Raises:
          OSError: its certificate is none.
          ValueError: it has certificates of another kind.
        """
        if bool(beat.certificate) != bool(self._certificate):
            raise ValueError(
                f"region {holder} has certificates of another kind than region "
                f"{self._heartbeat.region}: give all regions a folder of certificates, or none"
            )
        return Port(beat.address.removeprefix(SCHEME), self._tls(beat.certificate))


def _context(own: Credentials, certificate: str) -> ssl.SSLContext:
    """Of connections to whoever shows this certificate; "" = one of the roots, for its host."""
    trusted = own._replace(roots=certificate or own.roots)
    return tls_context(ssl.PROTOCOL_TLS_CLIENT, trusted, check_host=not certificate)
