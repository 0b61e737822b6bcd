"""Every method against its NumPy re-derivation: several regions, different data, momentum."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from oracle_runs import one_device

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


def pattern(keys):
    """The regexes of these fragments."""
    return ["|".join(f"^{k}$" for k in part) for part in keys]


def train(
    method,
    inner,
    regions,
    steps=STEPS,
    participants=None,
    finish=False,
    shapes=oracle.SHAPES,
    **kwargs,
):
    """Run the engine step by step; returns (state, anchors and locals of every step, batches)."""
    engine = Engine(loss_fn, inner, method, regions, mesh=one_device(), **kwargs)
    state = engine.init(oracle.make_params(shapes=shapes))
    batches = oracle.make_batches(steps=steps, regions=regions, shapes=shapes)
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


def check_step(anchor, local, want, when):
    """Of one record: all anchors and all regions' values."""
    assert anchor.keys() == local.keys() == want.locals[0].keys()
    for key in anchor:
        for a, tree in enumerate(want.anchors):
            close(anchor[key][a], tree[key], f"{when} anchor {a} {key}")
        for r, tree in enumerate(want.locals):
            close(local[key][r], tree[key], f"{when} region {r} {key}")


def check(seen, run):
    for t, (anchor, local) in enumerate(seen, 1):
        check_step(anchor, local, run.at(t), f"step {t}")


def compare(
    method,
    run,
    regions,
    inner=SGD,
    steps=STEPS,
    finish=True,
    shapes=oracle.SHAPES,
    participants=None,
    weights=None,
    **settings,
):
    """Train and compare every step, and the end, with what an oracle's `run` makes of `settings`.

    Returns (state, the oracle's trajectory, the batches).
    """
    given = {} if weights is None else {"weights": weights}
    state, seen, batches = train(
        method, inner[1], regions, steps, participants, finish, shapes, **given
    )
    given |= {} if participants is None else {"participants": participants}
    given |= {"finish": True} if finish else {}
    want = run(oracle.make_params(shapes=shapes), batches, inner=inner[0], **given, **settings)
    check(seen, want)
    if finish:
        check_step(anchors(state), lc.region_params(state), want.finished, "finished")
    return state, want, batches


def absent(steps, regions, rounds=((4, 1), (8, 0))):
    """A mask with some (step, region) absent; steps are 1-based."""
    mask = np.ones((steps, regions), bool)
    for step, region in rounds:
        mask[step - 1, region % regions] = False
    return mask


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_ddp(regions, inner):
    compare(lc.methods.ddp(), oracle.run_ddp, regions, inner)


def test_ddp_of_weighted_regions_that_are_away_at_times():
    """At step 8 nobody takes part: AdamW's count and moments stand still."""
    away = absent(STEPS, 3, ((4, 1), (8, 0), (8, 1), (8, 2)))
    who = {"participants": away, "weights": [0.2, 0.5, 0.3]}
    compare(lc.methods.ddp(), oracle.run_ddp, 3, ADAMW, **who)


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_local_sgd(regions):
    compare(lc.methods.local_sgd(4), oracle.run_local_sgd, regions, period=4)


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]], ids=["equal", "weighted"])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_diloco(regions, inner, weights, skip):
    mask = absent(STEPS, regions) if skip and regions > 1 else None
    who = {"participants": mask, "weights": weights and weights[:regions]}
    outer = oracle.Nesterov(0.7, 0.9)
    method = lc.methods.diloco(4)
    compare(method, oracle.run_diloco, regions, inner, period=4, outer=outer, **who)


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
    keys = fragments(count)
    compare(
        lc.methods.streaming_diloco(5, count, tau, alpha, pattern=pattern(keys)),
        oracle.run_streaming,
        regions,
        participants=absent(STEPS, regions),
        fragments=keys,
        period=5,
        overlap=tau,
        alpha=alpha,
        outer=oracle.Nesterov(0.4, 0.9),
    )


@pytest.mark.parametrize("tau", [(0, 2, 3), (1, 1, 4), (3, 0, 1)])
def test_streaming_with_a_delay_per_region(tau):
    keys = fragments(2)
    compare(
        lc.methods.streaming_diloco(5, 2, tau, 0.3, pattern=pattern(keys)),
        oracle.run_streaming,
        3,
        ADAMW,
        fragments=keys,
        period=5,
        overlap=list(tau),
        alpha=0.3,
        outer=oracle.Nesterov(0.4, 0.9),
    )


EAGER = {"period": 4, "outer": oracle.Nesterov(0.4, 0.9)}


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_eager(regions, skip):
    mask = absent(STEPS, regions) if skip else None
    compare(lc.methods.eager_diloco(4), oracle.run_eager, regions, participants=mask, **EAGER)


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
    who = {"participants": absent(steps, regions, away), "weights": weights}
    compare(lc.methods.eager_diloco(4), oracle.run_eager, regions, steps=steps, **who, **EAGER)


@pytest.mark.parametrize("first", ["empty", "blocking"])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_delayed(first, skip):
    method = lc.methods.delayed_diloco(4, first_round=first)
    mask = absent(STEPS, 3) if skip else None
    compare(method, oracle.run_dilocox_dense, 3, participants=mask, first_round=first, **EAGER)


@pytest.mark.parametrize("away", [(), ((12, 1),)])
def test_the_end_of_delayed(away):
    """At a boundary: what was sent there lands, also beside who has sat it out."""
    who = {"steps": 12, "participants": absent(12, 3, away)}
    compare(lc.methods.delayed_diloco(4), oracle.run_dilocox_dense, 3, **who, **EAGER)


@pytest.mark.parametrize("lam", [0.0, 0.5, 40.0])
@pytest.mark.parametrize("tau,syncs,regions", [(0, None, 3), (1, 5, 2), (2, 3, 3), (3, 3, 2)])
def test_cocodc(lam, tau, syncs, regions):
    keys, steps = fragments(3), 24
    how = {"syncs_per_period": syncs, "taylor": lam, "pattern": pattern(keys)}
    away = ((6, 1), (10, 0), *((12, r) for r in range(regions)))
    compare(
        lc.methods.cocodc(7, 3, tau, **how),
        oracle.run_cocodc,
        regions,
        steps=steps,
        participants=absent(steps, regions, away),
        fragments=keys,
        period=7,
        overlap=tau,
        lam=lam,
        syncs=syncs,
        outer=oracle.Nesterov(0.4, 0.9),
    )


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
    settings = {"alpha": 0.3, "beta": 0.6, "gamma": 0.8}
    # A round that nobody takes part in is one, too.
    groups = [lc.topology.Gossip(size, 5).groups(n, regions) for n in range(STEPS // 3 + 1)]
    state, *_ = compare(
        lc.methods.noloco(3, size, seed=5, **settings),
        oracle.run_noloco,
        regions,
        participants=None if rounds is None else absent(STEPS, regions, rounds),
        period=3,
        groups=groups,
        last_groups=groups[-1],
        **settings,
    )
    if size < regions:
        spread = max(np.ptp(x, axis=0).max() for x in anchors(state).values())
        assert spread > 1e-3, "anchors never differ"


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.33, 1.51, 0.75), (1.0, 4.0)])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dylu", "fixed"])
def test_async_local_sgd(speeds, dynamic):
    settings = {"momentum": 0.8, "c": 0.1, "dynamic": dynamic}
    method = lc.methods.async_local_sgd(5, speeds, learning_rate=0.6, **settings)
    settings |= {"period": 5, "speeds": speeds, "lr": 0.6}
    compare(method, oracle.run_async_local_sgd, len(speeds), ADAMW, steps=26, **settings)
