"""Partial parameter updates and SPES against their NumPy re-derivation: three regions, absences."""

import functools

import numpy as np
import optax
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, absent, close, compare
from oracle.jax_problem import loss_fn
from oracle_runs import one_device
from params.test_region_roles import ROWS, SHAPES

import lowcomm_jax as lc
from lowcomm_jax.params.roles import Shares, trained_rows

STEPS, R = 17, 3
AWAY = ((4, 1), (8, 0), (12, 0), (12, 2), (16, 0), (16, 1), (16, 2))


SHARES, WEIGHTS = Shares("^[ab]$"), [0.2, 0.5, 0.3]


def by_region(roles):
    """The oracle's masks: one mapping a region, leaf -> bool array."""
    found = trained_rows(roles, SHAPES, R)
    return [
        {k: np.broadcast_to(x[r], oracle.SHAPES[k]) for k, x in found.items()} for r in range(R)
    ]


@pytest.mark.parametrize(
    "roles, inner, weights",  # the quick ones: every two of them together
    [
        pytest.param(ROWS, SGD, None, id="rows-sgd-equal"),
        pytest.param(ROWS, ADAMW, WEIGHTS, id="rows-adamw-weighted"),
        pytest.param(SHARES, SGD, WEIGHTS, id="shares-sgd-weighted"),
        pytest.param(SHARES, ADAMW, None, id="shares-adamw-equal"),
        pytest.param(ROWS, SGD, WEIGHTS, id="rows-sgd-weighted", marks=pytest.mark.slow),
        pytest.param(ROWS, ADAMW, None, id="rows-adamw-equal", marks=pytest.mark.slow),
        pytest.param(SHARES, SGD, None, id="shares-sgd-equal", marks=pytest.mark.slow),
        pytest.param(SHARES, ADAMW, WEIGHTS, id="shares-adamw-weighted", marks=pytest.mark.slow),
    ],
)
def test_partial_updates(roles, inner, weights):
    state, run, _ = compare(
        lc.methods.partial_updates(4, roles),
        oracle.run_partial_updates,
        R,
        inner,
        steps=STEPS,
        participants=absent(STEPS, R, AWAY),
        weights=weights,
        period=4,
        masks=by_region(roles),
        outer=oracle.Nesterov(0.7, 0.9),
    )
    for key, velocity in optax.tree.get(state.outer[0], "trace").items():
        close(velocity[0], run.finished.momentum[0][key], f"momentum {key}")


# Experts are rows of two leaves of a layer. Seven do not divide by three regions; five are fewer
# than the donors asked for.
EXPERTS = {
    "one/up": (7, 3, 2),
    "one/down": (7, 4),
    "two/up": (5, 3),
    "two/down": (5, 2),
    "rest": (6,),
}
LAYERS = [(["one/up", "one/down"], "one/up"), (["two/up", "two/down"], "two/up")]


def spes(period, **settings):
    return lc.methods.spes(period, "^(one|two)/", "up$", **settings)


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("merges", [True, False], ids=["merges", "alone"])
def test_spes(inner, merges):
    """Merges at steps 4, 8 and 12, the last one with absent owners; none from step 16."""
    warm = {"share": 0.4, "until": 16, "donors": 4}
    masks = [
        {
            key: (np.arange(n := shape[0]) >= r * n // R).reshape(-1, *(1,) * (len(shape) - 1))
            & (np.arange(n) < (r + 1) * n // R).reshape(-1, *(1,) * (len(shape) - 1))
            for key, shape in EXPERTS.items()
            if "/" in key
        }
        for r in range(R)
    ]
    after = functools.partial(oracle.merged_experts, layers=LAYERS, every=4, **warm)
    compare(
        spes(2, merge_every=4 if merges else None, **warm),
        oracle.run_partial_updates,
        R,
        inner,
        steps=STEPS,
        shapes=EXPERTS,
        participants=absent(STEPS, R, ((4, 1), (10, 0), (12, 2))),
        period=2,
        masks=masks,
        outer=oracle.Average(),
        after=after if merges else None,
    )


def test_experts_that_cannot_be_merged():
    def refused(*settings):
        engine = lc.Engine(
            loss_fn, optax.sgd(0.1), lc.methods.spes(4, *settings), R, mesh=one_device()
        )
        with pytest.raises(ValueError, match="experts cannot be merged") as error:
            engine.init(oracle.make_params(shapes=EXPERTS))
        return str(error.value)

    text = refused("^(one|two)/", "one/up$")
    assert "compare='one/up$' matches none of ['two/down', 'two/up']" in text
    text = refused("/", "o")
    assert "matches ['one/down', 'one/up'] of" in text
    assert "leaves of one layer differ along axis 1" in refused("^one/", "up", 1)
