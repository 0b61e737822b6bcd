"""Turn SIGTERM and SIGINT into a flag, so that a run can finish its step, save and exit."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

EXIT_INTERRUPTED = 75
"""Exit code of a run that was interrupted, saved its state and can be continued (EX_TEMPFAIL)."""


class InterruptedBeforeError(Exception):
    """A signal came while there was nothing to save yet."""


@contextlib.contextmanager
def raised(*signals: signal.Signals) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `InterruptedBeforeError`, where the main thread only waits."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise InterruptedBeforeError(signal.Signals(number).name)

    with Interrupt(*signals, handle=handle):
        yield


class Interrupt:
    """Context manager: the first signal sets a flag, a second one acts at once.

    A training loop asks `requested` after every step (or block of steps), saves a checkpoint and
    exits with `EXIT_INTERRUPTED`. A second signal puts the previous handlers back and is raised
    again: SIGINT becomes KeyboardInterrupt, SIGTERM ends the process.

    Attributes:
      signal: the first signal received, or None.

    Raises:
      ValueError: entered outside the main thread, where Python handles no signals.
    """

    def __init__(self, *signals: signal.Signals, handle: Handler | None = None):
        self.signals = signals or (signal.SIGTERM, signal.SIGINT)
        self._handler = handle or self._handle
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to stop."""
        return self.signal is not None

    def __enter__(self) -> Interrupt:
        self.signal = None
        self._previous = {s: signal.signal(s, self._handler) for s in self.signals}
        return self

    def __exit__(self, *error) -> None:
        self._put_back()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = signal.Signals(number)
            return
        self._put_back()
        signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
