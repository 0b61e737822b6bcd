"""Channels inside the inner program: the same numbers on every way, bytes, clock, refusals."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import oracle_runs
import pytest
from compilations import compilations
from engine.collectives import sent_across, sized
from oracle_runs import started

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.channels import Channel, Everything, Sampled
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.exchange import entries
from lowcomm_jax.loops.channel_exchange import VALUES, ChannelExchange
from lowcomm_jax.methods import Method
from lowcomm_jax.network import replay, uniform
from lowcomm_jax.optimizers import InnerConfig, make_optimizer
from lowcomm_jax.planner.dry_run import rehearse
from lowcomm_jax.recovery.rejoin import rejoin_regions
from lowcomm_jax.schedule import Never, Staggered
from lowcomm_jax.state.leaves import state_leaves
from lowcomm_jax.state.train_state import with_inner

STEPS, R = 11, 3
# Delays, a main exchange, several sources, a channel that is seldom due and late.
METHODS = {
    "sparta": lambda: lc.methods.sparta(0.3, "partitioned", delay=2),
    "sparta_diloco": lambda: lc.methods.sparta(0.2, delay=3, period=5, codec="bf16"),
    "des_loc": lambda: lc.methods.des_loc(2, 3, 4),
    "late": lambda: Method(
        "late", Never(), None, channels=(Channel("x", every=3, delay=4, selection=Sampled(0.3)),)
    ),
    "replayed": lambda: Method(
        "replayed",
        Staggered(5),
        lc.outer.nesterov(0.7, 0.9),
        channels=(Channel("x", delay=3, selection=Sampled(0.5), codec="bf16", landing=REPLAY),),
    ),
}
MASK = np.array([[t % 4 != 1 or r != t % 3 for r in range(R)] for t in range(2 * STEPS + 1)])


def make(method, mesh=(1, 1, 1, 1), regions=R, **kwargs):
    mesh = lc.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    inner = (optax.contrib.adopt if method == "des_loc" else optax.adamw)(0.02)
    method = METHODS[method]() if isinstance(method, str) else method
    return started(method, regions, inner, mesh=mesh, block=4, **kwargs)


def stream(first=1, last=STEPS):
    return oracle_runs.stream(last, R, first)


def values(state):
    return {k: np.asarray(x) for k, x in state_leaves(state).items()}


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_run_equals_steps_bit_for_bit_and_compiles_once(name):
    engine, state = make(name)
    fast, history = engine.run(state, stream(), lambda t: MASK[t])
    told = [event.fetch() for event in history.events]
    state, events = engine.init(oracle.make_params()), []
    for t, batch in enumerate(stream(), 1):
        state, metrics = engine.step(state, batch, MASK[t])
        events += metrics["events"]
    same(values(fast), values(state))
    sizes = [{k: e[k] for k in ("kind", "step", "key", "participants")} for e in told]
    assert sizes == [{k: e.fetch()[k] for k in sizes[0]} for e in events]
    assert any(e["staleness"] != [-1] * R for e in told if e["kind"] == "land")

    def again():
        return engine.run(state, stream(), lambda t: MASK[t])[0].inner

    assert compilations(again) == 0


@pytest.mark.parametrize(("every", "delay"), [(2, 4), (2, 3)], ids=["with a send", "between sends"])
def test_payloads_that_are_under_way_together_land_when_each_is_due(every, delay):
    """Two of a slow channel, in blocks of four steps."""
    channel = Channel("x", every=every, delay=delay)
    assert channel.slots == 2
    engine, state = make(Method("m", Never(), None, channels=(channel,)))
    state, _ = engine.run(state, stream(), lambda t: MASK[t])
    run = oracle.run_channels(
        oracle.make_params(),
        oracle.make_batches(steps=STEPS, regions=R),
        inner=oracle.AdamW(0.02),
        exchanges=[oracle.Exchange("x", every=every, delay=delay)],
        participants=MASK[1 : STEPS + 1],
    )
    for name, value in lc.region_params(state).items():
        for r, tree in enumerate(run.last.locals):
            np.testing.assert_allclose(value[r], tree[name], rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (3, 1, 2, 1)])
def test_a_step_takes_the_place_of_the_state_that_it_is_given(mesh):
    def held(state):
        leaves = jax.tree.leaves((state.inner.params, state.inner.opt, state.channels))
        return [x for x in leaves if isinstance(x, jax.Array)]

    engine, state = make("sparta", mesh=mesh)
    given = held(state)
    placed = [x.sharding for x in given]
    state, _ = engine.step(state, next(iter(stream())))
    assert [x.sharding for x in held(state)] == placed
    assert all(x.is_deleted() for x in given)


def test_warm_compiles_what_run_calls():
    engine, state = make("sparta")
    before = values(state)
    state = engine.warm(state, stream()[0])
    same(values(state), before)
    jax.block_until_ready(state.inner)
    assert compilations(lambda: engine.run(state, stream())[0].inner) == 0


@pytest.mark.parametrize("name", ["sparta_diloco", "late", "replayed"])
def test_resuming_in_any_phase_is_the_same_run(name, tmp_path):
    """Saved after steps 4 and 7: payloads in flight, DiLoCo's round and the slots in mid-turn."""
    engine, state = make(name)
    halves = {}
    with Checkpoints(tmp_path) as checkpoints:
        for first, last in ((1, 4), (5, 7)):
            state, _ = engine.run(state, stream(first, last), lambda t: MASK[t])
            checkpoints.save(state, extra={}, config={}, method=engine.method)
            halves[last] = values(state)
            waits = [f.takes_part.any() for f in state.channels.values()]
            assert all(waits), "nothing is in flight"
        state, _ = engine.run(state, stream(8), lambda t: MASK[t])
        other, _ = make(name)
        for step, half in halves.items():
            params = oracle.make_params()
            found = checkpoints.restore(other, params, config={}, step=step)
            same(values(found.state), half)
            end, _ = other.run(found.state, stream(step + 1), lambda t: MASK[t])
            same(values(end), values(state))


