"""Collect the bars of a timeline while a clock runs."""

from collections import deque

import numpy as np

from lowcomm_jax.network.timeline import Bar, Timeline

LIMIT = 200_000  # some tens of megabytes


class Recorder:
    """Bars per region; computing is whatever lies between two other activities.

    Of a long run only the last `LIMIT` bars are kept.
    """

    def __init__(self, regions: tuple[str, ...], now_R: np.ndarray) -> None:
        """Start at the regions' virtual times `now_R`."""
        self.regions = regions
        self.bars: deque[Bar] = deque(maxlen=LIMIT)
        self.begin_s = float(now_R.min())
        self.since_R = now_R.copy()

    def pause(self, kind: str, region: int, begin_s: float, end_s: float, label: str) -> None:
        """Note that a region did not compute from begin to end."""
        if end_s <= begin_s:
            return
        if begin_s > self.since_R[region]:
            self.bars.append(
                Bar(region, "compute", float(self.since_R[region]), float(begin_s), "")
            )
        self.bars.append(Bar(region, kind, float(begin_s), float(end_s), label))
        self.since_R[region] = end_s

    def travel(self, label: str, members: np.ndarray, start_s: float, ready_M: np.ndarray) -> None:
        """Note when bytes travelled to their receivers."""
        begin = max(start_s, self.begin_s)
        for member, ready in zip(members.tolist(), ready_M.tolist(), strict=True):
            self.bars.append(Bar(member, "send", begin, ready, label))

    def landing(self, label: str, members: np.ndarray, start_s: float, now_M, peers_M, ready_M):
        """Note when bytes travelled, who waited for peers and for bytes, and the landings."""
        self.travel(label, members, start_s, ready_M)
        rows = zip(
            members.tolist(), now_M.tolist(), peers_M.tolist(), ready_M.tolist(), strict=True
        )
        for member, now, peers, ready in rows:
            landed = max(now, ready)
            self.bars.append(Bar(member, "land", landed, landed, label))
            self.pause("peers", member, now, now + peers, label)
            self.pause("wait", member, now + peers, ready, label)

    def timeline(self, now_R: np.ndarray) -> Timeline:
        """Give all bars up to now."""
        tail = [
            Bar(region, "compute", float(since), float(now), "")
            for region, (since, now) in enumerate(zip(self.since_R, now_R, strict=True))
            if now > since
        ]
        return Timeline(self.regions, (*self.bars, *tail))
