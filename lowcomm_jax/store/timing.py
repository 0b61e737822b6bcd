"""`Timing`: how long regions wait for one another; `Pace`: deadlines from observed delays."""

from __future__ import annotations

import dataclasses
import statistics
import threading
from collections import deque
from collections.abc import Sequence

_REMEMBERED = 32
_LEAST = 3
_MOST_DOUBLED = 4


@dataclasses.dataclass(frozen=True)
class Timing:
    """Settings in seconds.

    Attributes:
      beat_s: between two heartbeats of a region.
      dead_after_s: a region counts as dead when its heartbeat did not change for this time, at the
        soonest. One whose heartbeats were seen to come slower is given `patience_s`.
      deadline_s: how long a living region's payload may keep the others from training before they
        go on without it; None = derived from observed delays (`Pace`).
      floor_s: least derived deadline.
      first_s: deadline before enough delays were observed; covers compiling.
      answer_s: least time a region gets to answer, or a transfer to make progress.
    """

    beat_s: float = 1.0
    dead_after_s: float = 4.0
    deadline_s: float | None = None
    floor_s: float = 10.0
    first_s: float = 600.0
    answer_s: float = 5.0

    @classmethod
    def between(cls, url: str, **changes: float | None) -> Timing:
        """Of regions that meet at this url: a shared folder is near, and an object store far.

        A death is seen within 2 s in a folder. Looks at an object store are slow, and paid for.
        """
        near = {"beat_s": 0.4, "dead_after_s": 1.6} if url.startswith("file://") else {}
        return cls(**(near | changes))

    def patience_s(self, gaps_s: Sequence[float]) -> float:
        """How long a region may be silent, by the newest gaps between its heartbeats as seen here.

        Three times the longest of them, from `dead_after_s` to 16 times that. A busy machine, or a
        slow way to the store, makes living regions look late.
        """
        slowest = 3 * max(gaps_s, default=0.0)
        return min(max(slowest, self.dead_after_s), 16 * self.dead_after_s)

    def violations(self) -> list[str]:
        """Problems of these settings, with their fixes."""
        wrong = [
            f"{field.name}={value} must be a positive number of seconds"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and not value > 0
        ]
        if not wrong and self.dead_after_s < 2 * self.beat_s:
            wrong.append(
                f"dead_after_s={self.dead_after_s} is less than two heartbeats of {self.beat_s} s: "
                "a healthy region would be taken for dead; raise it or lower beat_s"
            )
        return wrong


class Pace:
    """Observed lateness of announcements and speed of transfers; derives deadlines from them.

    Lateness is that after the own announcement, also where an overlap hides it: the next exchange
    may hide nothing. A deadline is floor + median lateness + 6 median absolute deviations + 3
    transfer times. One slow round does not move it; a link or region that stays slow does. It is
    doubled with each exchange that has waited for a region in vain, as TCP doubles its timeout
    (RFC 6298, 5.5).
    """

    def __init__(self, timing: Timing):
        self._timing = timing
        self._lock = threading.Lock()
        self._late_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._bytes_per_s: deque[float] = deque(maxlen=_REMEMBERED)

    def announced(self, late_s: float) -> None:
        """The last region of a round announced so long after this one."""
        with self._lock:
            self._late_s.append(max(late_s, 0.0))

    def transferred(self, nbytes: int, seconds: float) -> None:
        """A payload of another region took so long to get here."""
        with self._lock:
            self._bytes_per_s.append(nbytes / max(seconds, 1e-6))

    def transfer_s(self, nbytes: int) -> float:
        """Expected seconds for a number of bytes; 0 while nothing was observed."""
        with self._lock:
            seen = list(self._bytes_per_s)
        return nbytes / statistics.median(seen) if seen else 0.0

    def deadline_s(self, nbytes: int, missed: int = 0) -> float:
        """How long to wait for the other regions' payloads of `nbytes` together.

        Args:
          missed: exchanges that have waited in vain for a region since it last announced. A
            derived deadline is doubled for each, four times at most, and up to `first_s`: for a
            region that is far slower than the others, no deadline would do.
        """
        timing = self._timing
        if timing.deadline_s is not None:
            return timing.deadline_s
        with self._lock:
            late_s = list(self._late_s)
        if len(late_s) < _LEAST:
            return max(timing.first_s, timing.floor_s)
        median = statistics.median(late_s)
        spread = statistics.median(abs(x - median) for x in late_s)
        usual_s = timing.floor_s + median + 6 * spread + 3 * self.transfer_s(nbytes)
        return max(usual_s, min(usual_s * 2 ** min(missed, _MOST_DOUBLED), timing.first_s))