@pytest.mark.parametrize("name", ["sparta_diloco", "replayed"])
def test_every_replica_mode_and_mesh_gives_the_same(name):
    engine, state = make(name)
    expected = values(engine.run(state, stream(), lambda t: MASK[t])[0])
    engine, state = make(name, (3, 1, 1, 1))
    same(values(engine.run(state, stream(), lambda t: MASK[t])[0]), expected)
    engine, state = make(name, replicas="vmap")
    for name, value in values(engine.run(state, stream(), lambda t: MASK[t])[0]).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_all_values_at_every_step_is_averaging_at_every_step():
    method = Method("all", Never(), None, channels=(Channel("all", selection=Everything()),))
    engine, state = make(method)
    averaged, there = make(lc.methods.local_sgd(1))
    for batch in stream():
        state, _ = engine.step(state, batch)
        there, _ = averaged.step(there, batch)
        for name, value in lc.region_params(there).items():
            np.testing.assert_allclose(lc.region_params(state)[name], value, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                lc.global_params(state)[name], value[0], rtol=1e-5, atol=1e-6
            )
    assert state.counters.bytes_sent.tolist() == there.counters.bytes_sent.tolist()


def test_leaves_whose_names_are_not_in_the_order_of_the_tree():
    """By name `a-b` comes before `a/x`, in the tree behind it; branches sort by name."""
    channel = Channel("x", every=2, delay=2, selection=Sampled(0.5))
    method = Method("m", Never(), None, channels=(channel,))
    params = {"a": {"x": np.zeros((3, 5), np.float32)}, "a-b": np.zeros(7, np.float32)}
    loss = lambda p, batch, rng: jnp.sum(p["a-b"]) * 0.0  # noqa: E731
    engine, state = started(method, 2, optax.sgd(0.0), loss, params)
    rng = np.random.default_rng(0)
    own = {
        k: rng.standard_normal(x.shape).astype(np.float32) for k, x in state.inner.params.items()
    }
    state = with_inner(state, params=jax.tree.map(jax.numpy.asarray, own))
    (one,) = engine.sync_loop(state).programs.family.exchanges
    chosen = dict(zip(one.shapes, map(np.asarray, one.indices(np.int32(0)))))
    assert list(chosen) == ["a/x", "a-b"]
    state, _ = engine.run(state, [np.zeros((2, 1), np.float32)] * 4)
    for name, index in chosen.items():
        before, index = own[name].reshape(2, -1), index[index < own[name][0].size]
        expected = before.copy()
        expected[:, index] = before[:, index].mean(axis=0)
        got = np.asarray(state.inner.params[name]).reshape(2, -1)
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=name)


