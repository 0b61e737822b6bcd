"""`Background`: the one owner of a job's background work between jobs.

It starts functions on threads of their own, and waits for them when the job pauses or leaves. The
heartbeat has a thread of its own, which goes on until all others have ended; so has each connection
that brings a part of a payload (`pulling`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_WITHIN_S = 30.0
log = logging.getLogger(__name__)


class _Running(NamedTuple):
    thread: threading.Thread
    wake: Callable[[], None]
    serves: bool


class Background:
    """Starts, watches and joins threads.

    Args:
      fail: called with an error that a function has let through: it ends all exchanges.
    """

    def __init__(self, fail: Callable[[Exception], None]):
        self._fail = fail
        self._lock = threading.Lock()
        self._running: list[_Running] = []

    def begin(
        self,
        name: str,
        act: Callable[[], None],
        wake: Callable[[], None] = lambda: None,
        serves: bool = False,
    ) -> threading.Thread:
        """Call a function on a thread of its own.

        Args:
          name: for logs and debuggers.
          act: returns soon once the job's exchanges close or halt.
          wake: called by `join`, so that the function sees that at once.
          serves: whether it serves others, and goes on until the job leaves.
        """
        thread = threading.Thread(
            target=self._guarded, args=(act,), name=f"lowcomm-{name}", daemon=True
        )
        with self._lock:
            self._running = [one for one in self._running if one.thread.is_alive()]
            self._running.append(_Running(thread, wake, serves))
            thread.start()
        return thread

    def join(self, leaves: bool = True) -> None:
        """Wait for everything that runs, and what that begins meanwhile; not for this thread.

        What does not end within half a minute is named in the log, and left.

        Args:
          leaves: whether the job leaves; else what serves others goes on.
        """
        until = time.monotonic() + _WITHIN_S
        while left := self._others(leaves):
            for one in left:
                one.wake()
            for one in left:
                one.thread.join(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until and (left := self._others(leaves)):
                names = ", ".join(one.thread.name for one in left)
                log.warning("%s did not end in %.0f s, and is left", names, _WITHIN_S)
                return

    @property
    def idle(self) -> bool:
        """Whether nothing runs now but what serves others, and this thread."""
        return not self._others(serving=False)

    def _others(self, serving: bool) -> list[_Running]:
        with self._lock:
            alive = [one for one in self._running if one.thread.is_alive()]
        me = threading.current_thread()
        return [one for one in alive if one.thread is not me and (serving or not one.serves)]

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._fail(error)
