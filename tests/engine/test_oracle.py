"""Every method against its NumPy re-derivation: several regions, different data, momentum."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.engine import Engine

STEPS = 13
SGD = (oracle.Momentum(0.05, 0.8), optax.sgd(0.05, momentum=0.8))
ADAMW = (oracle.AdamW(0.02), optax.adamw(0.02))
CUT = ("a|s", "b", "c")  # regexes of three fragments; the oracle gets the same as lists of keys


def fragments(count):
    return {1: [["a", "b", "c", "s"]], 2: [["a", "c"], ["b", "s"]], 3: [["a", "s"], ["b"], ["c"]]}[
        count
    ]


def one_device():
    return lc.make_mesh(devices=jax.devices()[:1])


def train(method, inner, regions, steps=STEPS, participants=None, finish=False, **kwargs):
    """Run the engine step by step; returns (state, states' anchors and locals per step)."""
    engine = Engine(loss_fn, inner, method, regions, mesh=one_device(), **kwargs)
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=steps, regions=regions)
    seen = []
    for t in range(1, steps + 1):
        mask = None if participants is None else participants[t - 1]
        state, _ = engine.step(state, oracle.step_batch(batches, t), mask)
        seen.append((anchors(state), jax.tree.map(np.array, lc.region_params(state))))
    if finish:
        state = engine.finish(state)
    return state, seen, batches


def anchors(state):
    return {k: np.array(x) for k, x in state.anchor.items()}


def close(actual, expected, name):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=5e-6, err_msg=name)


def check(seen, run):
    for t, (anchor, local) in enumerate(seen, 1):
        want = run.at(t)
        for key in anchor:
            for a, tree in enumerate(want.anchors):
                close(anchor[key][a], tree[key], f"step {t} anchor {a} {key}")
            for r, tree in enumerate(want.locals):
                close(local[key][r], tree[key], f"step {t} region {r} {key}")


def absent(steps, regions, rounds=((4, 1), (8, 0))):
    """A mask with some (step, region) absent; steps are 1-based."""
    mask = np.ones((steps, regions), bool)
    for step, region in rounds:
        mask[step - 1, region % regions] = False
    return mask


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_ddp(regions, inner):
    _, seen, batches = train(lc.methods.ddp(), inner[1], regions)
    check(seen, oracle.run_ddp(oracle.make_params(), batches, inner=inner[0]))


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_local_sgd(regions):
    _, seen, batches = train(lc.methods.local_sgd(4), SGD[1], regions)
    check(seen, oracle.run_local_sgd(oracle.make_params(), batches, period=4, inner=SGD[0]))


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]], ids=["equal", "weighted"])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_diloco(regions, inner, weights, skip):
    weights = weights and weights[:regions]
    mask = absent(STEPS, regions) if skip and regions > 1 else None
    kwargs = {} if weights is None else {"weights": weights}
    state, seen, batches = train(
        lc.methods.diloco(4), inner[1], regions, participants=mask, finish=True, **kwargs
    )
    run = oracle.run_diloco(
        oracle.make_params(),
        batches,
        period=4,
        inner=inner[0],
        outer=oracle.Nesterov(0.7, 0.9),
        participants=mask,
        weights=weights,
        finish=True,
    )
    check(seen, run)
    for key, value in anchors(state).items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")


# Every value of each setting, and every pair (tau, alpha), occurs; the spacing of K = 2 is 2 or 3.
STREAMING = [
    # regions, tau, alpha, fragments
    (2, 0, 0.0, 1),
    (3, 0, 0.3, 2),
    (2, 0, 1.0, 3),
    (3, 1, 0.0, 2),
    (3, 1, 0.3, 3),
    (3, 1, 1.0, 1),
    (2, 3, 0.0, 3),
    (3, 3, 0.3, 2),
    (2, 3, 0.3, 1),
    (3, 3, 1.0, 2),
    (3, 2, 0.3, 2),
    (1, 2, 0.3, 2),
]


@pytest.mark.parametrize("regions,tau,alpha,count", STREAMING)
def test_streaming(regions, tau, alpha, count):
    mask = absent(STEPS, regions)
    keys = fragments(count)
    method = lc.methods.streaming_diloco(
        5, count, tau, alpha, pattern=["|".join(f"^{k}$" for k in part) for part in keys]
    )
    state, seen, batches = train(method, SGD[1], regions, participants=mask, finish=True)
    run = oracle.run_streaming(
        oracle.make_params(),
        batches,
        fragments=keys,
        period=5,
        overlap=tau,
        alpha=alpha,
        inner=SGD[0],
        outer=oracle.Nesterov(0.4, 0.9),
        participants=mask,
        finish=True,
    )
    check(seen, run)
    for key, value in anchors(state).items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")


@pytest.mark.parametrize("tau", [(0, 2, 3), (1, 1, 4), (3, 0, 1)])
def test_streaming_with_a_delay_per_region(tau):
    keys = fragments(2)
    method = lc.methods.streaming_diloco(
        5, 2, tau, 0.3, pattern=["|".join(f"^{k}$" for k in part) for part in keys]
    )
    _, seen, batches = train(method, ADAMW[1], 3)
    run = oracle.run_streaming(
        oracle.make_params(),
        batches,
        fragments=keys,
        period=5,
        overlap=list(tau),
        alpha=0.3,
        inner=ADAMW[0],
        outer=oracle.Nesterov(0.4, 0.9),
    )
    check(seen, run)


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_eager(regions, skip):
    mask = absent(STEPS, regions) if skip else None
    _, seen, batches = train(lc.methods.eager_diloco(4), SGD[1], regions, participants=mask)
    run = oracle.run_eager(
        oracle.make_params(),
        batches,
        period=4,
        inner=SGD[0],
        outer=oracle.Nesterov(0.4, 0.9),
        participants=mask,
    )
    check(seen, run)