def drawn_together(params, delay, landing):
    """What two regions come to whose entries are averaged at every step, by leaf."""
    channel = Channel("x", delay=delay, selection=Sampled(0.5), landing=landing)
    method = Method("m", Never(), None, channels=(channel,))
    loss = lambda p, batch, rng: sum(jnp.sum(x**2) for x in p.values()) * batch.mean()  # noqa: E731
    engine, state = started(method, 2, optax.sgd(0.1), loss, params)
    batches = [np.full((2, 1), t, np.float32) * [[1], [2]] for t in range(1, 6)]
    state, _ = engine.run(state, batches)
    return {k: np.asarray(x) for k, x in state.inner.params.items()}


@pytest.mark.parametrize("delay, landing", [(0, None), (2, None), (3, lc.landing.replay())])
def test_bands_of_a_large_leaf_are_as_leaves_of_their_own(delay, landing, monkeypatch):
    """Of at most 10 entries: the leaf of 3 x 5 has a band of two rows, and one of the last row."""
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    apart = drawn_together({"x0": x[:2], "x1": x[2:], "y": x[0]}, delay, landing)
    monkeypatch.setattr(entries, "LARGEST", 10)
    found = drawn_together({"x": x, "y": x[0]}, delay, landing)
    np.testing.assert_array_equal(found["x"], np.concatenate([apart["x0"], apart["x1"]], axis=1))
    np.testing.assert_array_equal(found["y"], apart["y"])


def test_rows_and_shares_that_no_index_reaches_are_refused():
    def refused(p, **shapes):
        method = lc.methods.sparta(p)
        like = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
        with pytest.raises(ValueError) as refusal:
            rehearse(method, like, 2).play()
        return str(refusal.value)

    long = refused(0.005, w=(2, 2**32))
    assert f"a row of 'w' has {2**32} entries, at most {2**31 - 2**15} can be chosen" in long
    many = refused(0.5, w=(2**10, 2**24))
    assert f"{2**33} entries would travel together" in many and "a smaller share" in many


# -- bytes and time -------------------------------------------------------------------------------


def test_the_spread_is_the_distance_of_a_regions_values_from_the_mean():
    """Everything is averaged after the first step; region 1 sits out and counts as 0."""

    def pushed(params, batch, rng):
        return params["w"] @ batch["x"].mean(0)

    method = Method("x", Never(), None, channels=(Channel("x", selection=Everything()),))
    start = {"w": np.float32([10.0, 20.0])}
    engine, state = started(method, R, optax.sgd(1.0), pushed, start)
    x = np.float32([[[1, -2]], [[7, 7]], [[3, 5]]])
    state, metrics = engine.step(state, {"x": x}, [True, False, True])
    apart = x[[0, 2], 0] - x[[0, 2], 0].mean(0)
    rms = np.sqrt((apart**2).mean(1))
    np.testing.assert_allclose(metrics["x_spread"], [rms[0], 0, rms[1]], rtol=1e-6)


def two_channels(**settings):
    pair = Channel("b", **settings), Channel("c", source="nu", **settings)
    return make(Method("x", Never(), None, channels=pair))


def test_events_of_a_channel_have_its_number():
    engine, state = two_channels(every=2, selection=Sampled(0.3), codec="bf16")
    state = engine.warm(state, stream(last=1)[0])
    state, history = engine.run(state, stream(last=2))
    told = [(e.kind, e.channel, e.fragment) for e in history.events]
    first = told[0][2]
    assert told == [
        (kind, name, first + number)
        for kind in ("send", "land")
        for number, name in enumerate("bc")
    ]


def test_channels_draw_their_entries_apart():
    engine, state = two_channels(selection=Sampled(0.3))
    a, b = (one.indices(0) for one in engine.sync_loop(state).programs.family.exchanges)
    assert any((np.asarray(x) != np.asarray(y)).any() for x, y in zip(a, b))


def test_on_tpus_values_travel_in_whole_lanes_and_come_back_as_they_were():
    """Three values in two regions, widened to the lanes of two devices."""
    widths, parts = [], np.float32([[1, 2, 3], [5, 7, 9]])
    tpus = np.array([types.SimpleNamespace(platform="tpu")] * 2)
    mesh = types.SimpleNamespace(devices=tpus, size=2)

    def reduce(payload, weight_R, like):
        widths.append((like[VALUES].shape, payload[VALUES].shape))
        mean = (weight_R @ payload[VALUES] / weight_R.sum())[None]
        return types.SimpleNamespace(mean={VALUES: mean})

    one = types.SimpleNamespace(
        regions=types.SimpleNamespace(mesh=mesh, slots=2),
        whole=False,
        exchange=types.SimpleNamespace(codec=None, reduce=reduce),
        like={VALUES: jax.ShapeDtypeStruct((3,), np.float32)},
        _lies=None,
    )
    mean = ChannelExchange._reduce(one, {VALUES: parts}, np.float32([1, 3]))
    np.testing.assert_array_equal(mean[VALUES], [[4, 5.75, 7.5]])
    assert widths == [((256,), (2, 256))]


