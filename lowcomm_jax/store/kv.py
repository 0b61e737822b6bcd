"""`Store`: the key-value store that regions share; `MetricsCounter`: counters of its users.

`Store` has create-only keys, reads, lists, and pauses between reads; it raises `StoreUnavailable`.
It is built on TensorStore's kvstore. Coordination needs three guarantees: one writer only creates a
key, a value is read whole or not at all, and a created key is in the next read.

- Folders give them: of one machine, or a shared mount with hard links and no caches.
- Google Cloud Storage gives them.
- S3-like stores give them if they have conditional writes (If-None-Match; Amazon's has them).
  `require_create_only` finds those out that accept the condition and ignore it.
  `AWS_ENDPOINT_URL`, as for Amazon's own tools, names a store elsewhere.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import re
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import tensorstore as ts

from lowcomm_jax.store.errors import StoreUnavailable

SCHEMES = ("file", "gs", "s3")

POLL_S = {"file": (0.002, 0.05)}
"""Shortest and longest pause between looks at the store, in seconds, by scheme of its url."""

POLL_FAR_S = (0.05, 1.0)

GROWTH = 1.5
"""Factor by which pauses grow while nothing is new."""

SLOWEST_BYTES_PER_S = 1e5
"""A slower way to the store counts as none."""

_LOOK_S = 0.5
"""Seconds after which whoever waits for the store looks whether it was closed."""

AT_ONCE = 64
"""Most requests that are under way together."""

ENDPOINT = "AWS_ENDPOINT_URL"

_ABSENT = b"\2"
"""TensorStore's generation of a key that is not there, for every kind of store."""

log = logging.getLogger(__name__)


