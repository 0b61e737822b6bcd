"""Codecs as Optax transforms: updates in, their decoded values out.

`optax.chain(compress("int4"), optax.sgd(0.7, momentum=0.9, nesterov=True))` is an outer update
whose pseudo-gradient has been through the wire, and works in any Optax program.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.ef21 import EF21State, ef21
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.compression.error_feedback import error_feedback as with_error_feedback
from lowcomm_jax.compression.registry import make
from lowcomm_jax.refused import refuse
from lowcomm_jax.settings import one_of

PyTree = Any


class CompressState(NamedTuple):
    """State of the codec: residual, warm bases, seeds."""

    codec: PyTree


def compress(
    codec: Codec | str, error_feedback: float | Literal["ef21"] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by the values that a receiver would decode.

    Args:
      codec: a codec or a name for `make`.
      error_feedback: decay of a residual in [0, 1]; `"ef21"` to send differences (the updates are
        then the receivers' copy); None for none.

    Returns:
      A transform of any tree of floats; fp32 arithmetic, updates keep their dtype. The error of
      rounding to that dtype enters the residual, too. A leaf that holds a value that is not finite
      comes back as NaN, whatever the codec makes of it, so that checks behind the transform see
      it. Its residual, or its receivers' copy, stays as it was. A codec that reads the weights
      needs `params` in `update`, which are theirs.

    Raises:
      ValueError: unknown codec name, a codec that needs the mean of all regions, decay out of
        range, unknown kind of feedback.

    >>> import jax.numpy as jnp
    >>> rule = optax.chain(compress("sign"), optax.sgd(1.0))
    >>> x = jnp.array([1.0, -3.0])
    >>> rule.update(x, rule.init(x))[0]
    Array([-2.,  2.], dtype=float32)
    """
    wire = make(codec) if isinstance(codec, str) else codec
    if wire.personal:
        raise ValueError(
            f"compress: {wire.name} makes something of its own of the regions' mean, which an "
            "Optax transform never sees; use error_feedback"
        )
    if isinstance(error_feedback, str):
        refuse("compress", [one_of("ef21").problem("error_feedback", error_feedback)])
        wire = ef21(wire)
    elif error_feedback is not None:
        wire = with_error_feedback(wire, error_feedback)

    def init(params):
        return CompressState(wire.init(params))

    def update(updates, state, params=None, **extra):
        del extra
        old, finite = state.codec, jax.tree.map(lambda u: jnp.isfinite(u).all(), updates)

        def where_finite(values, otherwise):
            return jax.tree.map(jnp.where, finite, values, otherwise)

        # Codes of NaN are finite, and a state that has seen NaN keeps it.
        sent = where_finite(updates, jax.tree.map(jnp.zeros_like, updates))
        payload, new = wire.encode(sent, old, params if wire.reads_params else None)
        received = new.copy if isinstance(new, EF21State) else wire.decode(payload, updates)
        returned = jax.tree.map(lambda r, u: r.astype(u.dtype), received, updates)
        if isinstance(new, ErrorFeedbackState):
            rest = jax.tree.map(_with_what_narrowing_took, new.residual, received, returned)
            new = new._replace(residual=where_finite(rest, old.residual))
        if isinstance(new, EF21State):
            new = new._replace(copy=where_finite(new.copy, old.copy))
        nothing = jax.tree.map(lambda u: jnp.full_like(u, jnp.nan), updates)
        return where_finite(returned, nothing), CompressState(new)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_what_narrowing_took(residual, received, returned):
    if returned.dtype == jnp.float32:
        return residual
    # Held, else compilers of GPUs drop the way to a narrower float and back.
    returned = jax.lax.optimization_barrier(returned)
    return residual + (received - returned.astype(jnp.float32))
