"""SPARTA and DES-LOC against their NumPy re-derivation: three regions, different data, absences."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel, Everything, Partitioned, Sampled, Shuffled
from lowcomm_jax.methods import Method
from lowcomm_jax.schedule import Never
from lowcomm_jax.state.train_state import with_inner

STEPS, R = 13, 3
SGD = (oracle.Momentum(0.05, 0.8), optax.sgd(0.05, momentum=0.8))
ADAMW = (oracle.AdamW(0.02), optax.adamw(0.02))
ADOPT = (oracle.Adopt(0.02), optax.contrib.adopt(0.02))
# (step, region), 1-based: one and then another; two at once; nobody at all.
ABSENT = ((3, 1), (4, 0), (6, 1), (6, 2), (9, 0), (9, 1), (9, 2), (12, 2))


def absent():
    mask = np.ones((STEPS, R), bool)
    for step, region in ABSENT:
        mask[step - 1, region] = False
    return mask


def train(method, inner, mask=None, start=None, **kwargs):
    """(finished state, [(regions' values, events) of every step], batches, engine's loop)."""
    engine, state = started(method, R, inner, **kwargs)
    loop = engine.sync_loop(state)
    batches, seen = oracle.make_batches(steps=STEPS, regions=R), []
    for t in range(1, STEPS + 1):
        now = None if mask is None else mask[t - 1]
        state, metrics = engine.step(state, oracle.step_batch(batches, t), now)
        given = jax.tree.map(np.array, lc.region_params(state))
        seen.append((given, jax.tree.map(np.array, lc.global_params(state)), metrics["events"]))
    return engine.finish(state), seen, batches, loop


def entries_of(loop, which=0):
    """The entries that a channel selects, as the oracle takes them."""
    one = loop.programs.family.exchanges[which]
    chosen = jax.jit(one.indices)

    def entries(number):
        indices = map(np.asarray, chosen(np.int32(number)))
        named = zip(one.shapes.items(), indices)
        return {name: index[index < np.prod(x.shape, dtype=int)] for (name, x), index in named}

    return entries


def close(actual, expected, name):
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=3e-6, err_msg=name)


def check_locals(seen, run):
    for t, (local, *_) in enumerate(seen, 1):
        for key in local:
            for r, tree in enumerate(run.at(t).locals):
                close(local[key][r], tree[key], f"step {t} region {r} {key}")


def check(state, seen, run, anchored):
    check_locals(seen, run)
    for t, (_, model, _) in enumerate(seen, 1):
        want = run.at(t)
        for key in model:
            mean = np.mean([tree[key] for tree in want.locals], axis=0)
            close(model[key], want.anchors[0][key] if anchored else mean, f"step {t} model {key}")
    for key, value in lc.region_params(state).items():
        for r in range(R):
            close(value[r], run.finished.anchors[0][key], f"finished {r} {key}")
        close(lc.global_params(state)[key], run.finished.anchors[0][key], f"handed out {key}")


def told(seen):
    """(step, what, staleness, who) of the channels' events."""
    return [
        (
            e.step,
            f"{e.kind} {e.channel}",
            max(0, int(e.staleness.max())),
            *np.flatnonzero(e.participants),
        )
        for *_, events in seen
        for e in events
        if e.channel is not None
    ]


def expected(run):
    return [(e.step, e.kind, e.staleness, *e.regions) for e in run.events]


CASES = [
    # selection, delay, period, inner, absences, weights, landing
    ("sampled", 0, None, SGD, True, None, "mean"),
    ("shuffled", 2, None, ADAMW, True, [0.2, 0.5, 0.3], "mean"),
    ("partitioned", 3, 4, SGD, True, None, "mean"),
    ("sampled", 1, 5, ADAMW, False, None, "mean"),
    ("sampled", 2, None, ADAMW, True, [0.2, 0.5, 0.3], "replay"),
    ("sampled", 3, 4, SGD, True, None, "replay"),
]


@pytest.mark.parametrize("selection,delay,period,inner,skip,weights,landing", CASES)
def test_sparta(selection, delay, period, inner, skip, weights, landing):
    method = lc.methods.sparta(0.3, selection, delay, period, landing=landing)
    mask = absent() if skip else None
    kwargs = {} if weights is None else {"weights": weights}
    state, seen, batches, loop = train(method, inner[1], mask, **kwargs)
    run = oracle.run_channels(
        oracle.make_params(),
        batches,
        inner=inner[0],
        exchanges=[
            oracle.Exchange(
                "sparta", delay=delay, entries=entries_of(loop), replay=landing == "replay"
            )
        ],
        period=period,
        outer=oracle.Nesterov(0.7, 0.9),
        participants=mask,
        weights=weights,
        finish=True,
    )
    if weights is None:
        check(state, seen, run, anchored=period is not None)
    else:
        check_locals(seen, run)
    assert told(seen) == expected(run)
    for t in range(1, STEPS + 1):  # the mean of all would hide a selection that never matters
        free = [tree["a"] for tree in run.at(t).locals]
        if t not in (period, 2 * (period or 0)):
            assert np.ptp(free, axis=0).max() > 1e-3


def pulled(method, regions, size):
    """An engine whose regions' gradients are what the batch says, and its first state, of zeros."""

    def loss(w, batch, rng):
        return jax.numpy.sum(w * batch[0])

    return started(method, regions, optax.sgd(1.0), loss, np.zeros(size, np.float32))


def test_a_landing_changes_what_is_kept_and_no_byte():
    """Regions that never agree on a gradient: the mean's progress in flight is kept, or lost."""
    pull = np.float32([[[1.0] * 40], [[3.0] * 40]])
    made, sent = {}, {}
    for landing in ("mean", "replay"):
        method = lc.methods.sparta(0.25, "shuffled", delay=2, landing=landing)
        engine, state = pulled(method, 2, 40)
        state, history = engine.run(state, [pull] * 12)
        made[landing] = float(jax.numpy.mean(lc.global_params(state)))
        sent[landing] = [(e.step, e.kind, e.nbytes) for e in history.events]
    assert sent["mean"] == sent["replay"]
    # Each step is worth -2 on average. Ten payloads have landed, each of a quarter of the entries,
    # and each has dropped the two steps that were made while it travelled.
    np.testing.assert_allclose(made["replay"], -2 * 12, rtol=1e-6)
    np.testing.assert_allclose(made["mean"], -2 * (12 - 10 * 0.25 * 2), rtol=1e-6)


REPLAYED = [
    # selection, every, delay, inner, absences, weights
    (Sampled(0.5), 1, 3, SGD, True, None),  # an entry is often drawn again before it lands
    (Partitioned(0.3), 1, 4, ADAMW, True, [0.2, 0.5, 0.3]),
    (Shuffled(0.3), 2, 3, SGD, False, None),
    (Everything(), 3, 2, ADAMW, True, None),
]


@pytest.mark.parametrize("selection,every,delay,inner,skip,weights", REPLAYED)
def test_a_channel_that_lands_by_a_rule(selection, every, delay, inner, skip, weights):
    """mean + (now - sent); an entry that is under way is not drawn."""
    channel = Channel("x", "params", every, delay, selection, landing=lc.landing.replay())
    mask = absent() if skip else None
    kwargs = {} if weights is None else {"weights": weights}
    method = Method("x", Never(), None, channels=(channel,))
    _, seen, batches, loop = train(method, inner[1], mask, **kwargs)
    entries = None if isinstance(selection, Everything) else entries_of(loop)
    given = {"inner": inner[0], "participants": mask, "weights": weights}

    def run(entries, replay):
        exchange = oracle.Exchange("x", every=every, delay=delay, entries=entries, replay=replay)
        return oracle.run_channels(oracle.make_params(), batches, exchanges=[exchange], **given)

    check_locals(seen, run(entries, True))
    assert told(seen) == expected(run(entries, True))
    with pytest.raises(AssertionError):
        check_locals(seen, run(entries, False))  # what a channel without a rule does


def test_a_blend_of_a_channel_by_hand():
    """T(u) = alpha (u - D): halfway between what a region has and the mean of what was sent."""
    channel = Channel("x", every=2, delay=1, landing=lc.landing.blend(0.25))
    engine, state = pulled(Method("x", Never(), None, channels=(channel,)), 2, 1)
    state, _ = engine.run(state, [np.float32([[[1.0]], [[3.0]]])] * 3)
    # Sent after step 2: -2 and -6, mean -4. After step 3 the regions are at -3 and -9.
    expected = [[0.25 * -3 + 0.75 * -4], [0.25 * -9 + 0.75 * -4]]
    np.testing.assert_allclose(lc.region_params(state), expected, rtol=1e-6)


def test_a_region_that_was_left_out_lands_on_the_mean_itself():
    """It has a NaN in one entry; in all of them there is nothing that it could add."""
    channel = Channel("x", every=2, delay=1, landing=lc.landing.replay())
    engine, state = pulled(Method("x", Never(), None, channels=(channel,)), 3, 2)
    pull = np.float32([[[1, 1]], [[3, 3]], [[5, 5]]])
    state, _ = engine.step(state, pull)
    ((name, value),) = state.inner.params.items()
    state = with_inner(state, params={name: value.at[1, 1].set(np.nan)})
    state, metrics = engine.step(state, pull)
    assert np.asarray(metrics["x_left_out"]).tolist() == [0, 1, 0]
    state, _ = engine.step(state, np.ones((3, 1, 2), np.float32))
    # The others sent -2 and -10, and have made -1 since.
    np.testing.assert_allclose(lc.region_params(state), [[-7, -7], [-6, -6], [-7, -7]], rtol=1e-6)


@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_des_loc(skip):
    mask = absent() if skip else None
    state, seen, batches, _ = train(lc.methods.des_loc(2, 3, 4), ADOPT[1], mask)
    run = oracle.run_channels(
        oracle.make_params(),
        batches,
        inner=ADOPT[0],
        exchanges=[
            oracle.Exchange("params", every=2),
            oracle.Exchange("mu", source="m", every=3),
            oracle.Exchange("nu", source="v", every=4),
        ],
        participants=mask,
        finish=True,
    )
    check(state, seen, run, anchored=False)
    assert [e for e in told(seen) if e[1].startswith("send")] == [
        e for e in expected(run) if e[1].startswith("send")
    ]
    without = oracle.run_channels(
        oracle.make_params(), batches, inner=ADOPT[0], participants=mask,
        exchanges=[oracle.Exchange("params", every=2)],
    )  # fmt: skip
    apart = np.abs(run.last.locals[0]["a"] - without.last.locals[0]["a"]).max()
    assert apart > 1e-3, "averages of moments change nothing, so this test could not fail"


def test_paces_of_des_loc():
    assert [c.every for c in lc.methods.des_loc(5).channels] == [5, 15, 30]


@pytest.mark.parametrize("delay", [0, 2])
def test_values_that_are_not_finite_do_not_count(delay):
    """A region with a NaN in a selected entry is left out, and takes the mean over."""
    engine, state = started(lc.methods.sparta(0.3, "shuffled", delay), R, optax.sgd(0.0))
    chosen = entries_of(engine.sync_loop(state))(0)["a"]
    values = np.arange(3 * 15, dtype=np.float32).reshape(3, 3, 5)
    values[1].reshape(-1)[chosen[0]] = np.nan
    params = {**state.inner.params, "a": jax.numpy.asarray(values)}
    state = with_inner(state, params=params)
    for batch in stream(1 + delay, R):
        state, metrics = engine.step(state, batch)
    left_out = np.asarray(metrics["sparta_left_out"])
    got = np.asarray(lc.region_params(state)["a"]).reshape(3, -1)
    mean = (values[0].reshape(-1) + values[2].reshape(-1)) / 2
    np.testing.assert_allclose(got[:, chosen], np.stack([mean[chosen]] * 3), rtol=1e-6)
    assert left_out.tolist() == ([0, 1, 0] if delay == 0 else [0, 0, 0])