def test_bytes_are_those_of_the_values():
    """Of 15, 7, 12 and 1 values 4, 2, 3 and 1 travel, in strata of 4; bf16 in 3 slices of 4."""
    for codec, nbytes in ((None, 4 * 10), ("bf16", 2 * 12)):
        engine, state = make(lc.methods.sparta(0.25, codec=codec, delay=1))
        state, history = engine.run(state, stream())
        sent = [e for e in history.events if e.kind == "send"]
        assert [e.step for e in sent] == list(range(1, STEPS + 1))
        assert {e.nbytes for e in sent} == {nbytes}
        buffers = jax.tree.leaves(state.channels["sparta"].payload)
        assert sum(x.nbytes for x in buffers) == R * nbytes  # one slot
        each = sum(e.bytes_sent for e in sent)
        assert state.counters.bytes_sent.tolist() == each.tolist()
        assert each[0] == STEPS * round(2 * nbytes * (R - 1) / R)


# Two-dimensional leaves are cut over both axes inside a region, as a transformer's are.
WIDE = {"up": (64, 128), "down": (128, 64), "norm": (64,)}
SPECS = {"up": jax.P("fsdp", "tensor"), "down": jax.P("tensor", "fsdp")}


def wide_loss(params, batch, rng):
    del rng
    hidden = jax.numpy.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jax.numpy.mean((hidden + params["norm"][None] - batch["x"]) ** 2)


@pytest.mark.parametrize("delay", [0, 1])
def test_nothing_but_selected_values_crosses_regions(delay):
    devices, p = 4, 1 / 64
    mesh = lc.make_mesh(2, 1, 2, 2, devices=jax.devices()[:8])
    engine = lc.Engine(
        wide_loss, optax.sgd(0.1), lc.methods.sparta(p, delay=delay), 2, mesh=mesh,
        specs=lambda name, leaf: SPECS.get(name, jax.P()),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    state = engine.init({k: rng.standard_normal(s).astype(np.float32) for k, s in WIDE.items()})
    batch = {"x": rng.standard_normal((2, 4, 64)).astype(np.float32)}
    loop = engine.sync_loop(state)
    flights = tuple(f.on_devices for f in state.channels.values()) or ((),)
    placed = engine.place(jax.tree.map(lambda x: x[:, None], batch))
    masks = np.ones((2, 1), bool)
    given = ((state.inner, flights), state.frozen, placed, engine.region_keys)
    given += (masks, (masks,), np.ones(2, np.float32), np.int32(0), np.int32(1))
    found = sized(loop.programs.family.channel_program.lower(*given).compile().as_text())
    state, metrics = engine.step(state, batch)
    booked = metrics["events"][0].bytes_sent
    assert booked[0] == 4 * (128 + 128 + 1)
    # The program of a step contains one exchange; it pads to whole slices, one a device and slot.
    sent = sent_across(found, devices, 2)
    assert (sent >= booked).all() and (sent <= booked + 4 * devices * 4).all(), (sent, booked)
    # The inner step gathers leaves inside a region; the channel alone moves selected values there.
    (one,), everyone = loop.programs.family.exchanges, np.ones(2, bool)
    alone = ((state.inner.params, {}), np.int32(0), everyone, np.ones(2, np.float32), everyone)
    moved = sized(jax.jit(one.average).lower(*alone).compile().as_text())
    assert max(c.nbytes for c in moved) <= 4 * 4 * 257, "a leaf was gathered inside a region"


def test_the_clock_waits_for_channels_and_replays():
    """One exchange of 10 values takes a second on these links; steps take half a second."""
    links = uniform(R, 8 * 40 * 2 / R / 1e9, delay_s=0.0, compute_s=0.5)
    for delay, wait in ((0, 1.0), (1, 0.5), (2, 0.0)):
        engine, state = make(lc.methods.sparta(0.25, delay=delay), network=links)
        state, history = engine.run(state, stream())
        clock = replay(links, list(history.rows()))
        landed = STEPS - delay
        if delay < 2:
            assert clock.now_R == pytest.approx([STEPS * 0.5 + landed * wait] * R, rel=0.02)
        np.testing.assert_allclose(engine.clock.now_R, clock.now_R)
        booked = engine.clock.ledger.sent_R()
        np.testing.assert_allclose(booked, state.counters.bytes_sent, atol=STEPS)


# -- the end, and who comes back ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparta", "sparta_diloco"])
def test_finishing_twice_is_finishing_once(name):
    engine, state = make(name)
    state, _ = engine.run(state, stream())
    assert any(f.takes_part.any() for f in state.channels.values())
    state = engine.finish(state)
    once = values(state)
    model = lc.global_params(state)
    for key, value in lc.region_params(state).items():
        np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape))
        np.testing.assert_allclose(model[key], value[0], rtol=1e-6)
    assert not any(f.takes_part.any() for f in state.channels.values())
    same(values(engine.finish(state)), once)


