"""Turns signals that ask a run to stop into a flag, so that it can finish its step, save and exit.

A training loop asks `Interrupt.requested`. In a job of several processes the one that gets a signal
passes it on to the leader, which decides for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar

from lowcomm_jax.mesh.leader import ProcessLostError, opened

EXIT_INTERRUPTED = 75
"""Exit code of a run that was interrupted, saved its state and can be continued (EX_TEMPFAIL)."""

AGAIN_S = 2.0
"""Only the same signal, so many seconds after it first came, means "at once".

Launchers repeat signals, by the same number or another. `timeout` signals its child, then the group
of both. A shell's trap sends SIGTERM to those who have Ctrl-C already, bash sends SIGHUP again to
its jobs, and `launch` SIGTERM to jobs whose unit systemd stops. Copies come within milliseconds,
on a busy machine within a second; a person who insists waits longer.
"""
AT_ONCE_S = 0.5
"""Seconds that the main thread may take to act on a signal that means "at once"."""
ALWAYS = (signal.SIGTERM, signal.SIGINT)
IF_FREE = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Handled unless they are ignored (`nohup`) or have a handler of the program's own.

Slurm sends what `--signal` says, a lost terminal SIGHUP."""
log = logging.getLogger(__name__)


class InterruptedBeforeError(BaseException):
    """A signal came while there was nothing to save yet.

    No `Exception`: libraries pass over those (JAX does, where it reads a compiled program).
    """


@contextlib.contextmanager
def raised(*signals: signal.Signals) -> Iterator[None]:
    """Turn signals into `InterruptedBeforeError`, where the main thread only waits."""

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


