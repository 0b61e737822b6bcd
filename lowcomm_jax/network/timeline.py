"""A timeline of activities: bars per region over virtual time, and their picture.

A clock that records owns a `Recorder`, which gives a `Timeline` of `Bar`s. `draw` draws it
with matplotlib.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("compute", "wait", "peers", "absent", "send", "land")
COLOURS = {
    "compute": "#4c72b0",
    "wait": "#c44e52",
    "peers": "#dd8452",
    "absent": "#bbbbbb",
    "send": "#55a868",
    "land": "#222222",
}
LEGEND = {
    "compute": "compute",
    "wait": "wait for bytes",
    "peers": "wait for peers",
    "absent": "away",
    "send": "bytes travel",
    "land": "landing",
}
KEPT_BARS = 200_000  # some tens of megabytes


@dataclass(frozen=True)
class Bar:
    """One activity of one region.

    Attributes:
        region: id.
        kind: one of `KINDS`; "send" lasts from the start of the transfer until this region has the
            result and overlaps with the others; "land" is a moment.
        start_s, end_s: virtual seconds.
        label: name of the payload.
    """

    region: int
    kind: str
    start_s: float
    end_s: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """All bars of a run."""

    regions: tuple[str, ...]
    bars: tuple[Bar, ...]

    @property
    def end_s(self) -> float:
        """Give the end of the last bar."""
        return max((bar.end_s for bar in self.bars), default=0.0)


class Recorder:
    """Bars per region; computing is whatever lies between two other activities.

    Of a long run only the last `KEPT_BARS` bars are kept.
    """

    def __init__(self, regions: tuple[str, ...], now_R: np.ndarray) -> None:
        """Start at the regions' virtual times `now_R`."""
        self.regions = regions
        self.bars: deque[Bar] = deque(maxlen=KEPT_BARS)
        self.begin_s: float = float(now_R.min())
        self.since_R: np.ndarray = now_R.copy()

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

    def landing(
        self,
        label: str,
        members: np.ndarray,
        start_s: float,
        now_M: np.ndarray,
        peers_M: np.ndarray,
        ready_M: np.ndarray,
    ) -> None:
        """Record the transfers, the waits for peers and for bytes, and the landings."""
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


def draw(timeline: Timeline, axes: Axes) -> None:
    """Draw the bars on matplotlib axes: one row a region, travelling bytes as a thin line in it."""
    lanes = {"send": (0.08, 0.14), "land": (0.05, 0.9)}
    seen: dict[str, object] = {}
    for kind in KINDS:
        low, height = lanes.get(kind, (0.3, 0.55))
        for region in range(len(timeline.regions)):
            bars = [b for b in timeline.bars if b.kind == kind and b.region == region]
            if not bars:
                continue
            if kind == "land":
                mark = axes.vlines(
                    [b.start_s for b in bars],
                    region + low,
                    region + low + height,
                    COLOURS[kind],
                    lw=0.8,
                )
            else:
                spans = [(b.start_s, b.end_s - b.start_s) for b in bars]
                mark = axes.broken_barh(spans, (region + low, height), facecolors=COLOURS[kind])
            seen.setdefault(LEGEND[kind], mark)
    axes.set_yticks([i + 0.5 for i in range(len(timeline.regions))], timeline.regions)
    axes.set_ylim(len(timeline.regions), 0)
    axes.set_xlabel("virtual seconds")
    # Below the axes: inside it would hide a region's bars. As many columns as the figure has room.
    for columns in range(len(seen), 0, -1):
        legend = axes.figure.legend(
            seen.values(),
            seen.keys(),
            loc="outside lower center",
            fontsize="small",
            ncols=columns,
        )
        if columns == 1 or legend.get_window_extent().width <= axes.figure.bbox.width:
            break
        legend.remove()
