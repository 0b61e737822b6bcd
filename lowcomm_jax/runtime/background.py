"""`Background`: the one owner of a job's background work between jobs.

It starts functions on threads of their own, and waits for all of them when the job pauses or
leaves. The heartbeat alone has a thread of its own: it goes on until all others have ended.
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
        self, name: str, act: Callable[[], None], wake: Callable[[], None] = lambda: None
    ) -> threading.Thread:
        """Call a function on a thread of its own.

        Args:
          name: for logs and debuggers.
          act: returns soon once the job's exchanges close or halt.
          wake: called by `join`, so that the function sees that at once.
        """
        thread = threading.Thread(
            target=self._guarded, args=(act,), name=f"lowcomm-{name}", daemon=True
        )
        with self._lock:
            self._running = [one for one in self._running if one.thread.is_alive()]
            self._running.append(_Running(thread, wake))
            thread.start()
        return thread

    def join(self) -> None:
        """Wait for everything that runs, and what that begins meanwhile; not for this thread.

        What does not end within half a minute is named in the log, and left.
        """
        until = time.monotonic() + _WITHIN_S
        while left := self._others():
            for one in left:
                one.wake()
                one.thread.join(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until and (names := self.running):
                log.warning("%s did not end in %.0f s, and is left", ", ".join(names), _WITHIN_S)
                return

    @property
    def running(self) -> list[str]:
        """Names of what runs now, but for this thread."""
        return [one.thread.name for one in self._others()]

    def _others(self) -> list[_Running]:
        with self._lock:
            alive = [one for one in self._running if one.thread.is_alive()]
        return [one for one in alive if one.thread is not threading.current_thread()]

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._fail(error)
