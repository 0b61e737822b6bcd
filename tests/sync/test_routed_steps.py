"""Random routing in the books: bytes and seconds of what crosses regions inside a step."""

import itertools
import re

import jax
import numpy as np
import optax
import pytest
from engine.collectives import groups

import lowcomm_jax as lc
from lowcomm_jax.mesh.pipeline_paths import Hop, Paths
from lowcomm_jax.models import Pipeline, TransformerConfig, build
from lowcomm_jax.network import replay, uniform
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.refusals import microbatch_problems
from lowcomm_jax.sync.routed_steps import RoutedSteps, route_event

R, S, M, STEPS, SEED = 3, 2, 2, 3, 7
WAYS = list(itertools.permutations(range(R)))
BATCH, LENGTH, WIDTH = 4, 6, 16
ACTIVATION, LABELS = BATCH // M * LENGTH * WIDTH * 4, BATCH // M * LENGTH * 8
NETWORK = uniform(R, 0.01, 0.005, compute_s=0.25)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def walked(ways_TxBxR, microbatches, activation, labels):
    """Bytes on every directed link: each microbatch followed there, its gradients back."""
    _, boundaries, regions = ways_TxBxR.shape
    links = np.zeros((regions, regions), int)
    for start in range(regions):
        for m in range(microbatches):
            here = start
            for s in range(boundaries):
                there = ways_TxBxR[m + s, s, here]
                links[here, there] += activation + labels
                links[there, here] += activation
                here = there
    return links * (1 - np.eye(regions, dtype=int))


@pytest.mark.parametrize(
    "shape", [(3, 4, 2), (4, 3, 5), (2, 2, 1), (3, 1, 2), (1, 2, 2), (8, 3, 4)]
)
def test_hops_are_those_of_every_microbatch_on_its_path(shape):
    paths = Paths(*shape)
    for seed in range(5):
        row_T = np.random.default_rng(seed).integers(0, len(paths.table), paths.ticks)
        links, hops = np.zeros((shape[0], shape[0]), int), paths.hops(row_T, 100, 3)
        for ways, nbytes in hops:
            for way in ways:
                for r, target in enumerate(way):
                    links[r, target] += nbytes * (r != target)
        np.testing.assert_array_equal(links, walked(paths.table[row_T], shape[2], 100, 3))
        sent = route_event(1, hops, shape[0])
        np.testing.assert_array_equal(sent.bytes_sent, links.sum(1))
        np.testing.assert_array_equal(sent.bytes_received, links.sum(0))
        assert sent.nbytes == links.sum(1).max()


