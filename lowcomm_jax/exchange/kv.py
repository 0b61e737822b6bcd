"""The key-value store that regions share: create-only keys, reads, and waiting between looks.

Built on TensorStore's kvstore. Coordination needs three guarantees: a key is created by one writer
only, a value is read whole or not at all, and what was created is seen by the next read. The file
driver (one machine, or a shared mount with locks) and Google Cloud Storage give them; of S3-like
stores only those with conditional writes do.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import tensorstore as ts

from lowcomm_jax.exchange.errors import StoreUnavailable
from lowcomm_jax.exchange.tally import Tally

SCHEMES = ("file", "gs", "s3")
POLL_S = {"file": (0.002, 0.05)}
"""Shortest and longest pause between looks at the store, in seconds, by scheme of its url."""
POLL_FAR_S = (0.05, 1.0)


def segment(text: str) -> str:
    """Any text as one part of a key, reversible with `urllib.parse.unquote`."""
    return urllib.parse.quote(text, safe="")


class Store:
    """Keys of one run in a key-value store.

    Attributes:
      tally: bytes "store_read" and "store_written", whatever they are.
      poll_s: shortest and longest pause between looks.

    All methods raise `StoreUnavailable` when the store does not answer as it should.
    """

    def __init__(self, url: str, run_id: str, tally: Tally, timeout_s: float = 60.0):
        self.root = f"{url.rstrip('/')}/{run_id}/"
        scheme = url.partition("://")[0]
        self.poll_s = POLL_S.get(scheme, POLL_FAR_S)
        self.tally = tally
        self._timeout_s = timeout_s
        self._kv = self._answer(ts.KvStore.open(self.root))
        self._anchored = scheme == "file"
        self._anchor: str | None = None

    def anchor(self, key: str) -> None:
        """Name a key that exists as long as the run does.

        An unmounted directory looks like an empty one: no key is there, and every key can be
        created. When the anchor is not there either, the store counts as unavailable.
        """
        self._anchor = key

    def read(self, key: str) -> bytes | None:
        """The value of a key; None = there is none."""
        found = self._get(key)
        if found.state != "value":
            self._check_anchor()
            return None
        return found.value

    def create(self, key: str, value: bytes) -> bool:
        """Write a key that does not exist yet; False = it exists, and was left as it is."""
        found = self._get(key)
        if found.state == "value":
            return False
        self._check_anchor()
        # A lost race does not raise: it returns an empty generation.
        done = self._answer(self._kv.write(key, value, if_equal=found.stamp.generation))
        if not done.generation:
            return False
        self.tally.add("store_written", len(value))
        return True

    def write(self, key: str, value: bytes) -> None:
        """Write a key, whether it exists or not."""
        self._check_anchor()
        self._answer(self._kv.write(key, value))
        self.tally.add("store_written", len(value))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._answer(self._kv.write(key, None))

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self._answer(self._kv.list(ts.KvStore.KeyRange(prefix, end)))
        if not found:
            self._check_anchor()
        return sorted(key.decode() for key in found)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait between one look and the next: short at first, then longer."""
        pause, longest = self.poll_s
        while True:
            yield pause
            pause = min(1.5 * pause, longest)

    def _get(self, key: str):
        found = self._answer(self._kv.read(key))
        self.tally.add("store_read", len(found.value))
        return found

    def _check_anchor(self) -> None:
        if self._anchored and self._anchor is not None and self._get(self._anchor).state != "value":
            raise StoreUnavailable(f"{self.root}: the run's record {self._anchor!r} is not there")

    def _answer(self, future: ts.Future):
        try:
            return future.result(timeout=self._timeout_s)
        except Exception as error:
            # Drivers report every kind of trouble as ValueError, told apart by its text only.
            reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise StoreUnavailable(f"{self.root}: {reason}") from error