@pytest.mark.parametrize(
    "regions, steps, away, weights",
    [
        (1, 3, (), None),  # before the first boundary nothing waits, and no own part was added
        (3, 3, (), None),
        (3, 8, (), [0.2, 0.5, 0.3]),
        (3, 8, ((8, 0),), None),  # the absent one sends alone, and nobody has added its part
        (3, 10, ((4, 2),), None),
    ],
)
def test_the_end_of_eager(regions, steps, away, weights):
    mask, method = absent(steps, regions, away), lc.methods.eager_diloco(4)
    given = {} if weights is None else {"weights": weights}
    state, seen, batches = train(method, SGD[1], regions, steps, mask, finish=True, **given)
    outer = oracle.Nesterov(0.4, 0.9)
    how = {"period": 4, "inner": SGD[0], "outer": outer, "participants": mask, "finish": True}
    run = oracle.run_eager(oracle.make_params(), batches, **how, **given)
    check(seen, run)
    for key, value in anchors(state).items():
        for r, tree in enumerate(run.finished.anchors):
            close(value[r], tree[key], f"anchor {r} {key}")
            close(np.array(lc.region_params(state)[key][r]), tree[key], f"region {r} {key}")


@pytest.mark.parametrize("first", ["empty", "blocking"])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_delayed(first, skip):
    mask = absent(STEPS, 3) if skip else None
    method = lc.methods.delayed_diloco(4, first_round=first)
    _, seen, batches = train(method, SGD[1], 3, participants=mask)
    run = oracle.run_dilocox_dense(
        oracle.make_params(),
        batches,
        period=4,
        inner=SGD[0],
        outer=oracle.Nesterov(0.4, 0.9),
        first_round=first,
        participants=mask,
    )
    check(seen, run)


@pytest.mark.parametrize("lam", [0.0, 0.5, 40.0])
@pytest.mark.parametrize("tau,syncs,regions", [(0, None, 3), (1, 5, 2), (2, 3, 3), (3, 3, 2)])
def test_cocodc(lam, tau, syncs, regions):
    keys, steps = fragments(3), 24
    mask = absent(steps, regions, ((6, 1), (10, 0), *((12, r) for r in range(regions))))
    method = lc.methods.cocodc(
        7,
        3,
        tau,
        syncs_per_period=syncs,
        taylor=lam,
        pattern=["|".join(f"^{k}$" for k in part) for part in keys],
    )
    _, seen, batches = train(method, SGD[1], regions, steps=steps, participants=mask)
    run = oracle.run_cocodc(
        oracle.make_params(),
        batches,
        fragments=keys,
        period=7,
        overlap=tau,
        lam=lam,
        syncs=syncs,
        inner=SGD[0],
        outer=oracle.Nesterov(0.4, 0.9),
        participants=mask,
    )
    check(seen, run)


# Absences (1-based step, region): a partner, one after another; both of a pair; nobody at all.
ABSENT = [None, ((3, 1), (6, 0), (9, 3)), tuple((6, r) for r in (0, 1, 2, 3, 4)), ((9, 0), (9, 2))]


@pytest.mark.parametrize(
    "regions,size,case",
    [
        (2, 2, 0),
        (2, 2, 1),
        (4, 2, 0),
        (4, 2, 1),
        (4, 2, 3),
        (5, 2, 0),
        (5, 2, 1),
        (5, 2, 2),
        (5, 3, 1),
    ],
)
def test_noloco(regions, size, case):
    rounds = ABSENT[case]
    mask = None if rounds is None else absent(STEPS, regions, rounds)
    settings = {"alpha": 0.3, "beta": 0.6, "gamma": 0.8}
    method = lc.methods.noloco(3, size, seed=5, **settings)
    state, seen, batches = train(method, SGD[1], regions, participants=mask, finish=True)
    # A round that nobody takes part in is one, too.
    groups = [lc.topology.Gossip(size, 5).groups(n, regions) for n in range(STEPS // 3 + 1)]
    run = oracle.run_noloco(
        oracle.make_params(),
        batches,
        period=3,
        groups=groups,
        inner=SGD[0],
        participants=mask,
        finish=True,
        last_groups=groups[-1],
        **settings,
    )
    check(seen, run)
    final = anchors(state)
    for key, value in final.items():
        for r, tree in enumerate(run.finished.anchors):
            close(value[r], tree[key], f"finished {r} {key}")
    if size < regions:
        assert max(np.ptp(x, axis=0).max() for x in final.values()) > 1e-3, "anchors never differ"


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.33, 1.51, 0.75), (1.0, 4.0)])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dylu", "fixed"])
def test_async_local_sgd(speeds, dynamic):
    steps, settings = 26, {"momentum": 0.8, "c": 0.1, "dynamic": dynamic}
    method = lc.methods.async_local_sgd(5, speeds, learning_rate=0.6, **settings)
    state, seen, batches = train(method, ADAMW[1], len(speeds), steps=steps, finish=True)
    run = oracle.run_async_local_sgd(
        oracle.make_params(),
        batches,
        period=5,
        inner=ADAMW[0],
        speeds=speeds,
        lr=0.6,
        finish=True,
        **settings,
    )
    check(seen, run)
    for key, value in anchors(state).items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")