def test_the_last_mean_is_that_of_those_who_take_part():
    engine, state = make("sparta", weights=[0.2, 0.5, 0.3])
    state, _ = engine.run(state, stream())
    before = lc.region_params(state)
    state = engine.finish(state, lambda _: [True, False, True])
    for name, value in lc.region_params(state).items():
        wanted = 0.4 * np.float64(before[name][0]) + 0.6 * np.float64(before[name][2])
        np.testing.assert_allclose(value, np.broadcast_to(wanted, value.shape), rtol=1e-5)


def test_a_region_that_comes_back_starts_from_the_mean():
    engine, state = make("sparta")
    fresh = jax.tree.map(np.array, state)
    state, _ = engine.run(state, stream(last=4))
    before, model = values(state), jax.tree.map(np.array, lc.global_params(state))
    comes = np.array([False, True, False])
    back = rejoin_regions(engine.sync_loop(state), state, fresh, comes)
    for name, value in lc.region_params(back).items():
        np.testing.assert_allclose(value[1], model[name], rtol=1e-6)
        np.testing.assert_array_equal(value[0], before[f"inner/params/{name}"][0])
    assert back.channels["sparta"].takes_part.any(axis=1).tolist() == [True, False, True]


# -- refusals -------------------------------------------------------------------------------------

HALF = Sampled(0.5)
REPLAY = lc.landing.replay()


def landing(**settings):
    channel = Channel("a", **{"delay": 1, "landing": REPLAY, **settings})
    return lambda: Method("m", Never(), None, channels=(channel,))


def needy(progress, state, params=None, *, fragment, **extra):
    return progress, state


REFUSED = {
    "landing: the rule has a state": landing(landing=lc.landing.taylor_delay_correction()),
    "landing: source='nu' is no parameter": landing(source="nu"),
    "landing: without a delay": landing(delay=0),
    "use delay=2 or less": landing(every=2, delay=3),
    "landing='replay': give an Optax transform": landing(landing="replay"),
    "channel a: landing: update(progress, state, params=None, *, fragment": landing(
        landing=optax.GradientTransformationExtraArgs(lambda params: (), needy)
    ),
    "channel a: landing: the result at ['values']": landing(
        landing=optax.stateless(lambda u, params: jax.tree.map(jnp.sum, u))
    ),
    "every=0": lambda: Method("m", Never(), None, channels=(Channel("a", every=0),)),
    "delay=-1": lambda: Method("m", Never(), None, channels=(Channel("a", delay=-1),)),
    "selection='all'": lambda: lc.methods.sparta(0.1, "all"),
    "landing='sum': choose one of mean, replay": lambda: lc.methods.sparta(
        0.1, delay=1, landing="sum"
    ),
    "remembers what it has sent": lambda: lc.methods.sparta(
        0.1, codec={"name": "int4", "error_feedback": 0.9}
    ),
    "codec low_rank": lambda: Method(
        "m", Never(), None, channels=(Channel("a", codec=compression.make("low_rank", rank=2)),)
    ),
    "replaced: use one that sends all": lambda: lc.methods.sparta(
        0.1, codec=compression.make("topk", k=8)
    ),
    "without period": lambda: lc.methods.sparta(0.1, outer=lc.outer.sgd(1.0)),
    "source='params' stands in 2": lambda: Method(
        "m", Never(), None, channels=(Channel("a"), Channel("b", selection=HALF))
    ),
    "several fragments": lambda: Method(
        "m", Staggered(4, 2), lc.outer.average(), channels=(Channel("a", delay=1),)
    ),
    "use signal='progress'": lambda: Method(
        "m", Staggered(1), None, signal="gradient", channels=(Channel("a"),)
    ),
}


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int4", "stat4", "e3m0", "sign"])
def test_codecs_that_send_every_entry_are_taken(name):
    assert Channel("a", codec=compression.make(name)).violations() == []


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line):
    with pytest.raises(ValueError) as error:
        make(REFUSED[line]())
    assert line in str(error.value)


