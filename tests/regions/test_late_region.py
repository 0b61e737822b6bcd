"""A region that fell behind once, and goes on at exactly the pace of the others."""

import time

from regions.party import TIMING, at_once, payload

from lowcomm_jax import exchange

STEPS, STEP_S, OVERLAP = 140, 0.05, 4
LATE_AT, LAG_S = 10, 0.8
# The derived deadline is shorter than the overlap, and the overlap is shorter than the lag.
PACED = exchange.Timing(**{**vars(TIMING), "dead_after_s": 30.0, "floor_s": 0.1, "first_s": 5.0})


def train(region: exchange.RemoteExchange) -> list[bool]:
    """One exchange a step, which lands `OVERLAP` steps later; in which of them region 2 counted."""
    counted = []
    for step in range(STEPS + OVERLAP):
        time.sleep(STEP_S + LAG_S * (region.region == 2 and step == LATE_AT))
        region.beat(step + 1)
        if step < STEPS:
            region.start(f"{step}", payload(region.region, step))
        if step >= OVERLAP:
            arrived = region.finish(f"{step - OVERLAP}")
            counted.append(bool(arrived.participants[2]))
    return counted


def test_a_region_that_fell_behind_counts_again_though_no_step_of_it_is_faster(store_party):
    """The others train on while they wait: no wait that the overlap hides lets it come nearer."""
    counts = at_once(train, store_party.run(3, timing=PACED, keep=1000))
    assert counts[0] == counts[1] == counts[2], "what one commit record says"
    assert counts[0][0]
    assert any(counts[0][-40:])
