"""Learners and workers that are down or absent: who counts, and what one that comes back has."""

import jax
import numpy as np
from params.test_roles import NORM, norm_loss, norm_roles
from params.tiny_runs import R, X, engine, train

import lowcomm_jax as lc
from lowcomm_jax.compression import make

AWAY = 1  # the region that is down, or absent


def square_loss(params, batch, rng):
    return ((params["w"] - batch["x"] * np.float32([1.0, -0.3, 0.5, 2.0])) ** 2).mean()


W = {"w": np.zeros(4, np.float32)}


def learners(first, last, **more):
    """One round a tick, without delay; region `AWAY` is down from tick `first` to `last`."""
    return lc.methods.decoupled_diloco(1, 1, 0, outages=[(AWAY, first, last)], **more)


def test_who_comes_back_has_an_empty_residual():
    """It holds a peer's values, of which its own residual would be news that nobody misses."""
    codec = make("topk", k=1, block=4, error_feedback=1.0)
    one = engine(square_loss, learners(3, 4, codec=codec))
    state = one.init(W)
    for step, batch in enumerate(X[:4], 1):
        state, metrics = one.step(state, batch)
        size = np.abs(np.asarray(state.codec[0].residual["w"])).max(axis=1)
        assert (size > 0).tolist() == [True, step < 4, True]
    assert metrics["events"][-1].kind == "recover"


def test_who_comes_back_has_the_buffers_of_its_peer():
    one = engine(norm_loss, learners(2, 3), roles=norm_roles("local"))
    found = [jax.tree.map(np.array, train(one, NORM, X[:n]).inner.buffers) for n in (2, 3)]
    assert found[0]["seen"].tolist() == [5, 4, 5]
    assert found[1]["seen"].tolist() == [6, 6, 6]
    assert found[0]["mean"][AWAY] != found[0]["mean"][0]
    assert found[1]["mean"][AWAY] == found[1]["mean"][0] != found[1]["mean"][2]


def test_a_round_counts_who_is_admitted_and_takes_part():
    """A learner of speed 1/2 has nothing to report in odd ticks."""
    one = engine(square_loss, lc.methods.decoupled_diloco(1, 1, 0, speeds=(1.0, 1.0, 0.5)))
    state, sent = one.init(W), []
    for t, batch in enumerate(X[:4], 1):
        state, metrics = one.step(state, batch, [r != AWAY or t > 2 for r in range(R)])
        sent += [e.participants.tolist() for e in metrics["events"] if e.kind == "send"]
    assert sent == [
        [True, False, False],
        [True, False, True],
        [True, True, False],
        [True, True, True],
    ]


def test_a_worker_that_is_absent_does_not_arrive():
    """It arrives at its next turn, with the steps since it last received a model."""
    one = engine(square_loss, lc.methods.halos(2, (1.0,) * R, groups=((0, 2), (1,))))
    state, arrived = one.init(W), []
    for t, batch in enumerate(X[:4], 1):
        state, metrics = one.step(state, batch, [r != AWAY or t > 2 for r in range(R)])
        arrived += [e.key for e in metrics["events"] if e.kind == "send"]
    assert arrived == ["0@2/0", "0@2/2", "0@4/0", "0@4/1", "0@4/2"]
    assert state.counters.staleness.tolist() == [[2, 4, 2]]
