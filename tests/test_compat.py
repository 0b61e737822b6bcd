"""The experimental JAX names of `compat`: fails when an upgrade of JAX moves one."""

import time

import jax
import numpy as np
import pytest

import lowcomm_jax as lc
from lowcomm_jax import compat


def test_all_gather_invariant_is_typed_equal_on_every_device():
    """`out_specs=P()` compiles only when the result is proven equal over the region axis."""
    mesh = lc.make_mesh(region=4, fsdp=2)
    x = np.arange(8, dtype=np.float32)
    gather = jax.shard_map(
        lambda part: compat.all_gather_invariant(part, "region", axis=0),
        mesh=mesh,
        in_specs=jax.P("region"),
        out_specs=jax.P(),
    )
    np.testing.assert_array_equal(jax.jit(gather)(x), x)


def test_bytes_are_pulled_between_servers_and_a_number_can_be_withdrawn():
    """Offers are replaced, not queued, which is what frees bytes that nobody has pulled."""
    holder, reader = compat.ByteServer("127.0.0.1:0"), compat.ByteServer("127.0.0.1:0")
    assert holder.address.startswith("127.0.0.1:") and holder.address != reader.address
    data = np.random.default_rng(0).bytes(100_001)
    connection = reader.connect(holder.address)
    for number in (7, 8):
        holder.offer(number, holder.array(data))
        assert np.asarray(reader.pull(connection, number, len(data))).tobytes() == data
    holder.offer(9, holder.array(data))
    holder.offer(9, holder.array(b"!"))
    assert np.asarray(reader.pull(connection, 9, 1)).tobytes() == b"!"
    # A pull of what is not offered waits without blocking; it comes when it is offered.
    late = reader.pull(connection, 10, 3)
    time.sleep(0.2)
    assert not late.is_ready()
    holder.offer(10, holder.array(b"two"))
    assert np.asarray(late).tobytes() == b"two" and late.is_ready()


def test_what_jax_distributed_knows_before_devices_are_settled():
    assert compat.process_count() == jax.process_count() == 1
    with pytest.raises(RuntimeError, match="initialize"):
        compat.coordinator_host()
