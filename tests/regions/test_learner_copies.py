"""What an independent learner takes from a peer, and what stays its own."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from params.tiny_runs import R, engine

import lowcomm_jax as lc
from lowcomm_jax.jobs.given_state import given, start_from_peer

METHOD = lc.methods.decoupled_diloco(3, 1, 2)
LOOP = SimpleNamespace(method=METHOD)  # copying a learner reads nothing else


def loss(params, batch, rng):
    del rng
    return ((params["w"] - batch["x"].mean()) ** 2).sum()


@pytest.fixture(scope="module")
def states():
    """(a fresh state, a peer's after seven steps with a report under way)."""
    with jax.numpy_dtype_promotion("standard"):
        one = engine(loss, METHOD, optax.sgd(0.1, momentum=0.9))
        start = {"w": np.float32([1.0, -2.0])}
        peer = one.init(start)
        for t in range(7):
            peer, _ = one.step(peer, {"x": np.full((R, 1), t, np.float32)})
        assert peer.in_flight
        return one.init(start), peer


@pytest.mark.parametrize(("own_step", "step"), [(0, 7), (9, 9)])
def test_it_has_the_values_and_the_rounds_of_the_peer_and_counts_anew(states, own_step, step):
    """Its step is the later of both, so that it reads no sample twice."""
    fresh, peer = states
    counters = fresh.counters.copy()
    counters.step = np.int64(own_step)
    inner = dataclasses.replace(fresh.inner, tokens=fresh.inner.tokens + 5)
    mine = fresh.replace(inner=inner, counters=counters, in_flight=peer.in_flight)
    _, arrays, document = given(peer, METHOD)
    got = start_from_peer(LOOP, mine, arrays, document)
    same = ("anchor", "outer", "landing")
    shared = [(getattr(got, name), getattr(peer, name)) for name in same]
    shared += [(getattr(got.inner, name), getattr(peer.inner, name)) for name in ("params", "opt")]
    for found, expected in shared:
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(got.inner.tokens).any()
    assert np.asarray(got.inner.step).tolist() == [step] * R and not got.in_flight
    now = got.counters
    assert (int(now.step), int(now.behind)) == (step, 0)
    assert now.sends.tolist() == [peer.counters.sends[0] - 1], "one round of them has not landed"
    assert now.last_landed.tolist() == [[step] * R] and now.previous_sent.tolist() == [-1]
    assert now.last_sent.tolist() == peer.counters.last_sent.tolist()


def test_a_peers_state_that_does_not_fit_is_refused_with_every_difference(states):
    """Of another model; without some of its counters, or its document."""
    fresh, peer = states
    _, arrays, _ = given(peer, METHOD)
    lacks = ("anchor/w", "counters/step", "counters/sends")
    wrong = {k: x for k, x in arrays.items() if k not in lacks}
    wrong["inner/params/w"] = np.zeros((R, 5), np.float32)
    with pytest.raises(ValueError, match="a peer's state does not fit") as error:
        start_from_peer(LOOP, fresh, wrong, {})
    told = [line.strip() for line in str(error.value).split("\n- ")[1:]]
    assert sorted(told) == [
        "anchor/w: missing -> (1, 2)",
        "counters/sends: missing",
        "counters/step: missing",
        "in_flight: missing",
        "inner/params/w: (3, 5) -> (3, 2)",
    ]
