"""Gossip on device meshes: the same bits everywhere, traffic between partners and no one else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from engine.collectives import collectives
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.exchange import GroupExchange, MeshExchange, shares
from lowcomm_jax.exchange.pairs import Draw, _relative, _weighted_mean, plan_permutes
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.rules.topology import Gossip, member_table
from lowcomm_jax.sync.round_functions import (
    Adoption,
    AnchorState,
    Contributions,
    LandingTarget,
    RegionState,
    Senders,
    Values,
)

R = 8
ROUND = 5


def regions_on(slots, inner=1):
    devices = jax.devices()[: slots * inner]
    return Regions(R, lc.make_mesh(region=slots, fsdp=inner, devices=devices))


# -- who sends what, on the host ------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_planned_transfers_bring_every_row_where_it_is_needed(slots, size):
    rows, gossip = R // slots, Gossip(size, 3)
    for number in range(gossip.count(R)):
        members = member_table(gossip.partition(number, R), size)
        made = plan_permutes(members, slots)
        pools = [list(range(s * rows, (s + 1) * rows)) for s in range(slots)]
        for turn, pairs in enumerate(made.pairs):
            assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
            got = {b: a * rows + made.send[turn, a] for a, b in pairs}
            for slot in range(slots):
                pools[slot].append(got.get(slot))
        for region, wanted in enumerate(members):
            slot, row = divmod(region, rows)
            found = [pools[slot][i] for i in made.take[slot, row]]
            assert found == [region if m < 0 else m for m in wanted]
        needed = {(m, r // rows) for r in range(R) for m in members[r] if m >= 0}
        crossing = {(m, slot) for m, slot in needed if m // rows != slot}
        assert sum(map(len, made.pairs)) == len(crossing), "a row travels once to a slot"
        if size == 2 and slots == R:
            assert len(made.pairs) == 1, "partners exchange in one go"


# -- means ----------------------------------------------------------------------------------------


def values():
    rng = np.random.default_rng(1)
    anchor = {"a": rng.standard_normal((R, 6, 5)), "s": rng.standard_normal(R)}
    delta = {"a": rng.standard_normal((R, 6, 5)) * 1e3, "s": rng.standard_normal(R)}
    return [{k: x.astype(np.float32) for k, x in tree.items()} for tree in (anchor, delta)]


def means(regions, size, codec, weight):
    anchor, delta = values()
    delta["a"][2] = np.nan  # weight 0 must silence it
    inner = "fsdp" if regions.mesh.shape["fsdp"] == 2 else None
    specs = {"a": jax.P(inner), "s": jax.P()}
    exchange = GroupExchange(MeshExchange(regions, codec, specs), Gossip(size, 4))
    placed = [
        {k: jax.device_put(v, regions.sharding("region", *specs[k])) for k, v in tree.items()}
        for tree in (anchor, delta)
    ]
    like = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in anchor.items()}

    @jax.jit
    def run(anchor, delta, weight, draw):
        payload = delta
        if codec is not None:
            payload, _ = exchange.exchange.encode(delta, ())
        return exchange.means(payload, anchor, weight, draw, like)

    return jax.tree.map(np.array, run(*placed, weight, exchange.draw(ROUND)))


def by_hand(size, weight):
    """(mean delta, mean anchor, counts) with loops over the groups, in float64."""
    anchor, delta = values()
    out = [{k: np.zeros_like(x) for k, x in anchor.items()} for _ in range(2)]
    counts = np.zeros(R, bool)
    for group in lc.topology.Gossip(size, 4).groups(ROUND, R):
        counted = [r for r in group if weight[r] > 0]
        total = sum(float(weight[r]) for r in counted)
        for result, tree in zip(out, (delta, anchor)):
            for key, x in tree.items():
                for i in group:
                    if counted:
                        result[key][i] = sum(x[r] * float(weight[r]) for r in counted) / total
        counts[list(group)] = bool(counted)
    return out[0], out[1], counts


WEIGHT = np.array([1, 1, 0, 1, 1, 1, 1, 1], np.float32)
UNEVEN = np.array([1, 0.3, 0, 2.5, 0, 0.7, 0.1, 0], np.float32)
ALONE = np.array([0, 0, 0, 0, 0, 3, 0, 0], np.float32)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("codec", [None, "bf16"])
@pytest.mark.parametrize("weight", [WEIGHT, UNEVEN, ALONE], ids=["equal", "uneven", "alone"])
def test_means_are_those_of_the_groups(size, codec, weight):
    codec = codec and compression.make(codec)
    delta, anchor, counts = means(regions_on(1), size, codec, weight)
    want_delta, want_anchor, want_counts = by_hand(size, weight)
    for key in anchor:
        np.testing.assert_allclose(anchor[key], want_anchor[key], rtol=1e-6, atol=1e-6)
        rounding = {"rtol": 1e-6, "atol": 1e-3} if codec is None else {"rtol": 0.01, "atol": 8}
        np.testing.assert_allclose(delta[key], want_delta[key], **rounding)
    np.testing.assert_array_equal(counts, want_counts)


@pytest.mark.parametrize(("slots", "inner"), [(8, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize(("size", "codec"), [(2, None), (3, None), (2, "bf16"), (3, "int4")])
def test_means_are_bit_identical_on_every_mesh(slots, inner, size, codec):
    codec = codec and compression.make(codec)
    expected = means(regions_on(1), size, codec, WEIGHT)
    actual = means(regions_on(slots, inner), size, codec, WEIGHT)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# -- the engine -----------------------------------------------------------------------------------


def make(slots, inner=1, method=None):
    mesh = regions_on(slots, inner).mesh
    method = method or lc.methods.noloco(2, gamma=0.9)
    engine = lc.Engine(loss_fn, optax.sgd(0.05, momentum=0.8), method, R, mesh=mesh)
    return engine, engine.init(oracle.make_params())


@pytest.mark.parametrize("slots", [2, 8])
def test_training_is_bit_identical_on_every_mesh(slots):
    batches = oracle.make_batches(steps=12, regions=R)
    stream = [oracle.step_batch(batches, t) for t in range(1, 13)]
    ends = []
    for count in (1, slots):
        engine, state = make(count)
        state, _ = engine.run(state, stream)
        ends.append(jax.tree.map(np.array, (state.anchor, state.outer, state.inner.params)))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def compiled(engine, state):
    """The collectives of the landing program, and those of the send and the adoption."""
    loop = engine.sync_loop(state)
    leaves = loop.fragments.leaves(state.anchor, 0)
    specs = loop.programs.specs
    payload = {
        k: jax.device_put(np.zeros(x.shape, x.dtype), engine.regions.sharding("region", *specs[k]))
        for k, x in leaves.items()
    }
    weight = jax.device_put(np.ones(R, np.float32), engine.regions.sharding("region"))
    draw = Draw(loop.programs.groups.draw(ROUND))
    rows, everyone = loop.fragments.rows(0), np.ones(R, bool)
    local = state.inner.params
    arguments = {
        "outer": (
            AnchorState(leaves, state.outer[0]),
            Contributions(payload, weight, draw=draw),
            rows,
        ),
        "payload": (
            Values(local, {}),
            leaves,
            state.codec[0],
            rows,
            Senders(everyone, np.ones(R, np.float32)),
        ),
        "landing": (
            RegionState(Values(local, {}), state.landing[0]),
            LandingTarget(leaves),
            Adoption(everyone, everyone, np.zeros(R, np.int32)),
            rows,
            {},
        ),
    }
    options = {"payload": {"with_snapshot": False}}
    found = {
        name: collectives(
            getattr(loop.programs, f"{name}_program")
            .lower(*given, **options.get(name, {}))
            .compile()
            .as_text()
        )
        for name, given in arguments.items()
    }
    return found["outer"], found["payload"] + found["landing"]


@pytest.mark.parametrize(("slots", "inner"), [(8, 1), (4, 2)])
def test_a_landing_talks_to_partners_only(slots, inner):
    engine, state = make(slots, inner)

    def crossing(found):
        return [
            (kind, groups)
            for kind, groups in found
            if any(len({d // inner for d in group}) > 1 for group in groups)
        ]

    across, elsewhere = map(crossing, compiled(engine, state))
    assert not elsewhere
    assert {kind for kind, _ in across} == {"collective-permute"}
    rows, gossip = R // slots, engine.method.topology
    partitions = [gossip.partition(i, R) for i in range(gossip.count(R))]
    partners = [
        {(a // rows, b // rows) for group in found for a, b in itertools.permutations(group, 2)}
        for found in partitions
    ]
    for _, pairs in across:
        between = {(a // inner, b // inner) for a, b in pairs}
        assert any(between <= allowed for allowed in partners)
        assert all(a % inner == b % inner for a, b in pairs), "a shard left its place"
    if slots == R:
        assert len(across) == gossip.count(R), "one exchange of one buffer in each matching"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slots", [2, 8])
def test_the_limit_of_transfers_is_that_of_all_partitions_of_a_program(monkeypatch, size, slots):
    """Each slot's row goes to the others of its group, in every partition that may be drawn."""
    exchange = GroupExchange(MeshExchange(regions_on(slots)), Gossip(size, 3))
    most = exchange.topology.count(R) * R // slots * (size - 1)
    monkeypatch.setattr("lowcomm_jax.exchange.pairs.MOST_PERMUTES", most)
    assert exchange.violations() == []
    monkeypatch.setattr("lowcomm_jax.exchange.pairs.MOST_PERMUTES", most - 1)
    (told,) = exchange.violations()
    assert f"{R} regions in groups of {size} on {slots} region slots" in told
    assert f"a program of {most} transfers, more than {most - 1}" in told
    assert GroupExchange(MeshExchange(regions_on(1)), Gossip(size, 3)).violations() == []


