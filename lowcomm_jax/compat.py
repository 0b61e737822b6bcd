"""JAX names that are experimental or may move; only this module uses them.

Each has a test (`tests/test_compat.py`) that fails when an upgrade of JAX moves the name.
"""

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import transfer

__all__ = ["ByteServer", "all_gather_invariant", "coordinator_host", "process_count"]


def coordinator_host() -> str:
    """Host on which the first process of this `jax.distributed` job is reached.

    Raises:
      RuntimeError: `jax.distributed.initialize` was not called.
    """
    address = distributed.global_state.coordinator_address
    if address is None:
        raise RuntimeError(
            "jax.distributed.initialize() was not called; call it (lc.connect_processes) first"
        )
    return address.rpartition(":")[0].strip("[]")


def all_gather_invariant(x: jax.Array, axis_name: str | tuple[str, ...], *, axis: int) -> jax.Array:
    """Gather `x` along `axis_name`; the result is typed equal on every device of that axis."""
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")


def process_count() -> int:
    """Number of processes of this job; unlike `jax.process_count` it starts no backend."""
    return distributed.global_state.num_processes


class ByteServer:
    """Offers bytes to other processes under numbers, and pulls theirs.

    Plain TCP, without authentication or encryption. Bytes pass through host memory only.

    Attributes:
      address: "host:port" where others connect to.

    Raises:
      ValueError: this process has no CPU backend, or the address cannot be used.
    """

    def __init__(self, address: str):
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise ValueError(
                f"payloads pass through the host: add cpu to JAX_PLATFORMS ({error})"
            ) from None
        host = address.rpartition(":")[0]
        try:
            start = transfer.start_transfer_server
            self._server = start(self._device.client, address, [f"{host}:0"])
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"address {address!r} cannot be listened on ({error}): give HOST:PORT of this "
                "machine with a port that is free, or port 0 for any"
            ) from None
        self.address = self._server.address()

    def offer(self, number: int, data: jax.Array) -> None:
        """Let one pull of this number have `data` (see `array`), instead of earlier data."""
        self._server.await_pull(number, [data])

    def array(self, data: bytes) -> jax.Array:
        """Bytes in the form that `offer` takes: uint8 `[nbytes]`, at least one."""
        return jax.device_put(np.frombuffer(data, np.uint8), self._device)

    def connect(self, address: str) -> transfer.TransferConnection:
        """A connection to another server; useless once a pull on it has failed."""

        return self._server.connect(address)

    def pull(self, connection: transfer.TransferConnection, number: int, nbytes: int) -> jax.Array:
        """Begin to pull the bytes offered under a number; returns at once.

        Returns:
          uint8 `[nbytes]`; `is_ready()` once the bytes are here or the connection broke; reading
          it then raises RuntimeError in the second case. It never is ready if they are not offered.
        """
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        struct = jax.ShapeDtypeStruct((nbytes,), np.uint8, sharding=sharding)
        return connection.pull(number, [struct])[0]