def usual() -> tuple[signal.Signals, ...]:
    """The signals that ask a program to stop: `ALWAYS`, and of `IF_FREE` those that are free."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: handlers that are not from Python (`faulthandler`) are not seen
        caught = 0
    else:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)

    def free(number: signal.Signals) -> bool:
        handler = signal.getsignal(number)
        if isinstance(getattr(handler, "__self__", None), Interrupt):
            return True
        return handler == signal.SIG_DFL and not caught >> (number - 1) & 1

    return ALWAYS + tuple(number for number in IF_FREE if free(number))


@dataclasses.dataclass
class _Come:
    """What has come, for all contexts inside one another.

    Attributes:
      first: when each signal came first, by its number; `time.monotonic`.
      acted: when a context acted on one.
      told: whether the log says so.
    """

    first: dict[int, float] = dataclasses.field(default_factory=dict)
    acted: float = -math.inf
    told: bool = False

    def again(self, number: int) -> bool:
        """Note a signal; returns whether it means "at once"."""
        now = time.monotonic()
        return now - self.first.setdefault(number, now) >= AGAIN_S

    @property
    def lately(self) -> bool:
        """Whether a launcher may still repeat what has been acted on."""
        return time.monotonic() - self.acted < AGAIN_S


class Interrupt:
    """Context manager: the first signal sets a flag, the same one `AGAIN_S` later acts at once.

    A training loop asks `requested` after every step (or block of steps), saves a checkpoint and
    exits with `EXIT_INTERRUPTED`. Other signals, and copies that come sooner, change nothing. The
    same signal later puts the previous handlers back and is raised again: SIGINT becomes
    KeyboardInterrupt, others end the process. Copies change nothing after the block, too.

    Python calls handlers in the main thread only, which may be waiting for the device. So a second
    thread logs at once that a signal has come. It ends the process (exit code 128 + the signal's
    number) if the main thread has not acted at once within `AT_ONCE_S`.

    A context inside another shares the signals. So a program that runs many loops in turn learns of
    a signal in the last steps of one, and a loop that begins after a signal stops.

    Where the terminal is gone (SIGHUP), what is printed goes nowhere: it would raise OSError.

    Args:
      signals: default: `usual()`.
      act: called instead of setting the flag.
      wake: called on another thread, with a signal that another process of this job has received;
        default: sets the flag.

    Attributes:
      signal: the first signal received, or None.
      under_way: called on another thread for the log's line: what the run stops after.

    Raises:
      ValueError: entered outside the main thread, where Python handles no signals.
    """

    _left: ClassVar[Interrupt | None] = None  # of a block that has ended: takes copies

    def __init__(
        self,
        *signals: signal.Signals,
        act: Callable[[int], None] | None = None,
        wake: Callable[[int], None] | None = None,
    ):
        self._given = signals
        self._act, self._wake = act, wake
        self._passed_on = False
        self.signal: signal.Signals | None = None
        self.under_way: Callable[[], str] = lambda: "what is under way"
        self._come = _Come()
        self._previous: dict[signal.Signals, object] = {}
        self._heard: socket.socket | None = None
        self._wakeup = -1
        self._acted = False

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to stop; all processes of a job ask it together."""
        return opened().broadcast_from_leader("interrupt", lambda: self.here)

    @property
    def here(self) -> bool:
        """Whether a signal has come to this process, or was passed on to it; asks no other one."""
        return self.signal is not None or self._passed_on

    def __enter__(self) -> Interrupt:
        if Interrupt._left is not None:
            Interrupt._left._put_back()
        self.signal, self._passed_on = None, False
        taken = self._given or usual()
        self._previous = {s: signal.signal(s, self._handle) for s in taken}
        around = next(self._around(*taken), None)
        self._come = _Come() if around is None else around._come
        if self._act is None:
            self.signal = next((outer.signal for outer in self._outer(*taken)), None)
        self._listen()
        opened().on_signal(self._hear)
        return self

    def __exit__(self, *error) -> None:
        opened().on_signal(None)
        self._stop_listening()
        if self._come.lately and next(self._around(*self._previous), None) is None:
            Interrupt._left = self
        else:
            self._put_back()

    def _listen(self) -> None:
        """Let the interpreter notify a thread of every signal as it comes."""
        self._acted = False
        ours, self._heard = socket.socketpair()
        self._heard.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._heard.fileno(), warn_on_full_buffer=False)
        taken = frozenset(self._previous)
        threading.Thread(target=self._tell, args=(ours, taken), daemon=True).start()

    def _tell(self, ours: socket.socket, taken: frozenset[int]) -> None:
        with ours:
            while number := ours.recv(1):
                if number[0] not in taken:
                    continue
                name = signal.Signals(number[0]).name
                if number[0] == signal.SIGHUP:
                    _leave_terminal()
                if self._come.again(number[0]):
                    time.sleep(AT_ONCE_S)
                    if not self._acted:
                        log.warning("%s again: ended at once, nothing more is saved", name)
                        os._exit(128 + number[0])
                elif not self._come.told:
                    self._come.told = True
                    log.warning(
                        "%s: stopping after %s; once more, %g s from now or later: at once",
                        name,
                        self.under_way(),
                        AGAIN_S,
                    )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = self._come.again(number)
        if Interrupt._left is self:
            if not self._come.lately:
                self._put_back()
                signal.raise_signal(number)
        elif again:
            self._stop_listening()
            self._put_back()
            if signal.getsignal(number) == signal.SIG_IGN:
                # Of a job that a script has put into the background; we were told twice.
                signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif self.signal is None and not self._come.lately:
            self._first(number)

    def _first(self, number: int) -> None:
        self.signal, self._come.acted = signal.Signals(number), time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if not opened().leads:
            opened().pass_on(number)
        elif self._act is not None:
            self._act(number)
        else:
            for outer in self._outer(number):
                outer.signal = self.signal

    def _around(self, *numbers: int) -> Iterator[Interrupt]:
        """The `Interrupt` around this one, for each of these signals."""
        for number in numbers:
            owner = getattr(self._previous.get(number), "__self__", None)
            if isinstance(owner, Interrupt):
                yield owner

    def _outer(self, *numbers: int) -> Iterator[Interrupt]:
        """The same, where it keeps a flag."""
        return (outer for outer in self._around(*numbers) if outer._act is None)

    def _hear(self, number: int) -> None:
        """Handle a signal of another process; the next one here still counts as the first."""
        if self._passed_on:
            return
        self._passed_on = True
        if self._wake is not None:
            self._wake(number)

    def _stop_listening(self) -> None:
        self._acted = True
        if self._heard is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._heard.close()
            self._heard = None

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # else the program has another one since
                # None: the handler was not installed from Python and cannot be put back from it.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if Interrupt._left is self:
            Interrupt._left = None


def _leave_terminal() -> None:
    """Let stdout and stderr go nowhere if they are of a terminal that is gone."""
    for file in (1, 2):
        try:
            os.write(file, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, file)
                os.close(nowhere)
