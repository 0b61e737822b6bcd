"""`PeerTransport`: payloads go from region to region over `jax.experimental.transfer`.

Only for networks in which no other host can connect: that server ends its process on a few
malformed bytes, and sends plain text. Use `FlightTransport` in all others.

A region offers its payload at once to every living region, under numbers in the announcement. A
region that holds a verified payload serves it to later ones, which ask through the store and get an
answer there. Addresses are in the heartbeats.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax.compat import ByteServer
from lowcomm_jax.runtime import records
from lowcomm_jax.runtime.errors import Missing, Rejected, StoreUnavailable
from lowcomm_jax.runtime.heartbeat import Heartbeat
from lowcomm_jax.runtime.kv import MetricsCounter, Store
from lowcomm_jax.runtime.secret import Seal
from lowcomm_jax.runtime.timing import Pace, Timing

_SLOWEST_BYTES_PER_S = 1e6
"""A link is taken to be no slower than this before it was measured."""
_SLOWER = 16
"""How many times longer than it should a pull may take from a region that is alive."""
_LOOK_S = (0.0005, 0.02)
log = logging.getLogger(__name__)


class PeerTransport:
    """Serves the payloads that this region holds, and pulls those of others.

    Bytes are counted as sent when they are offered to a region that is alive.
    """

    lingers = True

    def __init__(
        self,
        store: Store,
        seal: Seal,
        heartbeat: Heartbeat,
        counter: MetricsCounter,
        pace: Pace,
        timing: Timing,
        closing: threading.Event,
        address: str,
    ):
        """
        Args:
          address: "host:port" under which the other regions reach this one; port 0 = any.
        """
        self._store, self._seal, self._heartbeat, self._counter = store, seal, heartbeat, counter
        self._pace, self._timing, self._closing = pace, timing, closing
        self._server: ByteServer | None = ByteServer(address)
        self._connections: dict[str, object] = {}
        self._held: dict[str, jax.Array] = {}
        self._offers: dict[str, dict[int, int]] = {}
        self._used: set[int] = set()
        self._patience: dict[int, int] = {}
        self._lock = threading.Lock()
        act = (self._answer_all,)
        self._thread = threading.Thread(
            target=heartbeat.run_guarded, args=act, name="lowcomm-serve", daemon=True
        )

    def start(self) -> None:
        """Publish this region's address, and answer requests."""
        self._heartbeat.update(address=self._server.address)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread, which ends with `closing`, and let go of everything held."""
        if self._thread.ident is not None:
            self._thread.join()
        for name in list(self._held):
            self.drop(name, shared=True)
        # The port is free once nobody refers to these.
        self._connections.clear()
        self._server = None

    # -- serving ------------------------------------------------------------------------------

    def put(self, name: str, data: bytes, readers: Sequence[int] = ()) -> dict:
        """Hold the bytes, and offer them to these regions if they are alive.

        Returns:
          our address, and the number for each region: {"address": ..., "1": ...}.
        """
        array = self.keep(name, data)
        hint: dict = {"address": self._server.address}
        for region in set(readers) & self._heartbeat.living(certain=False) if data else ():
            number = secrets.randbits(63)
            self._offer(name, array, number, region)
            hint[str(region)] = number
        return hint

    def get_ahead(self, sizes: Mapping[str, int]) -> None:
        """Nothing: a region fetches from another one without a look at the store."""

    def keep(self, name: str, data: bytes) -> jax.Array | None:
        """Hold the bytes for other regions; empty ones cannot be held."""
        if not data:
            return None
        array = self._server.array(data)
        with self._lock:
            self._held[name] = array
        return array

    def drop(self, name: str, shared: bool) -> None:
        """Drop the bytes, and withdraw the offers to regions that are gone."""
        with self._lock:
            array = self._held.pop(name, None)
            offers = self._offers.pop(name, {})
        living = self._heartbeat.living(certain=False)
        for number, region in offers.items() if array is not None else ():
            if region not in living:
                # There is no way to take an offer back, but a byte can take its place.
                self._server.offer(number, self._server.array(b"!"))
                self._counter.add("sent", -array.size)

    def _offer(self, name: str, array: jax.Array, number: int, region: int) -> None:
        with self._lock:
            self._offers.setdefault(name, {})[number] = region
        self._server.offer(number, array)
        self._counter.add("sent", array.size)

    def _answer_all(self) -> None:
        """Answer questions until closed."""
        pauses = self._store.pauses()
        prefix = f"ask/{self._heartbeat.region}/"
        while not self._closing.is_set():
            try:
                asked = self._store.list(prefix)
                for key in asked:
                    self._answer(key)
                if asked:
                    pauses = self._store.pauses()
            except StoreUnavailable:
                pass  # The heartbeat reports it.
            self._closing.wait(next(pauses))

    def _answer(self, key: str) -> None:
        """Offer the requested bytes, if this region has them, and answer with their number."""
        data = self._store.read(key)
        self._store.delete(key)
        try:
            ask = self._seal.open(key, data or b"", _asked)
        except Rejected:
            self._counter.add("rejected_record")
            return
        with self._lock:
            array = self._held.get(ask["name"])
        have = array is not None and array.size == ask["nbytes"]
        if have:
            self._offer(ask["name"], array, ask["number"], ask["region"])
        told = f"answer/{ask['region']}/{ask['number']}"
        self._store.write(told, self._seal.close(told, {"have": have}))

    # -- fetching -----------------------------------------------------------------------------

    def get(self, name: str, nbytes: int, holders: Sequence[int], hint: dict) -> bytes:
        """Pull the bytes from the first of these regions that is alive and has them.

        Raises:
          Rejected: no region has them, not even the one that announced them.
          Missing: no region that can be reached has them now.
          StoreUnavailable: a region has them, over a link that became slower. Try again: the next
            try has more time.
          ValueError: the other region's payloads travel by another transport.
        """
        me, denied, slow = self._heartbeat.region, set(), None
        for holder in holders:
            beat = self._heartbeat.latest().get(holder)
            if holder == me or beat is None or not beat.address or not self._alive(holder):
                continue
            if "://" in beat.address:
                raise ValueError(
                    f"region {holder} serves payloads in another way than region {me}: give all "
                    "regions the same transport"
                )
            number = hint.get(str(me)) if hint.get("address") == beat.address else None
            if number is None or number in self._used:
                number, answered = self._ask(name, nbytes, holder)
                denied |= {holder} if answered and number is None else set()
            if number is None:
                continue
            try:
                data = self._pull(beat.address, number, nbytes, holder)
            except TimeoutError as error:
                slow = error
                continue
            if data is not None:
                self._counter.add("received", len(data))
                return data
        if slow is not None:
            raise StoreUnavailable(f"{name}: {slow}")
        if holders[0] in denied:
            raise Rejected(f"region {holders[0]} announced {name}, and does not have it")
        raise Missing(f"no region that is alive and can be reached has {name}")

    def _alive(self, region: int) -> bool:
        return region in self._heartbeat.living(certain=False)

    def _ask(self, name: str, nbytes: int, holder: int) -> tuple[int | None, bool]:
        """Ask a region for bytes; (the number it offers them under or None, it answered)."""
        me, number = self._heartbeat.region, secrets.randbits(63)
        key, told = f"ask/{holder}/{number}", f"answer/{me}/{number}"
        ask = {"name": name, "nbytes": nbytes, "number": number, "region": me}
        self._store.write(key, self._seal.close(key, ask))
        until = time.monotonic() + self._timing.answer_s
        for pause in self._store.pauses():
            data = self._store.read(told)
            if data is not None:
                self._store.delete(told)
                have = self._seal.open(told, data, lambda x: records.fields(x, have=records.flag))
                return (number if have["have"] else None), True
            if time.monotonic() > until or not self._alive(holder) or self._closing.wait(pause):
                self._store.delete(key)
                return None, False
        raise AssertionError("pauses never end")

    def _pull(self, address: str, number: int, nbytes: int, holder: int) -> bytes | None:
        """Pull under a watchdog; None = it failed, or took far too long, or the holder died.

        A pull has no time limit of its own. It is looked at, never waited for: a thread that hangs
        in it would bring the process down when that ends.

        Raises:
          TimeoutError: it took too long; the next one from there gets twice the time.
        """
        expected_s = self._pace.transfer_s(nbytes) or nbytes / _SLOWEST_BYTES_PER_S
        patience = self._patience.get(holder, 1)
        began, allowed_s = time.monotonic(), patience * (self._timing.answer_s + 4 * expected_s)
        try:
            server = self._server
            if server is None:
                raise RuntimeError("this end is closed")
            with self._lock:
                self._used.add(number)
                connection = self._connections.get(address) or server.connect(address)
                self._connections[address] = connection
            array = server.pull(connection, number, nbytes)
            pause = _LOOK_S[0]
            while not array.is_ready():
                if time.monotonic() - began > allowed_s:
                    raise TimeoutError(f"region {holder} takes more than {allowed_s:.1f} s")
                if not self._alive(holder) or self._closing.wait(pause):
                    raise RuntimeError("the other end, or this one, is gone")
                pause = min(1.5 * pause, _LOOK_S[1])
            data = np.asarray(array).tobytes()
        except (RuntimeError, TimeoutError) as error:
            log.info("pull of %d bytes from region %d: %s", nbytes, holder, error)
            with self._lock:
                # A connection that has failed once never works again.
                self._connections.pop(address, None)
            if not isinstance(error, TimeoutError) or patience >= _SLOWER:
                return None
            self._patience[holder] = 2 * patience
            raise
        if time.monotonic() - began < allowed_s / 4:
            self._patience[holder] = max(1, patience // 2)
        return data


def _asked(body: Any) -> dict[str, Any]:
    number = records.whole
    return records.fields(body, name=records.text, nbytes=number, number=number, region=number)
