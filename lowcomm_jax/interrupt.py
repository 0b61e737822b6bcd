"""Turns SIGTERM and SIGINT into a flag, so that a run can finish its step, save and exit.

A training loop asks `Interrupt.requested`. In a job of several processes the one that gets a signal
passes it on to the leader, which decides for all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from lowcomm_jax.mesh.leader import ProcessLostError, opened

EXIT_INTERRUPTED = 75
"""Exit code of a run that was interrupted, saved its state and can be continued (EX_TEMPFAIL)."""


AT_ONCE_S = 0.5
"""Seconds that the main thread may take to act on a second signal."""
log = logging.getLogger(__name__)


class InterruptedBeforeError(Exception):
    """A signal came while there was nothing to save yet."""


@contextlib.contextmanager
def raised(*signals: signal.Signals) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `InterruptedBeforeError`, where the main thread only waits."""

    def act(number: int) -> None:
        raise InterruptedBeforeError(signal.Signals(number).name)

    def wake(number: int) -> None:
        signal.pthread_kill(threading.main_thread().ident, number)

    with Interrupt(*signals, act=act, wake=wake):
        try:
            yield
        except ProcessLostError as error:
            if isinstance(error.__cause__, InterruptedBeforeError):
                raise InterruptedBeforeError(str(error.__cause__)) from error
            raise


class Interrupt:
    """Context manager: the first signal sets a flag, a second one acts at once.

    A training loop asks `requested` after every step (or block of steps), saves a checkpoint and
    exits with `EXIT_INTERRUPTED`. A second signal puts the previous handlers back and is raised
    again: SIGINT becomes KeyboardInterrupt, SIGTERM ends the process.

    Python calls handlers in the main thread only, which may be waiting for the device. So a second
    thread logs at once that a signal has come. It ends the process (exit code 128 + the signal's
    number) if the main thread has not acted on the second signal within `AT_ONCE_S`.

    A context inside another shares the first signal. So a program that runs many loops in turn
    learns of a signal in the last steps of one, and a loop that begins after a signal stops.

    Args:
      act: called instead of setting the flag.
      wake: called on another thread, with a signal that another process of this job has received;
        default: sets the flag.

    Attributes:
      signal: the first signal received, or None.

    Raises:
      ValueError: entered outside the main thread, where Python handles no signals.
    """

    def __init__(
        self,
        *signals: signal.Signals,
        act: Callable[[int], None] | None = None,
        wake: Callable[[int], None] | None = None,
    ):
        self.signals = signals or (signal.SIGTERM, signal.SIGINT)
        self._act, self._wake = act, wake
        self._passed_on = False
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._heard: socket.socket | None = None
        self._wakeup = -1
        self._acted = False

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to stop; all processes of a job ask it together."""
        return opened().broadcast_from_leader(
            "interrupt", lambda: self.signal is not None or self._passed_on
        )

    def __enter__(self) -> Interrupt:
        self.signal, self._passed_on = None, False
        self._previous = {s: signal.signal(s, self._handle) for s in self.signals}
        if self._act is None:
            self.signal = next((outer.signal for outer in self._outer(*self.signals)), None)
        self._listen()
        opened().on_signal(self._hear)
        return self

    def __exit__(self, *error) -> None:
        opened().on_signal(None)
        self._put_back()

    def _listen(self) -> None:
        """Let the interpreter notify a thread of every signal as it comes."""
        self._acted = False
        ours, self._heard = socket.socketpair()
        self._heard.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._heard.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._tell, args=(ours,), daemon=True).start()

    def _tell(self, ours: socket.socket) -> None:
        come = 0
        with ours:
            while number := ours.recv(1):
                if number[0] not in self.signals:
                    continue
                come += 1
                name = signal.Signals(number[0]).name
                if come == 1:
                    log.warning("%s: stopping after what is under way; again: at once", name)
                else:
                    time.sleep(AT_ONCE_S)
                    if not self._acted:
                        log.warning("%s again: ended at once, nothing more is saved", name)
                        os._exit(128 + number[0])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            self._put_back()
            if signal.getsignal(number) == signal.SIG_IGN:
                # Of a job that a script has put into the background; we were told twice.
                signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not opened().leads:
            self.signal = signal.Signals(number)
            opened().pass_on(number)
        elif self._act is not None:
            self._act(number)
        else:
            self.signal = signal.Signals(number)
            for outer in self._outer(number):
                outer.signal = self.signal

    def _outer(self, *numbers: int) -> Iterator[Interrupt]:
        """The `Interrupt` around this one, if it keeps a flag, for each of these signals."""
        for number in numbers:
            owner = getattr(self._previous.get(number), "__self__", None)
            if isinstance(owner, Interrupt) and owner._act is None:
                yield owner

    def _hear(self, number: int) -> None:
        """Handle a signal of another process; the next one here still counts as the first."""
        if self._passed_on:
            return
        self._passed_on = True
        if self._wake is not None:
            self._wake(number)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        self._acted = True
        if self._heard is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._heard.close()
            self._heard = None
