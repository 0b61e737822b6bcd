"""Transfers that share the network: what is answered does not depend on who asks first."""

import itertools

import numpy as np
import pytest

from lowcomm_jax.network.transfers import Fabric, Transfer, run_together

X, Y = ("link", 0, 1), ("link", 1, 2)


def transfer(number, flow_s, volume_s, *resources):
    members = tuple(sorted({region for _, *pair in resources for region in pair}))
    usage = dict.fromkeys(resources, 1.0)
    return Transfer(number, members, flow_s, volume_s, usage)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("read", [False, True])
def test_a_transfer_that_is_delayed_slows_what_it_now_meets(read, order):
    """The last one shares Y with the first from 5 s on: both are through at 15 s.

    So the first still uses half of X from 12 s on. The second moves 1.5 of its 3 s until 15 s, and
    the rest alone.
    """
    expected = [transfer(0, 0.0, 10.0, X, Y), transfer(1, 12.0, 3.0, X), transfer(2, 5.0, 5.0, Y)]
    run_together(expected)
    assert [t.end_s for t in expected] == [15.0, 16.5, 15.0]
    fabric = Fabric()
    for each in (transfer(0, 0.0, 10.0, X, Y), transfer(1, 12.0, 3.0, X)):
        fabric.add(each)
        if read:
            fabric.resolve(each.number)
    fabric.add(transfer(2, 5.0, 5.0, Y))
    ends = {number: fabric.resolve(number).end_s for number in order}
    assert [ends[number] for number in range(3)] == [15.0, 16.5, 15.0]


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_all_transfers_simulated_together(seed):
    """Sent in any order of virtual time, with answers read in between."""
    rng = np.random.default_rng(seed)
    links = [("link", a, b) for a in range(4) for b in range(4) if a != b]
    rows = []
    for number in range(40):
        used = [links[k] for k in rng.choice(len(links), rng.integers(1, 3), replace=False)]
        flow_s = float(number + rng.uniform(-9, 9))
        rows.append((number, flow_s, float(rng.uniform(0.5, 4)), *used))
    together = [transfer(*row) for row in rows]
    run_together(together)
    fabric = Fabric()
    for row in rows:
        fabric.add(transfer(*row))
        for number in rng.permutation(row[0] + 1)[:3].tolist():
            fabric.resolve(number)
    ends = {number: fabric.resolve(number).end_s for number in rng.permutation(40).tolist()}
    assert [ends[t.number] for t in together] == pytest.approx([t.end_s for t in together])
