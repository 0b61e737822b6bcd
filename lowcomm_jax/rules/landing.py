r"""Landing rules: what a region's parameters become when a payload lands.

Each function gives an Optax transform. In: the progress $u$ made while the payload travelled, as
updates; the new anchor as `params`. Keywords: `displacement` ($D$), `staleness` (inner steps from
send to landing), and `fragment`, `round` and `step`. Out: $T(u)$, what the loop adds to the new
anchor. All arithmetic is fp32 (`precision.in_fp32`).

$$\theta \leftarrow \Theta' + T(u), \qquad u = \theta - s, \qquad D = \Theta' - s$$

| symbol | meaning |
| --- | --- |
| $\theta$ | local parameters |
| $s$ | snapshot of the local parameters at the send |
| $\Theta'$ | anchor after the outer step |
| $D$ | displacement of the anchor, seen from the snapshot |
"""

import jax
import optax

from lowcomm_jax.refused import in_range, refuse
from lowcomm_jax.rules.precision import in_fp32, widen
from lowcomm_jax.rules.taylor import TaylorState, taylor_delay_correction

__all__ = ["NAMES", "TaylorState", "blend", "replace", "replay", "taylor_delay_correction"]


def replace() -> optax.GradientTransformationExtraArgs:
    """Land exactly on the new anchor: T(u) = 0, the progress made in flight is dropped.

    Source: DiLoCo, arXiv 2311.08105, Algorithm 1; Streaming DiLoCo, arXiv 2501.18512, Algorithm 2
    with mixing weight 0.

    >>> import jax.numpy as jnp
    >>> rule = replace()
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)), displacement=jnp.ones(2), staleness=3)[0]
    Array([0., 0.], dtype=float32)
    """
    return in_fp32(optax.set_to_zero())


def replay() -> optax.GradientTransformationExtraArgs:
    """Keep the progress made while the payload travelled: T(u) = u.

    Source: CoCoDC, arXiv 2504.17672, delay compensation with strength 0. Differs from it: the paper
    always adds its quadratic term (`taylor_delay_correction`). With a fixed strength in parameter
    units that term is mostly below fp32 rounding, so that this rule remains.

    >>> import jax.numpy as jnp
    >>> rule = replay()
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)), displacement=jnp.ones(2), staleness=3)[0]
    Array([1., 1.], dtype=float32)
    """
    return in_fp32(optax.identity())


def blend(alpha: float) -> optax.GradientTransformationExtraArgs:
    r"""Land between the local value (alpha = 1) and the new anchor (alpha = 0).

    $$\theta \leftarrow \alpha\,\theta + (1 - \alpha)\,\Theta', \qquad T(u) = \alpha\,(u - D)$$

    The next pseudo-gradient is measured from the shared anchor. So the share
    $\alpha\,(s - \Theta')$ of drift that was already averaged is counted again; `replay` does not
    do that.

    Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2 (the last line of the receive).

    Args:
      alpha: weight of the local value, in [0, 1].

    Returns:
      A transform that needs the keyword `displacement` (the tree of the progress); no state.

    Raises:
      ValueError: alpha lies outside [0, 1].

    >>> import jax.numpy as jnp
    >>> rule = blend(0.25)
    >>> snapshot, local, anchor = jnp.zeros(2), jnp.ones(2), jnp.full(2, 5.0)
    >>> moved, _ = rule.update(
    ...     local - snapshot, rule.init(anchor), anchor, displacement=anchor - snapshot)
    >>> anchor + moved                                          # 0.25 * 1 + 0.75 * 5
    Array([4., 4.], dtype=float32)
    """
    refuse("blend", [in_range("alpha", alpha, 0.0, 1.0)])

    def init(params):
        del params
        return optax.EmptyState()

    def update(progress, state, params=None, *, displacement, **extra):
        del params, extra
        mixed = jax.tree.map(lambda u, d: alpha * (u - d), progress, widen(displacement))
        return mixed, state

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))


NAMES = {
    "blend": blend,
    "replace": replace,
    "replay": replay,
    "taylor_delay_correction": taylor_delay_correction,
}
