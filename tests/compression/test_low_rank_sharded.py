"""Low-rank factors of matrices that a region's devices share: never gathered, and the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.collectives import sent_across, sized
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import make
from lowcomm_jax.compression.codecs import low_rank
from lowcomm_jax.compression.codecs.low_rank import Parts, column_chunks
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.placement import place
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions, make_mesh

R, RANK = 2, 8
TALL = (256, 48)  # a device of four holds 64 rows, more than the rank
WIDE = (48, 256)
BY_ROWS, BY_COLUMNS = P("fsdp"), P(None, "fsdp")
CASES = {
    "tall by rows": (TALL, BY_ROWS, {"fsdp": 4}),
    "wide by columns": (WIDE, BY_COLUMNS, {"fsdp": 4}),
    "tall by columns": (TALL, BY_COLUMNS, {"fsdp": 4}),
    "by both": (TALL, P("fsdp", "tensor"), {"fsdp": 2, "tensor": 2}),
}


def two_rounds(shape, spec, mesh):
    """(mean of the second round, Q, all collectives inside a region)."""
    regions = Regions(R, make_mesh(region=R, **mesh))
    exchange = MeshExchange(regions, make("low_rank", rank=RANK), {"w": spec})
    like = {"w": jax.ShapeDtypeStruct(shape, np.float32)}
    values = np.random.default_rng(0).standard_normal((R, *shape)).astype("f4")
    delta_R = {"w": jax.device_put(values, regions.sharding("region", *spec))}
    states = jax.tree.map(lambda s: np.stack([s] * R), exchange.codec.init(like))

    def run(delta_R, states):
        for _ in range(2):
            payload, states = exchange.encode(delta_R, states)
        return exchange.reduce(payload, np.ones(R, np.float32), like).mean["w"], states

    program = jax.jit(run).lower(delta_R, states).compile()
    mean, states = program(delta_R, states)
    inside = [c for c in sized(program.as_text()) if not sent_across([c], 4, R).any()]
    return np.asarray(mean[0]), np.asarray(states[0]["q"]), inside


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("largest", [1 << 26, 4 * 256 * 2])  # at once; in four chunks
def test_factors_of_shards_are_those_of_the_whole(case, largest, monkeypatch):
    shape, spec, mesh = CASES[case]
    whole, q, _ = two_rounds(shape, P(), {})
    monkeypatch.setattr(low_rank, "_LARGEST", largest)
    assert column_chunks((1, *shape), RANK) == (1 if largest > 4096 else 4)
    mean, kept, inside = two_rounds(shape, spec, mesh)
    np.testing.assert_allclose(mean, whole, atol=2e-5)
    # P may come out turned against the whole one's, and Q' with it: its span is what counts.
    project = [x @ np.linalg.pinv(x) for x in (q[0, 0], kept[0, 0])]
    np.testing.assert_allclose(*project, atol=1e-4)
    gathered = [c.nbytes for c in inside if c.kind == "all-gather"]
    # Chunks of factors, and the triangles of every device: never X, nor P whole where it is tall.
    assert max(gathered, default=0) < 4 * np.prod(shape) / 2


@pytest.mark.parametrize("case", CASES)
def test_the_rank_of_a_mean_is_measured_without_gathering_factors(case):
    """Regions of ranks 3 and 2 with values of 1, 1/2 and 1/4: a mean of rank 5."""
    shape, spec, mesh = CASES[case]
    rng, values = np.random.default_rng(3), []
    for scales in ((1.0, 0.5, 0.25), (1.0, 0.5)):
        u, v = (np.linalg.qr(rng.standard_normal((n, len(scales))))[0] for n in shape)
        values.append((u * scales) @ v.T)
    values = np.stack(values).astype("f4")
    squares = np.linalg.svd(values.mean(0), compute_uv=False) ** 2
    shares = np.cumsum(squares) / squares.sum()

    def ranks(spec, mesh):
        regions = Regions(R, make_mesh(region=R, **mesh))
        exchange = MeshExchange(regions, make("low_rank", rank=RANK), {"w": spec})
        like = {"w": jax.ShapeDtypeStruct(shape, np.float32)}
        delta_R = {"w": jax.device_put(values, regions.sharding("region", *spec))}
        states = jax.tree.map(lambda s: np.stack([s] * R), exchange.codec.init(like))

        payload, _ = jax.jit(exchange.encode)(delta_R, states)

        def rank(payload, energy):
            return exchange.reduce(payload, np.ones(R, np.float32), like, energy).rank

        program = jax.jit(rank).lower(payload, 0.5).compile()
        inside = [c for c in sized(program.as_text()) if not sent_across([c], 4, R).any()]
        return [int(program(payload, e)) for e in (0.5, 0.8, 0.95, 0.999)], inside

    expected = [int(np.sum(shares < e)) + 1 for e in (0.5, 0.8, 0.95, 0.999)]
    assert len(set(expected)) == 4
    found, inside = ranks(spec, mesh)
    assert found == ranks(P(), {})[0] == expected
    # Factors of all regions are moved in parts, none is gathered.
    gathered = [c.nbytes for c in inside if c.kind == "all-gather"]
    assert max(gathered, default=0) < 4 * R * RANK * max(shape) / 2


def test_chunks_divide_the_rank():
    assert [column_chunks((1, n, 8), 6) for n in (8, 1 << 22, 1 << 23, 1 << 40)] == [1, 2, 3, 6]


def test_columns_of_shards_are_orthonormal():
    x = jax.random.normal(jax.random.key(0), (3, 64, 8))
    mesh, cut = make_mesh(region=1, fsdp=4), P(None, "fsdp")
    parts = Parts(place(Unit(1, 1), (3, 64, 64), True, cut, {"fsdp": 4}))

    def factors(x):
        return low_rank.orthonormal_over_rows(x, parts)

    run = Regions(1, mesh).on_devices(factors, (0,), (cut,), cut)
    p = jax.jit(run)(x[None])[0]
    np.testing.assert_allclose(
        jnp.swapaxes(p, 1, 2) @ p, np.eye(8) + np.zeros((3, 8, 8)), atol=1e-5
    )
    np.testing.assert_allclose(p @ (jnp.swapaxes(p, 1, 2) @ x), x, atol=1e-4)