def drawn(step):
    """The permutations of a 1-based step, from the seed alone; `[T, 1, R]`."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), 0), step - 1)
    row_T = jax.random.randint(key, (M + S - 1,), 0, len(WAYS))
    return np.array(WAYS)[np.asarray(row_T)][:, None]


def engine_of(method, **settings):
    config = TransformerConfig(
        vocab_size=41,
        layers=2,
        width=WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp_width=24,
        layer_loop="scan",
    )
    pipe = Pipeline(build(config), lc.make_mesh(R, S), M, routed=True)
    params = jax.jit(pipe.init)(jax.random.key(0))
    specs = {
        path_name(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(pipe.specs(params))
    }
    engine = lc.Engine(
        pipe.loss_fn,
        optax.adamw(1e-2),
        method,
        R,
        specs=lambda name, leaf: specs[name],
        stacked=("blocks",),
        seed=SEED,
        **{"mesh": pipe.mesh, "hops": pipe.hops, "network": NETWORK, "block": 2, **settings},
    )
    return engine, params


def batches(steps=STEPS):
    rng = np.random.default_rng(0)
    return [
        {"tokens": rng.integers(0, 41, (R, BATCH, LENGTH + 1)).astype(np.int32)}
        for _ in range(steps)
    ]


@pytest.fixture(scope="module")
def run():
    with jax.numpy_dtype_promotion("standard"):
        engine, params = engine_of(lc.methods.noloco(10))
        state, history = engine.run(engine.init(params), batches())
        return engine, state, history


def expected_links(steps=STEPS):
    each = [walked(drawn(t), M, ACTIVATION, LABELS) for t in range(1, steps + 1)]
    assert any(links.any() for links in each)
    return sum(each)


def test_bytes_are_booked_per_region_step_and_link(run):
    engine, state, history = run
    links = expected_links()
    np.testing.assert_array_equal(state.counters.bytes_sent, links.sum(1))
    np.testing.assert_array_equal(state.counters.bytes_received, links.sum(0))
    booked = engine.clock.ledger.links("activations")
    assert {pair: n for pair, n in booked.items() if n} == {
        (int(a), int(b)): links[a, b] for a, b in zip(*np.nonzero(links))
    }
    rows = list(history.rows())
    assert [[event["kind"] for event in row["events"]] for row in rows] == [["route"]] * STEPS
    for row in rows:
        one = walked(drawn(row["step"]), M, ACTIVATION, LABELS)
        assert row["events"][0]["bytes_sent"] == one.sum(1).tolist()
    # Some permutation leaves a region where it is, which then sends nothing.
    assert (links.sum(1) != links.sum(1)[0]).any()


def test_the_clock_waits_for_every_hop(run):
    engine, _, history = run
    now_R = np.zeros(R)
    for step in range(1, STEPS + 1):
        now_R += 0.25
        ways = drawn(step)[:M, 0]  # the last tick hands on nothing: S - 1 = 1
        there = [(way, ACTIVATION + LABELS) for way in ways]
        for way, nbytes in [*there, *((np.argsort(way), ACTIVATION) for way in ways[::-1])]:
            moved = way != np.arange(R)  # one ring: of 3 regions at most one stays
            taken = 0.005 + nbytes / (0.01 * 1e9 / 8)
            now_R[moved] = now_R[moved].max(initial=0.0) + taken
    np.testing.assert_allclose(engine.clock.now_R, now_R)
    # A finished run can be replayed from its metrics alone.
    again = replay(NETWORK, history.rows(), seed=SEED)
    np.testing.assert_array_equal(again.now_R, engine.clock.now_R)
    np.testing.assert_array_equal(again.ledger.sent_R(), engine.clock.ledger.sent_R())


def test_the_compiled_step_moves_what_is_booked(run):
    """Every transfer the program holds is one of a hop; which of them run, the seed says."""
    engine, state, _ = run
    block = engine.sync_loop(state).programs.inner_program
    staged = engine.place(jax.tree.map(lambda *x: np.stack(x, 1), *batches(2)))
    given = (state.inner, state.frozen, staged, engine.region_keys, None, np.int32(2))
    text = block.lower(*given).compile().as_text()
    found = set()
    for line in text.splitlines():
        match = re.search(r"= (\w+)\[([\d,]*)\]\S* collective-permute\(", line)
        pairs = match and [(a // S, a % S, b // S, b % S) for a, b in groups(line)]
        if not pairs or all(here == there for here, _, there, _ in pairs):
            continue
        size = int(np.prod([int(n) for n in match.group(2).split(",")]))
        found.add((tuple(sorted(pairs)), 4 * size))
    expected = set()
    for way in WAYS[1:]:
        there = tuple((r, 0, way[r], 1) for r in range(R))
        back = tuple(sorted((way[r], 1, r, 0) for r in range(R)))
        expected |= {(there, ACTIVATION), (there, LABELS), (back, ACTIVATION)}
    assert found == expected


def test_every_part_of_a_step_has_its_own_paths(run):
    engine, state, _ = run
    asked = []

    def hops(batch, keys_N):
        asked.append(batch["tokens"].shape)
        return [[Hop(((1, 2, 0),), int(n))] for n in np.asarray(jax.random.key_data(keys_N))[:, 0]]

    booked = RoutedSteps(hops, SEED, 2, R).book
    staged = {"tokens": np.zeros((R, 8, BATCH, LENGTH + 1), np.int32)}
    after, events = booked(state, range(300, 302), staged, ["later"])
    assert asked == [(BATCH // 2, LENGTH + 1)] and events[-1] == "later"
    total = 0
    for step, event in zip((300, 301), events):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), 0), step - 1)
        parts = [int(jax.random.key_data(jax.random.fold_in(key, i))[0]) for i in range(2)]
        assert [hop.nbytes for hop in event.hops] == parts and event.step == step
        total += sum(parts)
    np.testing.assert_array_equal(
        after.counters.bytes_sent - state.counters.bytes_sent, [total] * R
    )
    assert microbatch_problems(engine.setup, [2])[0].startswith("hops: regions that route")
