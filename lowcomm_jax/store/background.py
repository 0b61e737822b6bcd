"""`Background`: starts the threads of a job's exchanges, and waits for them.

All threads and processes of a job that is one region of several follow, but those that live only
while the processes of a region meet or fail. `Background` owns those marked B, and names them
`lowcomm-<name>`. S: it serves other regions, so a pause lets it go on.

================= ============================================= ====================================
thread            does                                          ends
================= ============================================= ====================================
main              the loop; starts exchanges and waits for them with the program
lowcomm-heartbeat beats, and reads all beats: who lives         `Heartbeat.stop`, `2 answer_s`
<exchange> (B)    brings the payload to the host, packs it,     with the outcome; `check` raises
                  agrees, averages slices                       once exchanges close or halt
<early> (B)       the same for what travels early               all is known, or its exchange begins
fetch-<r> (B)     gets and verifies a payload of region r       it is here, refused or cancelled
rounds (B)        learners, arrivals: `RoundExchange.look`      exchanges close or halt
give (B, S)       writes a state for those who ask              when it is written
serve (B, S)      `peers`: looks after the next process         exchanges close
a process         `peers`: serves payloads (`serving`)          killed, or its pipe is closed
meet-<r> (B, S)   `peers`: tries the port of region r           an answer, or exchanges close
lowcomm-read      `peers`: brings one range of a payload        all is here, or cancelled; one that
                                                                still connects is left
lowcomm-at-once   writes several records side by side           with the call
checkpoints       digests of a save, and Orbax                  `Checkpoints.close`, without a limit
lowcomm-say       messages to the other processes of a region   `LeaderChannel.close`, 10 s
one a process     messages from there (`mesh.leader`)           either end is closed
of `interrupt`    tells of signals at once                      its socket is closed
of Grain          draws batches ahead                           with the iterator
================= ============================================= ====================================

How a job leaves (`rejoin.serve`, then `Membership.close`):

1. For half a minute at most it stays for those who ask, and gives them its state; where its
   transport lingers, also for those who lack its payloads. It leaves its state in the store where a
   region is missing, or lacks some by then. A job that serves nobody only waits, as long, until the
   others have its payloads.
2. It says that exchanges close, and joins those marked B, half a minute at most.
3. It stops the heartbeat, whose last beat says that it leaves: within `2 answer_s` (10 s).
4. It closes the store, which ends requests that hang, and joins again who waited for one.
5. It closes the transport, and with it the process that serves.

A store that hangs so holds the exit for 30 + 10 s and two looks whether it was closed. Where the
operating system hangs in a call (a dead mount), the second join takes another half a minute.

The main thread closes checkpoints and channels by itself.
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
