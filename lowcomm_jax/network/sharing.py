"""Fair speeds of transfers that move at the same time, and their course over time."""

from dataclasses import dataclass, field

import numpy as np

Resource = tuple[str, int, int]  # ("link", source, target), ("out", region, 0), ("in", region, 0)
EDGE = 1e-12  # relative slack for float comparisons


@dataclass
class Transfer:
    """One collective in flight.

    Attributes:
        number: order of sending; breaks ties and keeps runs deterministic.
        members: region ids.
        flow_s: when its volume starts to move (start + latency + constants).
        volume_s: seconds its volume takes alone.
        usage: share of each resource it uses while running alone, in (0, 1].
        rate_M: bytes per second each member sends while it runs alone.
        begin_s, speed: piecewise-constant speed: from begin_s[k] on it moves at speed[k].
        end_s: when its volume is through; None until resolved.
    """

    number: int
    members: tuple[int, ...]
    flow_s: float
    volume_s: float
    usage: dict[Resource, float]
    rate_M: np.ndarray
    begin_s: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    end_s: float | None = None

    def run_alone(self) -> None:
        """Write the course of a transfer that meets no other."""
        self.begin_s, self.speed, self.end_s = [self.flow_s], [1.0], self.flow_s + self.volume_s

    def crossings(self, share_M: np.ndarray) -> np.ndarray:
        """Give the times at which shares in [0, 1] of the volume are through (once resolved)."""
        if len(self.speed) == 1:
            return self.begin_s[0] + share_M * (self.volume_s / self.speed[0])
        times = np.array([*self.begin_s, self.end_s])
        done = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array(self.speed))])
        return np.interp(share_M * done[-1], done, times)


def fair_speeds(usages: list[dict[Resource, float]]) -> list[float]:
    """Give max-min fair speeds in (0, 1], relative to running alone, of transfers that move at the
    same time.

    Args:
        usages: per transfer the share of each resource it uses at speed 1.
    """
    names = sorted({r for usage in usages for r in usage})
    position = {r: k for k, r in enumerate(names)}
    use_TxQ = np.zeros((len(usages), len(names)))
    for t, usage in enumerate(usages):
        use_TxQ[t, [position[r] for r in usage]] = list(usage.values())
    speed_T = np.zeros(len(usages))
    free_T = np.ones(len(usages), bool)
    while free_T.any():
        load_Q = use_TxQ[free_T].sum(axis=0)
        room_Q = 1.0 - speed_T[~free_T] @ use_TxQ[~free_T]
        level_Q = np.where(
            load_Q > EDGE, np.maximum(room_Q, 0.0) / np.maximum(load_Q, EDGE), np.inf
        )
        level = min(1.0, float(level_Q.min(initial=np.inf)))
        tight_Q = level_Q <= level * (1 + EDGE)
        stuck_T = free_T & ((use_TxQ[:, tight_Q] > EDGE).any(axis=1) | (level >= 1.0))
        speed_T[stuck_T] = level
        free_T &= ~stuck_T
    return speed_T.tolist()


def run_together(transfers: list[Transfer]) -> None:
    """Write the course of transfers that share resources: new speeds at each start and end."""
    left = {t.number: t.volume_s for t in transfers}
    for transfer in transfers:
        transfer.begin_s, transfer.speed, transfer.end_s = [], [], None
    now = min(t.flow_s for t in transfers)
    while any(t.end_s is None for t in transfers):
        moving = [t for t in transfers if t.end_s is None and t.flow_s <= now]
        speeds = fair_speeds([t.usage for t in moving])
        later = min(
            (t.flow_s for t in transfers if t.end_s is None and t.flow_s > now), default=np.inf
        )
        ends = [now + left[t.number] / speed for t, speed in zip(moving, speeds, strict=True)]
        until = min([later, *ends])
        for transfer, speed, end in zip(moving, speeds, ends, strict=True):
            if not transfer.speed or transfer.speed[-1] != speed:
                transfer.begin_s.append(now)
                transfer.speed.append(speed)
            left[transfer.number] -= (until - now) * speed
            if end <= until + EDGE * abs(until):
                transfer.end_s = until
        now = until
