"""A reduction on meshes: against NumPy, with replicas of both kinds, and one collective at a time.

Sizes that divide over nothing, weights of which one is 0, and NaN in that region's payload.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_cases import parts_of
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import make
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions, make_mesh

R = 4
LIKE = {
    "w": jax.ShapeDtypeStruct((17, 5), np.float32),
    "s": jax.ShapeDtypeStruct((4,), np.float32),
}
WEIGHT = np.array([1.0, 2.5, 0.0, 0.5], np.float32)
KINDS = {
    "dense": (None, False),
    "dense, one by one": (None, True),
    "two-shot": ({"name": "int8", "reduce": "two_shot"}, False),
    "all-gather": ({"name": "int8", "reduce": "all_gather"}, False),
    "coded, one by one": ({"name": "int8", "reduce": "all_gather"}, True),
}


def exchange_on(slots, kind, replicas="map", inner=1, specs=None):
    codec, one_by_one = KINDS[kind]
    mesh = make_mesh(region=slots, fsdp=inner, devices=jax.devices()[: slots * inner])
    regions = Regions(R, mesh, replicas)
    made = codec and make(codec)
    parts = made and parts_of(made, [LIKE], R)
    return MeshExchange(regions, made, specs or {}, one_by_one, parts)


def deltas():
    rng = np.random.default_rng(3)
    return {k: rng.standard_normal((R, *x.shape)).astype(np.float32) for k, x in LIKE.items()}


def programs(exchange, weight=WEIGHT):
    """(payload, what the landing makes of it, what the collectives one by one make of it)."""
    codec = exchange.codec
    states = () if codec is None else jax.tree.map(lambda s: np.stack([s] * R), codec.init(LIKE))
    given = {
        k: jax.device_put(x, exchange.regions.sharding("region", *exchange.specs.get(k, P())))
        for k, x in deltas().items()
    }

    @jax.jit
    def run(delta_R, states, weight_R):
        payload = delta_R
        if codec is not None:
            payload, _ = exchange.encode(delta_R, states)

        def landed(brought=None):
            if exchange.one_by_one:
                return exchange.everyone(payload, LIKE, brought)
            return (
                exchange.reduce(payload, weight_R, LIKE).mean
                if brought is None
                else (exchange.reduce(payload, weight_R, LIKE, brought=brought).mean)
            )

        if exchange.collectives == 0:
            return payload, landed(), landed()
        buffers = exchange.begin(payload, LIKE)
        if exchange.collectives == 2:
            buffers = exchange.go_on(buffers, payload, weight_R, LIKE)
        return payload, landed(), landed(buffers)

    return jax.tree.map(np.asarray, run(given, states, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_at_a_time_comes_to_the_same(kind):
    """On four slots, as on one, with replicas of both kinds on two."""
    expected = programs(exchange_on(1, kind))[1]
    for slots, replicas in ((4, "map"), (2, "map"), (2, "vmap")):
        exchange = exchange_on(slots, kind, replicas)
        _, whole, by_parts = programs(exchange)
        for key in LIKE:
            np.testing.assert_array_equal(whole[key], by_parts[key], f"{slots} {replicas} {key}")
            np.testing.assert_array_equal(whole[key], expected[key], f"{slots} {replicas} {key}")


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_where_devices_of_a_region_have_shards(kind, monkeypatch):
    """Rows are coded where they lie, so that payloads are cut as well."""
    monkeypatch.setitem(LIKE, "w", jax.ShapeDtypeStruct((64, 8), np.float32))
    alone = programs(exchange_on(1, kind))[1]
    exchange = exchange_on(2, kind, inner=2, specs={"w": P(None, "fsdp")})
    _, whole, by_parts = programs(exchange)
    for key in LIKE:
        np.testing.assert_array_equal(whole[key], by_parts[key], key)
        np.testing.assert_array_equal(whole[key], alone[key], key)


@pytest.mark.parametrize("kind", ["dense", "two-shot", "all-gather"])
def test_the_mean_is_that_of_the_weights(kind):
    """Rounded twice where slices are coded again: by an eighth of a value at most here."""
    delta = deltas()
    _, found, _ = programs(exchange_on(1, kind))
    for key, x in delta.items():
        mean = sum(float(w) * x[r].astype(np.float64) for r, w in enumerate(WEIGHT)) / WEIGHT.sum()
        bound = 1e-6 if kind == "dense" else 3 * np.abs(x).max() / 127
        np.testing.assert_allclose(found[key][0], mean, atol=bound, rtol=0)


@pytest.mark.parametrize("kind", ["dense, one by one", "coded, one by one"])
def test_everyones_payloads_are_decoded_one_by_one(kind):
    delta = deltas()
    _, found, _ = programs(exchange_on(4, kind))
    for key, x in delta.items():
        bound = 0 if kind.startswith("dense") else np.abs(x).max() / 127
        np.testing.assert_allclose(found[key], x, atol=bound, rtol=0)


def test_how_many_collectives_a_reduction_does():
    number = {kind: exchange_on(4, kind).collectives for kind in KINDS}
    assert number == {
        "dense": 2,
        "dense, one by one": 1,
        "two-shot": 2,
        "all-gather": 1,
        "coded, one by one": 1,
    }
    assert all(exchange_on(1, kind).collectives == 0 for kind in KINDS)


@pytest.mark.parametrize("slots", [1, 4])
def test_who_is_not_accepted_keeps_its_state(slots):
    """Its residual as it was, even if its values are not finite; the others' is what was lost."""
    codec = make({"name": "int8", "error_feedback": 0.5, "reduce": "all_gather"})
    regions = Regions(R, make_mesh(region=slots, devices=jax.devices()[:slots]), "map")
    exchange, delta = MeshExchange(regions, codec), deltas()
    before = jax.tree.map(lambda s: np.stack([s] * R), exchange.codec.init(LIKE))
    before = jax.tree.map(
        lambda x: x + np.float32(0.25) if x.dtype == np.float32 and x.ndim > 1 else x, before
    )
    delta["w"][2] = np.nan
    accepted = np.array([True, False, False, True])

    @jax.jit
    def run(delta_R, states, accepted_R):
        plain = exchange.encode(delta_R, states)
        payload, new, missed, _ = exchange.encode_and_measure(delta_R, states, accepted_R)
        return plain, (payload, new, missed), exchange.decode(payload, LIKE)

    (_, every), (_, some, missed), decoded = jax.tree.map(np.asarray, run(delta, before, accepted))
    told = 0
    for old, new, guarded in zip(*map(jax.tree.leaves, (before, every, some)), strict=True):
        told += bool(np.any(new[0] != old[0]))
        for region, yes in enumerate(accepted):
            np.testing.assert_array_equal(guarded[region], (new if yes else old)[region])
    assert told, "a residual has changed"
    for region in (0, 1, 3):
        squares = sum(
            np.sum((decoded[k][region].astype(np.float64) - delta[k][region]) ** 2) for k in LIKE
        )
        np.testing.assert_allclose(missed[region], np.sqrt(squares), rtol=1e-4)
    assert jnp.isnan(missed[2])
