"""Who did what when: bars per region over virtual time, and their picture."""

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Bar:
    """One activity of one region.

    Attributes:
        region: id.
        kind: one of `KINDS`; "send" lasts from the start of the transfer until this region has the
            result and overlaps with the others; "land" is a moment.
        start_s, end_s: virtual seconds.
        label: what travels.
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


def draw(timeline: Timeline, axes) -> None:
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
    if seen:
        # Below the axes: inside it would hide a region's bars.
        axes.figure.legend(
            seen.values(),
            seen.keys(),
            loc="outside lower center",
            fontsize="small",
            ncols=len(seen),
        )


def save_picture(timeline: Timeline, path: Path | str, title: str = "") -> Path:
    """Write the picture as PNG (or whatever the suffix says) and give its path."""
    from matplotlib.figure import (
        Figure,
    )  # a figure without pyplot needs no display and no global state

    figure = Figure(figsize=(10, 1.2 + 0.7 * len(timeline.regions)), layout="constrained")
    axes = figure.add_subplot()
    draw(timeline, axes)
    axes.set_title(title)
    figure.savefig(path, dpi=150)
    return Path(path)