class Store:
    """Keys of one run in a key-value store.

    Attributes:
      counter: counts bytes "store_read" and "store_written".
      poll_s: shortest and longest pause between looks.

    All methods raise `StoreUnavailable` when the store does not answer as it should.
    """

    def __init__(self, url: str, run_id: str, counter: MetricsCounter, timeout_s: float = 60.0):
        self.root = f"{url.rstrip('/')}/{run_id}/"
        scheme = url.partition("://")[0]
        self.poll_s = POLL_S.get(scheme, POLL_FAR_S)
        self.counter = counter
        self._timeout_s = timeout_s
        self._kv = self._answer(ts.KvStore.open(_spec(self.root)))
        local = urllib.parse.unquote(self.root.removeprefix("file://"))
        self._folder = pathlib.Path(local) if scheme == "file" else None
        self._anchor: str | None = None
        self._closed = threading.Event()

    def anchor(self, key: str) -> None:
        """Name a key that exists as long as the run does.

        An unmounted directory looks like an empty one: no key is there, and every key can be
        created. When the anchor is not there either, the store counts as unavailable.
        """
        self._anchor = key

    def read(self, key: str, nbytes: int = 0) -> bytes | None:
        """The value of a key; None = there is none. `nbytes`: its size, for the time allowed."""
        return self.read_all([key], nbytes)[key]

    def read_all(self, keys: Sequence[str], nbytes: int = 0) -> dict[str, bytes | None]:
        """The values of keys, read all at once; None = there is none. `nbytes`: of all together."""
        pending = [(key, self._kv.read(key)) for key in keys]
        found: dict[str, bytes | None] = dict.fromkeys(keys)
        for key, future in pending:
            value = self._read_value(future, nbytes)
            if value.state == "value":
                found[key] = value.value
        if None in found.values():
            self._check_anchor()
        return found

    def create(self, key: str, value: bytes) -> bool:
        """Write a key that does not exist yet; False = it exists, and was left as it is."""
        self._check_anchor()
        if self._folder is not None:
            created = self._link(self._folder / key, value)
        else:
            # A lost race does not raise: it returns an empty generation.
            done = self._answer(self._kv.write(key, value, if_equal=_ABSENT))
            created = bool(done.generation)
        self.counter.add("store_written", len(value) if created else 0)
        return created

    def require_create_only(self) -> None:
        """Try whether the store lets a fresh key be created once only, by two conditional writes.

        TensorStore asks an S3-like store whether a key is there before it writes, which hides what
        the store does in a race. So these two ask nothing. Links in a folder need no test.

        Raises:
          ValueError: it says yes twice; names the store.
        """
        if self._folder is not None:
            return
        spec = _spec(self.root)
        if self.root.startswith("s3://"):
            spec = ts.KvStore.Spec(spec).to_json() | {"use_conditional_write": True}
        kv, key = self._answer(ts.KvStore.open(spec)), f"tried/{secrets.token_hex(16)}"
        absent, value = self._read_value(kv.read(key)).stamp.generation, b"tried"
        created = [
            bool(self._answer(kv.write(key, value, if_equal=absent)).generation) for _ in range(2)
        ]
        self.counter.add("store_written", len(value) * sum(created))
        self._answer(kv.write(key, None))
        if all(created):
            through = f" through {endpoint}" if (endpoint := os.environ.get(ENDPOINT)) else ""
            raise ValueError(
                f"{self.root}{through}: this store created one key twice, as if it had not read "
                "the condition of the write (If-None-Match): two jobs could take one place. Give a "
                "store with conditional writes, and no proxy that drops the header"
            )

    def _link(self, path: pathlib.Path, value: bytes) -> bool:
        """Create a file whole or not at all, without a lock.

        TensorStore holds a lock on the key meanwhile; a job that is stopped just then would stop
        all others with it.
        """
        # Keys that end so are never listed.
        written = path.with_name(f"{path.name}.{secrets.token_hex(8)}.__lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(written, "xb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.link(written, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"{self.root}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                written.unlink()
        return True

    def write(self, key: str, value: bytes) -> None:
        """Write a key, whether it exists or not."""
        self._check_anchor()
        self._answer(self._kv.write(key, value), len(value))
        self.counter.add("store_written", len(value))

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

    def beside(self, key: str) -> dict[str, bytes]:
        """The values of a key in the other runs of the same folder, by their ids.

        An object store lists all keys of all runs for that.
        """
        above, _, own = self.root.rstrip("/").rpartition("/")
        kv = self._answer(ts.KvStore.open(_spec(f"{above}/")))
        if self._folder is not None:
            there = [path.parent.name for path in self._folder.parent.glob(f"*/{key}")]
        else:
            names = (name.decode() for name in self._answer(kv.list()))
            there = [name.removesuffix(f"/{key}") for name in names if name.endswith(f"/{key}")]
        pending = {run: kv.read(f"{run}/{key}") for run in there if run != own and "/" not in run}
        return {run: self._read_value(future).value for run, future in pending.items()}

    def pauses(self) -> Iterator[float]:
        """Seconds to wait between one look and the next: short at first, then longer."""
        return pauses(*self.poll_s)

    def close(self) -> None:
        """Wait for no operation any longer: `StoreUnavailable` is raised where one is not done."""
        self._closed.set()

    def _check_anchor(self) -> None:
        if self._folder is None or self._anchor is None:
            return
        if self._read_value(self._kv.read(self._anchor)).state != "value":
            raise StoreUnavailable(f"{self.root}: the run's record {self._anchor!r} is not there")

    def _read_value(self, future: ts.Future, nbytes: int = 0) -> ts.KvStore.ReadResult:
        """What a read of `nbytes` bytes has found; all that is read is counted here."""
        found = self._answer(future, nbytes)
        self.counter.add("store_read", len(found.value))
        return found

    def _answer(self, future: ts.Future, nbytes: int = 0):
        """The result of an operation that moves `nbytes` bytes."""
        until = time.monotonic() + self._timeout_s + nbytes / SLOWEST_BYTES_PER_S
        while True:
            left = until - time.monotonic()
            try:
                # Returns what is wrong with the store: a handler of signals may raise here, too.
                error = future.exception(timeout=max(0.0, min(left, _LOOK_S)))
            except TimeoutError as late:
                if left > _LOOK_S and not self._closed.is_set():
                    continue
                error = late
            if error is None:
                return future.result()
            future.cancel()  # else it goes on beside the next try
            # Drivers report every kind of trouble as ValueError, told apart by its text only.
            reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise StoreUnavailable(f"{self.root}: {reason}") from error


def at_once(act: Callable[[str], object], keys: Iterable[str]) -> None:
    """Call a function with each of these keys, `AT_ONCE` side by side; raises what it raises."""
    with ThreadPoolExecutor(AT_ONCE, "lowcomm-at-once") as pool:
        list(pool.map(act, keys))


def pauses(shortest: float, longest: float) -> Iterator[float]:
    """Seconds between looks while nothing is new: each `GROWTH` times the one before, at most
    `longest`.
    """
    pause = shortest
    while True:
        yield pause
        pause = min(GROWTH * pause, longest)


class MetricsCounter:
    """Named whole numbers, 0 until something is added; several threads may add."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one of the numbers."""
        with self._lock:
            self._counts[name] += amount

    def read(self) -> dict[str, int]:
        """All numbers."""
        with self._lock:
            return dict(self._counts)


def url_problems(url: str) -> list[str]:
    """Why no store can be opened by this url; a folder's is `pathlib.Path(folder).as_uri()`."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        return [f"url {url!r} must begin with one of {[f'{s}://' for s in SCHEMES]}"]
    if scheme == "file" and not rest.startswith("/"):
        return [f"url {url!r}: give the whole path of the folder, file:///..."]
    if odd := re.search(r"[#?|]|%(?![0-9A-Fa-f]{2})", rest):
        return [f"url {url!r}: write {odd[0]} as {urllib.parse.quote(odd[0])}"]
    if "\\" in urllib.parse.unquote(rest):
        return [f"url {url!r}: TensorStore reads a backslash as a slash; choose another folder"]
    return []


def _spec(root: str) -> str | dict[str, str]:
    """TensorStore's spec for a url."""
    endpoint, place = os.environ.get(ENDPOINT), urllib.parse.urlsplit(root)
    if place.scheme != "s3" or not endpoint:
        return root
    path = urllib.parse.unquote(place.path.lstrip("/"))
    return {"driver": "s3", "bucket": place.netloc, "path": path, "endpoint": endpoint}
