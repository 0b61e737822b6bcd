"""What a compiled send holds beside its arguments and results."""

import jax
import jax.numpy as jnp
import optax
import pytest
from aot.aot_cases import M, needs
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.aot import ahead_of_time
from lowcomm_jax.compression import error_feedback, make
from lowcomm_jax.compression.placement import LARGEST


def temporaries(
    target: str, fsdp: int, codec, shape: tuple[int, ...], spec: P, regions: int = 2
) -> int:
    """Bytes of one device in a send of a leaf of this shape, in layers where it has three axes."""

    def loss_fn(params, batch, rng):
        del rng
        return jnp.mean(params["w"]) * jnp.mean(batch)

    found = needs(target)
    method = M.diloco(8, codec=error_feedback(codec, 0.95))
    engine = lc.Engine(
        loss_fn,
        optax.sgd(1e-3),
        method,
        regions,
        mesh=found.mesh(region=regions, fsdp=fsdp),
        specs=lambda name, leaf: spec,
        stacked=("w",) if len(shape) == 3 else (),
    )
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    report = ahead_of_time(engine, params, jax.ShapeDtypeStruct((8, 1), jnp.float32), found)
    (send,) = (program for program in report.programs if program.name == "send")
    return send.memory["temporaries"]


def test_a_table_of_units_that_do_not_divide_is_coded_in_shares():
    """125 x 7 units of 64 x 64 by 8 devices: each holds about 16 x 7 at a time."""
    shape = 125 * 64, 7 * 64
    held = temporaries("h100:2x8", 8, make("topk_stat2"), shape, P(None, "fsdp"))
    assert held < 4 * shape[0] * shape[1]


@pytest.mark.parametrize(
    "name, shape, spec",
    [
        ("topk", (61, 539992), P(None, "fsdp")),  # one unit down, padded ones along the cut
        ("topk_stat2", (32003, 768), P(None, "fsdp")),  # a vocabulary that nothing divides
        ("random_k", (5525, 6000), P(None, "fsdp")),  # odd rows that are joined
    ],
)
def test_large_padded_matrices_are_not_gathered(name, shape, spec):
    held = temporaries("h100:2x8", 8, make(name), shape, spec)
    assert held < 0.8 * 4 * shape[0] * shape[1]


def test_layers_of_a_large_stack_change_one_state():
    """Low rank of 9 matrices, one after the other: not an old and a new Q beside the state's."""
    layers, n, rank = 9, 2048, 512
    codec = make("low_rank_int4", rank=rank, stacked=("w",))
    held = temporaries("h100:2x1", 1, codec, (layers, n, n), P())
    assert held < 4 * layers * n * (n + 2 * rank)  # the values, and what one layer takes


def test_slices_of_a_matrix_above_128_mib_take_less_than_that_beside_the_shards():
    """24 rows by 8 devices for 4 slices: devices would fill up by a third, and are in shares."""
    shape, codec = (24, 256 * 8193), make("int4", reduce="two_shot")
    held = temporaries("h100:4x8", 8, codec, shape, P("fsdp"), regions=4)
    shard = 4 * shape[0] * shape[1] // 8
    assert held - 2 * shard < LARGEST < 8 * shard
    like = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    placed = codec.in_slices(4).placed(like, {"w": P("fsdp")}, {"fsdp": 8}, False)
    assert placed.dealt_nbytes(like) == codec.nbytes(like)
