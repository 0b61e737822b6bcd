"""Loops of their own, for methods whose exchange is no act behind the inner steps.

In: a method. Out: its `round_programs.Family`, whose loop takes the place of `SyncLoop`. All are
made of the pure functions of `sync`, which names none of them.

- Gradients exchanged at every step (DDP, DeMo): `gradient_exchange`.
- Channels (SPARTA, DES-LOC): `channel_exchange` inside the inner program, `channel_loop` beside it.
- Workers, local servers and a global one (HALoS): `two_level_loop`, `server_programs`.
"""

from lowcomm_jax.loops.channel_loop import ChannelPrograms
from lowcomm_jax.loops.gradient_exchange import GradientPrograms
from lowcomm_jax.loops.two_level_loop import ServerPrograms
from lowcomm_jax.methods.base import Method
from lowcomm_jax.sync.round_programs import Family


def family_of(method: Method) -> type[Family] | None:
    """The family of a method with a loop of its own; None = it has none."""
    if method.signal == "gradient":
        return GradientPrograms
    if method.channels:
        return ChannelPrograms
    return None if method.servers is None else ServerPrograms