def test_refused_by_the_engine():
    with pytest.raises(ValueError, match="concurrent_exchange: sparta exchanges inside"):
        make("sparta", concurrent_exchange=True)
    engine, state = make("sparta")
    with pytest.raises(ValueError, match="leave microbatch= out"):
        engine.run(state, stream(), microbatch=2)


def tiny(*channels, **kwargs):
    method, start = Method("m", Never(), None, channels=channels), {"w": np.zeros(64, np.float32)}
    return started(method, R, optax.contrib.adopt(0.1), params=start, **kwargs)


def test_an_adopted_anchor_takes_the_place_of_parameters_in_flight_alone():
    """Moments in flight are no older than those that the region keeps; they land."""
    engine, state = tiny(Channel("x", delay=2), Channel("m", source="mu", delay=2))
    under_way = {
        name: dataclasses.replace(f, takes_part=np.ones((R, 2), bool))
        for name, f in state.channels.items()
    }
    loop = engine.sync_loop(state)
    after = loop.adopted(state.replace(channels=under_way), np.array([False, True, True]))
    assert after.channels["x"].takes_part.tolist() == [[True] * 2, [False] * 2, [False] * 2]
    assert after.channels["m"].takes_part.all()


def test_which_entries_travel_is_drawn_by_the_seed_of_the_run():
    drawn = []
    for seed in (0, 1):
        engine, state = tiny(Channel("x", selection=Sampled(0.25)), seed=seed)
        (one,) = engine.sync_loop(state).programs.family.exchanges
        drawn.append(np.asarray(one.indices(0)[0]).tolist())
    assert drawn[0] != drawn[1]


def rare_rows(inner, method, steps):
    """Largest magnitude in a table of which each region sees rows of its own."""

    def loss_of_rows(params, batch, rng):
        del rng
        return jnp.mean((params["rows"][batch["row"]].sum(axis=-1) - 1.0) ** 2)

    start = {"rows": np.full((2 * R, 2), 0.1, np.float32)}
    engine, state = started(method, R, inner, loss_of_rows, start)
    draw = np.random.default_rng(0)
    own = [
        {"row": np.stack([draw.integers(2 * r, 2 * r + 2, 3) for r in range(R)])}
        for _ in range(steps)
    ]
    state, _ = engine.run(state, own)
    return float(np.abs(lc.region_params(state)["rows"]).max())


ADAMS = {
    "adam": optax.adam(0.01),
    "a warm-up from 0": optax.adamw(optax.linear_schedule(0.0, 0.01, 100)),
    "behind a clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
    "of a run's config": make_optimizer(InnerConfig(warmup_steps=0), 30),
}


@pytest.mark.parametrize("name", ADAMS)
def test_first_moments_that_travel_without_the_second_are_refused_under_adam(name):
    with pytest.raises(ValueError) as error:
        rare_rows(ADAMS[name], lc.methods.des_loc(2), 1)
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith("- channel mu: averages first moments every 6 steps without the second")
    assert "(channels of those: nu every 12)" in line
    assert "optax.contrib.adopt" in line and "des_loc: second=first" in line


def test_and_what_the_refusal_names_keeps_rows_that_a_region_has_not_seen():
    """AdamW with the second moments six steps behind brought one of them to thousands."""
    assert rare_rows(optax.contrib.adopt(0.01), lc.methods.des_loc(2), 40) < 1
    assert rare_rows(optax.adam(0.01), lc.methods.des_loc(2, 4, 4), 40) < 1
    assert rare_rows(optax.adam(0.01), lc.methods.des_loc(2, 8, 4), 1) < 1


def test_a_momentum_may_travel_alone():
    channels = (Channel("m", source="trace"),)
    method = Method("m", Never(), None, channels=channels)
    assert rare_rows(optax.sgd(0.01, momentum=0.9), method, 4) < 1
