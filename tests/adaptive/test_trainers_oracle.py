"""Trainers that merge, against their NumPy re-derivation: two regions, three trainers."""

import dataclasses

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.trainers import Trainers

REGIONS, PERIOD = 2, 3
# What each of three trainers asks for before every round; odd, unequal numbers.
REQUESTS = [
    {0: 2, 1: 2, 2: 2},
    {0: 5, 1: 3, 2: 4},
    {0: 6, 1: 3, 2: 5},  # the pair is (2, 1) or (0, 1)
    {0: 6, 1: 3, 2: 7},
    {0: 9, 1: 3, 2: 7},  # and then whoever is left
    {0: 9, 1: 3, 2: 8},
]
SGD = (oracle.Momentum(0.05, 0.8), optax.sgd(0.05, momentum=0.8))
ADAMW = (oracle.AdamW(0.02), optax.adamw(0.02))


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Asks for what the test puts into the state between rounds."""

    start: int = 2

    def violations(self, regions):
        return []

    def init(self):
        return {}

    def decide(self, state, statistics, batch):
        return state, batch


def stream(trainer, start, count):
    return oracle.make_stream(7, trainer, start, count, REGIONS)


def engine(inner, trainers, outer=None, **kwargs):
    outer = outer or lc.outer.nesterov(0.5, 0.6)
    method = dataclasses.replace(
        lc.methods.diloco(PERIOD, outer), inner_batching=Scripted(), trainers=trainers
    )
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    return lc.AdaptiveEngine(loss_fn, inner, method, REGIONS, mesh=mesh, **kwargs)


def ask(state, requests):
    """Put the next requests into the state."""
    trainers = {i: t.replace(request=requests[i]) for i, t in state.trainers.items()}
    return state.replace(trainers=trainers)


def close(actual, expected, name):
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(
    "inner,choose,moments",
    [
        (SGD, "worst_with_worst", "merge"),
        (SGD, "best_with_worst", "reset"),
        (ADAMW, "worst_with_worst", "reset"),
        (ADAMW, "best_with_worst", "merge"),
    ],
)
def test_merges(inner, choose, moments):
    run = engine(inner[1], Trainers(3, 2, choose, moments))
    state = run.init(oracle.make_params())
    seen, merges = oracle.run_trainers(
        oracle.make_params(),
        stream,
        REQUESTS,
        regions=REGIONS,
        period=PERIOD,
        merge_every=2,
        inner=inner[0],
        outer=oracle.Nesterov(0.5, 0.6),
        best_with_worst=choose == "best_with_worst",
        reset=moments == "reset",
    )
    found = []
    for round_, asked in enumerate(REQUESTS):
        state, history = run.run(ask(state, asked), stream, rounds=1)
        found += [(m.round, m.survivor, m.retired) for m in history.merges]
        want = seen[round_]
        assert list(state.trainers) == sorted(want)
        for number, trainer in state.trainers.items():
            assert trainer.used == want[number].used
            label = f"round {round_} trainer {number}"
            for key, value in want[number].anchor.items():
                close(trainer.state.anchor[key][0], value, f"{label} anchor {key}")
                for r, local in enumerate(want[number].regions.values):
                    close(trainer.state.inner.params[key][r], local[key], f"{label} {r} {key}")
    assert found == merges and len(found) == 2
