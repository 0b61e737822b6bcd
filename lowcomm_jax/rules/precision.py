"""fp32 arithmetic around a transform, whatever the dtype of what goes in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def widen(tree: PyTree) -> PyTree:
    """Cast floating leaves narrower than fp32 to fp32; other leaves keep their dtype."""

    def cast(leaf):
        leaf = jnp.asarray(leaf)
        narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        # astype drops a weak type too: a state built from it must not change type at step two.
        return leaf.astype(jnp.float32 if narrow else leaf.dtype)

    return jax.tree.map(cast, tree)


def narrow_like(tree: PyTree, like: PyTree) -> PyTree:
    """Cast every leaf of ``tree`` to the dtype of its partner in ``like``."""
    return jax.tree.map(lambda leaf, ref: leaf.astype(jnp.asarray(ref).dtype), tree, like)


def in_fp32(transform: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run ``transform`` in fp32 and let it accept any extra argument.

    The state is the state of ``transform`` on fp32 parameters. Updates come back in the dtype of
    ``params`` where they are given, else in the dtype of the incoming updates. So an fp32 anchor
    gets an fp32 update even from a narrow pseudo-gradient.

    >>> import jax.numpy as jnp, optax
    >>> rule = in_fp32(optax.sgd(1.0, momentum=0.9))
    >>> delta = jnp.ones(3, jnp.bfloat16)
    >>> state = rule.init(delta)
    >>> optax.tree.get(state, "trace").dtype
    dtype('float32')
    >>> update, state = rule.update(delta, state, step=7)
    >>> update.dtype
    dtype(bfloat16)
    """
    inner = optax.with_extra_args_support(transform)

    def init(params: PyTree) -> PyTree:
        return inner.init(widen(params))

    @functools.wraps(inner.update)  # its signature says which keywords the rule needs
    def update(updates, state, params=None, **extra):
        reference = updates if params is None else params
        wide_params = None if params is None else widen(params)
        result, state = inner.update(widen(updates), state, wide_params, **extra)
        return narrow_like(result, reference), state

    return optax.GradientTransformationExtraArgs(init, update)
