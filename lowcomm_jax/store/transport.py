"""`Transport`: how payload bytes get from one region to another; `StoreTransport`: by the store."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Protocol

from lowcomm_jax.store.errors import Missing
from lowcomm_jax.store.kv import MetricsCounter, Store


class Transport(Protocol):
    """Moves bytes that are named by their content; it verifies nothing.

    Counts the bytes "sent" and "received". Methods raise `StoreUnavailable` when the store is away.
    A class that inherits this one needs `name`, `lingers`, `put`, `get` and `drop`.

    Attributes:
      name: of the kind of transport; jobs of a run that use different ones are refused.
      lingers: whether others can get payloads only while this region runs.
    """

    name: str
    lingers: bool

    def start(self) -> None:
        """Begin to serve; called once, when the region begins to meet the others.

        It has no incarnation yet.
        """

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Publish bytes of our own."""

    @abc.abstractmethod
    def get(self, name: str, nbytes: int, holders: Sequence[int]) -> bytes:
        """Fetch bytes from one of these regions, tried in turn; the first has published them.

        Raises:
          Missing: none of them has the bytes, or can be reached.
          Rejected: not even the first one has the bytes that it has published.
        """

    def get_ahead(self, sizes: Mapping[str, int]) -> None:
        """Fetch bytes that `get` will be asked for, all at once, where that saves time.

        Args:
          sizes: by name. Those of the call before are let go of.
        """

    def keep(self, name: str, data: bytes) -> None:
        """Bytes of another region that were verified: they may be served to others."""

    @abc.abstractmethod
    def drop(self, name: str, shared: bool) -> None:
        """Drop bytes that no region needs any more; `shared`: also those stored for all."""

    def close(self) -> None:
        """Stop serving."""


class StoreTransport(Transport):
    """Payloads are keys of the store, named by their content: written once, read by everyone."""

    name, lingers = "store", False

    def __init__(self, store: Store, counter: MetricsCounter):
        self._store, self._counter = store, counter
        self._ahead: dict[str, bytes | None] = {}

    def put(self, name: str, data: bytes) -> None:
        """Write the bytes; written anew where they are, in case those are damaged."""
        self._store.write(f"blob/{name}", data)
        self._counter.add("sent", len(data))

    def get(self, name: str, nbytes: int, holders: Sequence[int]) -> bytes:
        """Read the bytes, of any writer."""
        data = self._ahead.pop(key := f"blob/{name}", None)  # once: it may be damaged
        if data is None:
            data = self._store.read(key, nbytes)
        if data is None:
            raise Missing(f"no blob {name} in the store")
        self._counter.add("received", len(data))
        return data

    def get_ahead(self, sizes: Mapping[str, int]) -> None:
        """Read them beside one another."""
        keys = [f"blob/{name}" for name in sizes]
        self._ahead = self._store.read_all(keys, sum(sizes.values()))

    def drop(self, name: str, shared: bool) -> None:
        """Remove the key, where that is ours to do."""
        if shared:
            self._store.delete(f"blob/{name}")
