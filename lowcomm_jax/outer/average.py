r"""Parameter averaging: the new anchor is the mean of the regions' parameters.

$$\Theta \leftarrow \Theta - \bar\Delta = \tfrac1R \sum_r \theta_r$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | mean over regions of $\Theta - \theta_r$ |
| $\Theta$ | anchor |
| $\theta_r$ | parameters of region $r$; $R$ regions |

Source: FederatedAveraging, arXiv 1602.05629, Algorithm 1; local SGD, arXiv 1805.09767.

Differs from the paper: written as a step of rate 1 along the pseudo-gradient, so the mean of the
parameters comes out up to fp32 rounding.
"""

import optax

from lowcomm_jax.outer.sgd import sgd


def average() -> optax.GradientTransformationExtraArgs:
    """Move the anchor onto the mean of the regions.

    Returns:
      A transform of the mean pseudo-gradient (any tree; fp32 arithmetic).

    >>> import jax.numpy as jnp
    >>> rule = average()
    >>> anchor, mean_of_regions = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0])
    >>> update, _ = rule.update(anchor - mean_of_regions, rule.init(anchor), anchor)
    >>> anchor + update
    Array([0.5, 4. ], dtype=float32)
    """
    return sgd(1.0)
