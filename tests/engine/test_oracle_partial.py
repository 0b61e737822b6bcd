"""Partial parameter updates and SPES against their NumPy re-derivation: three regions, absences."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, absent, anchors, check, close, one_device, train
from oracle.jax_problem import loss_fn
from params.test_region_roles import ROWS
from refused_lines import lines_between_jobs, lines_of
from sync.test_mean_of_trainers import by_region

import lowcomm_jax as lc
from lowcomm_jax.params.roles import Shares

STEPS, R = 17, 3
AWAY = ((4, 1), (8, 0), (12, 0), (12, 2), (16, 0), (16, 1), (16, 2))


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_partial_updates(inner):
    mask = absent(STEPS, R, AWAY)
    method = lc.methods.partial_updates(4, ROWS)
    state, seen, batches = train(method, inner[1], R, steps=STEPS, participants=mask, finish=True)
    run = oracle.run_partial_updates(
        oracle.make_params(),
        batches,
        period=4,
        masks=by_region(ROWS),
        inner=inner[0],
        outer=oracle.Nesterov(0.7, 0.9),
        participants=mask,
        finish=True,
    )
    check(seen, run)
    finished(state, run)


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


def batches_of(shapes, steps):
    return oracle.make_batches(steps=steps, regions=R, shapes=shapes)


def spes(period, **settings):
    return lc.methods.spes(period, "^(one|two)/", "up$", **settings)


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("merges", [True, False], ids=["merges", "alone"])
def test_spes(inner, merges):
    """Merges at steps 4, 8 and 12, the last one with absent owners; none from step 16."""
    warm = {"share": 0.4, "until": 16, "donors": 4}
    mask = absent(STEPS, R, ((4, 1), (10, 0), (12, 2)))
    method = spes(2, merge_every=4 if merges else None, **warm)
    params, table = oracle.make_params(shapes=EXPERTS), batches_of(EXPERTS, STEPS)
    engine = lc.Engine(loss_fn, inner[1], method, R, mesh=one_device())
    state, seen = engine.init(params), []
    for t in range(1, STEPS + 1):
        state, _ = engine.step(state, oracle.step_batch(table, t), mask[t - 1])
        seen.append((anchors(state), jax.tree.map(np.array, lc.region_params(state))))
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
    run = oracle.run_partial_updates(
        params,
        table,
        period=2,
        masks=masks,
        inner=inner[0],
        outer=oracle.Average(),
        after=after if merges else None,
        participants=mask,
        finish=True,
    )
    check(seen, run)
    finished(engine.finish(state), run)


def finished(state, run):
    for key, value in anchors(state).items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")


def test_an_expert_is_that_of_its_owner():
    """Without merges, up to the rounding of anchor - (anchor - value)."""
    engine = lc.Engine(loss_fn, optax.sgd(0.1), spes(1, merge_every=None), R, mesh=one_device())
    table = batches_of(EXPERTS, 1)
    moved, _ = engine.step(
        engine.init(oracle.make_params(shapes=EXPERTS)), oracle.step_batch(table, 1)
    )
    alone = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.local_sgd(9), R, mesh=one_device())
    local, _ = alone.step(
        alone.init(oracle.make_params(shapes=EXPERTS)), oracle.step_batch(table, 1)
    )
    own = lc.region_params(local)
    for e in range(7):
        owner = next(r for r in range(R) if r * 7 // R <= e < (r + 1) * 7 // R)
        for name in ("one/up", "one/down"):
            close(np.array(moved.anchor[name][0, e]), np.array(own[name][owner, e]), f"{name} {e}")


def test_settings_that_cannot_work():
    found = "\n".join(lines_of(lc.methods.spes(0, "(", "[", -1, 1.5, 0, -2, 0), R))
    for wrong in ("period=0", "'(' is no regular", "compare='['", "axis=-1", "share=1.5"):
        assert wrong in found, found
    for wrong in ("merge_every=0", "until=-2", "donors=0"):
        assert wrong in found, found
    (line,) = lines_of(lc.methods.partial_updates(4, None), R)
    assert "roles=None: say what each region trains" in line
    for method in (spes(4), lc.methods.partial_updates(4, Shares("a"))):
        assert lines_between_jobs(method, R) == []


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