def test_a_program_that_would_not_compile_is_refused():
    with pytest.raises(ValueError, match=r"more than 4096.*one region slot"):
        lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.noloco(2), 400, mesh=lc.make_mesh(region=8))


def test_weights_are_shares_of_the_largest_and_a_mean_passes_over_weight_zero():
    """An oracle: a group without weight has none, and NaN of weight 0 is left out."""
    weight_RxN = np.float32([[1, 4, 2], [0, 0, 0], [0, 3, 6]])
    shares_RxN = np.asarray(_relative(jnp.asarray(weight_RxN)))
    np.testing.assert_array_equal(shares_RxN, np.float32([[0.25, 1, 0.5], [0, 0, 0], [0, 0.5, 1]]))
    rows = [np.float32([[k + 1, -2 * k], [7, 8], [5 * k, k * k]]) for k in range(3)]
    rows[0][2] = np.nan
    found = _weighted_mean([jnp.asarray(row) for row in rows], jnp.asarray(weight_RxN))
    expected = np.zeros((3, 2))
    for region, weights in enumerate(weight_RxN):
        terms = [w * row[region] for w, row in zip(weights, rows) if w > 0]
        if terms:
            expected[region] = sum(terms) / sum(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("int8", "float32", "int8")])
def test_buffers_that_are_joined_come_apart_as_they_were(dtypes):
    sizes = [(jnp.dtype(dtype), 3 + 2 * i) for i, dtype in enumerate(dtypes)]
    buffers = [jnp.arange(2 * n).reshape(2, n).astype(dtype) - 4 for dtype, n in sizes]
    (joined,) = shares._join(buffers, 4)
    alike = len({*dtypes}) == 1
    assert joined.dtype == (dtypes[0] if alike else "uint32")
    for (dtype, _), before, after in zip(sizes, buffers, shares._split(joined, sizes)):
        assert after.dtype == dtype
        np.testing.assert_array_equal(after, before)
