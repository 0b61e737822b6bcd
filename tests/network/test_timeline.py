"""Bars of a run: they tile the time of each region, show overlap, and make a picture."""

import itertools

import pytest
from matplotlib.figure import Figure

from lowcomm_jax.network import VirtualClock, draw, uniform


def recorded():
    clock = VirtualClock(uniform(3, 8.0, delay_s=0.05).with_compute([0.2, 0.3, 0.25]), record=True)
    for step in range(1, 21):
        clock.inner_step(step)
        if step in (7, 17):
            clock.land(step, "p0")
        if step in (5, 15):
            clock.send(step, "p0", 1.0e9, "all_gather")
    return clock


def test_bars_tile_each_regions_time():
    clock = recorded()
    timeline = clock.timeline()
    for region in range(3):
        bars = [b for b in timeline.bars if b.region == region and b.kind not in ("send", "land")]
        bars.sort(key=lambda b: b.start_s)
        assert bars[0].start_s == 0.0
        assert bars[-1].end_s == pytest.approx(clock.now_R[region])
        for one, two in itertools.pairwise(bars):
            assert one.end_s == pytest.approx(two.start_s)
        seconds = sum(b.end_s - b.start_s for b in bars if b.kind == "compute")
        assert seconds == pytest.approx(clock.report().compute_R[region])
        waits = sum(b.end_s - b.start_s for b in bars if b.kind == "wait")
        assert waits == pytest.approx(clock.report().exposed_R[region])


def test_travelling_bytes_overlap_with_compute():
    timeline = recorded().timeline()
    send = next(b for b in timeline.bars if b.kind == "send" and b.region == 1)
    assert send.end_s - send.start_s == pytest.approx(1.05)
    assert any(
        b.kind == "compute" and b.region == 1 and b.start_s < send.end_s and b.end_s > send.start_s
        for b in timeline.bars
    )
    assert sum(b.kind == "land" for b in timeline.bars) == 6


@pytest.mark.parametrize("width", [2.0, 4.4, 10.0])
def test_the_legend_lies_inside_the_picture(width):
    figure = Figure(figsize=(width, 4), layout="constrained")
    draw(recorded().timeline(), figure.add_subplot())
    figure.draw_without_rendering()
    box = figure.legends[-1].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and len(figure.legends) == 1


def test_a_clock_that_does_not_record_has_no_timeline():
    with pytest.raises(ValueError, match="record=True"):
        VirtualClock(uniform(2, 1.0)).timeline()
