"""The layer-level model: small cases by hand, and an event-by-event check."""

import numpy as np
import pytest

from lowcomm_jax.planner.dag import smallest_bandwidth, utilisation
from lowcomm_jax.planner.dry_run import Sent


def walk(layers, step_s, link_s, latency_s, sends, tau, steps, warm):
    """Walk through every single computation of the model, one bandwidth."""
    part = step_s / layers / 3
    now = link = 0.0
    start = 0.0
    arrives = {}
    for step in range(1, steps + 1):
        for layer in range(layers):
            now = max(now, arrives.pop((step, layer), 0.0)) + part
        for layer in reversed(range(layers)):
            now += part + part
            if layer in sends(step):
                link = max(link, now) + link_s
                arrives[step + 1 + tau, layer] = link + latency_s
        if step == warm:
            start = now
    return (steps - warm) * step_s / (now - start)


def staggered(layers, period, fragments, tau, steps):
    """Fragment p, of every K-th layer, leaves after floor((p + 1) H / K) steps, and every H."""
    sends = []
    for step in range(1, steps + 1):
        for p in range(fragments):
            first = (p + 1) * period // fragments
            if step >= first and (step - first) % period == 0:
                own = range(p, layers, fragments)
                share = dict.fromkeys(own, 1 / len(own))
                sends.append(Sent(step, step + 1 + tau, p, len(own), "two_shot", share))
    return sends


def share_of(layers, step_s, link_s, sends, warm, steps, latency_s=0.0):
    """`utilisation` where a layer needs `link_s` seconds of the link."""

    def seconds(sent):
        return sent.nbytes * np.atleast_1d(link_s), latency_s

    return utilisation(layers, step_s, sends, seconds, warm, steps)


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("link_s", [0.01, 0.3, 2.0])
def test_model_equals_a_walk_over_every_computation(tau, link_s):
    warm = 10 + tau + 1
    sends = staggered(7, 10, 3, tau, warm + 20)
    mine = share_of(7, 0.9, link_s, sends, warm, warm + 20, 0.05)[0]
    after = {step: {x for s in sends if s.step == step for x in s.layers} for step in range(99)}
    other = walk(7, 0.9, link_s, 0.05, after.__getitem__, tau, warm + 20, warm)
    assert mine == pytest.approx(other, rel=1e-12)


def test_blocking_exchange_by_hand():
    # Two layers, 6 s a step: layer 1 is ready for the link 4 s before the step's end minus 2: it
    # waits for nothing, layer 0 at the end; both need 5 s: sent 4..9 and 9..14 s after the step's
    # start, the step ends at 6.
    share = share_of(2, 6.0, 5.0, staggered(2, 4, 1, 0, 17), 5, 17)[0]
    assert share == pytest.approx(4 * 6 / (4 * 6 + 8))


def test_utilisation_is_monotone():
    link_s = 1.0 / np.logspace(-2, 2, 30)
    for period, fragments, tau in ((1, 1, 0), (20, 1, 0), (20, 1, 20), (20, 3, 2)):
        warm = period + tau + 1
        steps = warm + 3 * period
        sends = staggered(6, period, fragments, tau, steps)
        share = share_of(6, 0.5, link_s, sends, warm, steps)
        assert (np.diff(share) >= -1e-12).all() and (share <= 1 + 1e-12).all()
    less = np.zeros(30)
    for tau in range(6):  # more overlap is never worse
        more = share_of(6, 0.5, link_s, staggered(6, 20, 3, tau, 87), 27, 87)
        assert (more >= less - 1e-9).all()
        less = more


def test_smallest_bandwidth():
    share, grid = np.array([0.1, 0.4, 0.6, 0.95]), np.array([1.0, 2.0, 4.0, 8.0])
    assert smallest_bandwidth(share, (0.05, 0.5, 0.99), grid) == [1.0, 4.0, None]
