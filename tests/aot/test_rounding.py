"""What a narrow float loses is still lost in the programs of accelerators.

XLA may drop a conversion to a narrower float and back, and does so for GPUs: residuals and measured
errors of `bf16` and `fp16` were 0 there, while the payload that travelled was rounded.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from aot.aot_cases import needs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowcomm_jax import compression

BACK = re.compile(r"= f32\[\S+ convert\(")


def compiled(target, fn, *shapes):
    """The text of a program of one device for arguments of these (shape, dtype)."""
    sharding = NamedSharding(needs(target).mesh(), P())
    given = [jax.ShapeDtypeStruct(*one, sharding=sharding) for one in shapes]
    return jax.jit(fn).lower(*given).compile().as_text()


@pytest.mark.parametrize("target", ["h100:1x1", "v5e:2x2"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_residual_holds_what_rounding_took(target, name):
    codec = compression.make(name, error_feedback=1.0)

    def residual(x):
        payload, state = codec.encode({"x": x}, codec.init({"x": x}))
        return payload, state.residual

    assert BACK.search(compiled(target, residual, ((256, 128), jnp.float32)))


@pytest.mark.parametrize("target", ["h100:1x1", "v5e:2x2"])
def test_the_view_of_updates_in_bf16_keeps_what_they_lose(target):
    view = compression.compress("fp32", error_feedback=1.0)

    def step(update, residual):
        state = view.init({"x": update})
        state = state._replace(codec=state.codec._replace(residual={"x": residual}))
        return view.update({"x": update}, state)

    shape = 256, 128
    # The update is widened, and once more what is returned.
    assert (
        len(BACK.findall(compiled(target, step, (shape, jnp.bfloat16), (shape, jnp.float32)))) > 1
    )


def test_it_would_be_seen():
    """Without the barrier a GPU's program has no way back."""
    dropped = compiled(
        "h100:1x1", lambda x: x - x.astype(jnp.bfloat16).astype(jnp.float32), ((256,), jnp.float32)
    )
    assert not BACK.search(dropped)
